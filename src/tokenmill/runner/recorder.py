"""Steps that are replayed. Owns: the seam between plans and recordings, and the two kinds of recordings.

Python between two native calls costs more than most of these calls take. A recording makes all calls of a step again,
on the memory they were made on. A layout says which plans it takes, where their inputs lie and what is computed from
them. Recordings keep the results by key. A CUDA graph is made ahead, for steps that are filled up to rungs. A native
tape is made when a step comes a second time, for exactly its size.
Must not know: sampling, the scheduler, what the keys mean.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tokenmill.compute.forward import Again, ForwardContext, Kernels
from tokenmill.compute.model import CausalLM
from tokenmill.core.step import StepPlan
from tokenmill.device.graphs import Recorder, Recording
from tokenmill.kvcache.pool import KVPool
from tokenmill.runner.batch import Batch
from tokenmill.runner.rows import Rows

SPILL = 1 << 20
"""Bytes that a recording may take for itself, beside the room of all."""
K = TypeVar("K", bound=Hashable)
Best = tuple[Tensor, Tensor, Tensor]
"""What `Kernels.greedy` gives."""


@dataclass(slots=True)
class Made:
    """What a recording computes, in tensors that each replay fills again; logits, best: None where it ends before."""

    tokens: Tensor
    token_rows: Tensor
    hidden: Tensor
    ctx: ForwardContext
    logits: Tensor | None = None
    best: Best | None = None


@dataclass(slots=True)
class Step:
    """A step that has been enqueued: its batch and final hidden states [T, hidden]; of the lines that sample logits
    and the most likely tokens, if they were made on the way."""

    batch: Batch
    hidden: Tensor
    logits: Tensor | None = None
    best: Best | None = None


class StepRecorder(Protocol):
    """Runs steps of some kind from recordings."""

    def fits(self, plan: StepPlan) -> bool: ...
    def warm(self) -> None:
        """Record ahead what can be, so that no request waits for it."""
        ...

    def replay_step(self, plan: StepPlan) -> Step | None:
        """Enqueue the plan's step; None: it is not recorded (yet)."""
        ...

    def forget_weights(self) -> None:
        """Weights have new numbers where they stand."""
        ...

    def forget_adapted(self) -> None:
        """Adapters change products that recordings with adapters do not know of."""
        ...

    def forget_all(self) -> None:
        """Kernels are chosen otherwise from now on."""
        ...


class Layout(Generic[K]):
    """How steps of one kind lie in memory."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool) -> None:
        self.model = model
        self.kernels = kernels
        self.rows = rows
        self.pool = pool
        self.kinds: tuple[bool, ...] = (False,)
        """Of what is recorded ahead: without adapters, with them."""

    def takes(self, plan: StepPlan) -> bool:
        """Is this a step of the kind?"""
        raise NotImplementedError

    def key(self, plan: StepPlan) -> K:
        """What tells recordings apart."""
        raise NotImplementedError

    def fill(self, key: K, plan: StepPlan | None) -> None:
        """Put the plan where recordings of this key read it; None: the row that is nobody's."""
        raise NotImplementedError

    def computing(self, key: K) -> Callable[[], Made]:
        """What is computed from there."""
        raise NotImplementedError

    def step(self, key: K, plan: StepPlan, made: Made) -> Step:
        """What was computed for the plan's rows."""
        raise NotImplementedError

    def keeps(self, key: K) -> bool:
        """Is a recording worth its memory?"""
        return True

    def ahead(self) -> Iterable[K]:
        """Keys to record before they are asked for, largest first: its memory serves the others."""
        return ()

    def adapted(self, key: K) -> bool:
        """Are there adapters in steps of this key?"""
        raise NotImplementedError

    def forget_adapted(self) -> None:
        """Let go of what the layout itself has recorded of steps with adapters."""

    def follow(self, key: K, made: Made) -> None:
        """Compile what comes after such a step and is not recorded."""

    def simplify(self) -> bool:
        """Compute less from now on; False: there is nothing to leave out."""
        return False


class Recordings(Protocol[K]):
    """Recordings of one layout's steps. possible: False once it is known that this model cannot be recorded."""

    possible: bool

    def warm(self, layout: Layout[K]) -> None: ...
    def replay(self, key: K, layout: Layout[K], plan: StepPlan) -> Made | None:
        """Compute the plan's step once (layers overwrite states); None: not recorded, and nothing was computed."""
        ...

    def forget_weights(self) -> None: ...
    def forget(self, which: Callable[[K], bool]) -> None:
        """Let go of the recordings of these keys."""
        ...


class RecordedSteps(Generic[K]):
    """The one StepRecorder: a layout over recordings."""

    def __init__(self, layout: Layout[K], recordings: Recordings[K]) -> None:
        self.layout = layout
        self.recordings = recordings

    def fits(self, plan: StepPlan) -> bool:
        return self.recordings.possible and self.layout.takes(plan)

    def warm(self) -> None:
        self.recordings.warm(self.layout)

    def replay_step(self, plan: StepPlan) -> Step | None:
        key = self.layout.key(plan)
        made = self.recordings.replay(key, self.layout, plan)
        return None if made is None else self.layout.step(key, plan, made)

    def forget_weights(self) -> None:
        self.recordings.forget_weights()

    def forget_all(self) -> None:
        self.recordings.forget(lambda key: True)

    def forget_adapted(self) -> None:
        self.layout.forget_adapted()
        self.recordings.forget(self.layout.adapted)


class Graphs(Generic[K]):
    """CUDA graphs; `recorder` may be shared, as one step runs after the other."""

    def __init__(self, kernels: Kernels, recorder: Recorder) -> None:
        self.kernels = kernels
        self.recorder = recorder
        self.made: dict[K, Recording[Made]] = {}
        self.possible = True
        self.proven: set[bool] = set()
        """Kinds of steps (with adapters, without) of which one has run for real before it was recorded."""

    def warm(self, layout: Layout[K]) -> None:
        """Record the layout's keys."""
        for key in layout.ahead():
            recording = self._find(key, layout)
            if recording is not None:
                layout.follow(key, recording.made)

    def replay(self, key: K, layout: Layout[K], plan: StepPlan) -> Made | None:
        """Enqueue the recording of this key, made if need be."""
        recording = self._find(key, layout)
        if recording is None:
            return None
        layout.fill(key, plan)
        return recording.replay()

    def forget_weights(self) -> None:
        """Nothing: a graph reads the tensors that a weight settled into, and these stay where they are."""

    def forget(self, which: Callable[[K], bool]) -> None:
        """Their memory is the others', too, and comes back with them."""
        for key in [key for key in self.made if which(key)]:
            del self.made[key]

    def _find(self, key: K, layout: Layout[K]) -> Recording[Made] | None:
        """None: an operation of this model waits for the device."""
        if key not in self.made and self.possible:
            layout.fill(key, None)  # with the row that is nobody's: no other's state goes on
            compute, kind = layout.computing(key), layout.adapted(key)
            found = self._at_once(compute) if kind in self.proven else None
            if found is None:
                before = self.kernels.waits
                compute()  # scratch is taken, and it shows whether something waits
                self.possible = self.kernels.waits == before
                found = self.recorder.record(compute) if self.possible else None
            if found is not None:
                self.proven.add(kind)
                self.made[key] = found
        return self.made.get(key)

    def _at_once(self, compute: Callable[[], Made]) -> Recording[Made] | None:
        """A recording of work that has never run: half of the time that a start takes for each. None: it does something
        first that steps of this kind had not done yet, and must run before."""
        before = self.kernels.waits
        try:
            found = self.recorder.record(compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None
        return found if self.kernels.waits == before else None


class Tapes(Generic[K]):
    """Native tapes. All share one room for their temporary tensors: they run one after the other.

    The room begins as zeros, because a model that turns out not to be recordable has torch read entries of gathered
    tables that do not count."""

    def __init__(self, kernels: Kernels, room_bytes: int) -> None:
        self.kernels = kernels
        self.room_bytes = room_bytes
        self.room: Tensor | None = None
        self.made: dict[K, tuple[Made, Again]] = {}
        self.seen: set[K] = set()
        self.spilled: set[K] = set()
        """Keys whose recordings would take memory of their own."""
        self.possible = True

    def forget_weights(self) -> None:
        """Tapes name copies that the kernels made of small tensors: steps that come again are recorded again."""
        self.made.clear()
        self.seen.clear()

    def forget(self, which: Callable[[K], bool]) -> None:
        """Steps of these keys that come again are recorded again."""
        for key in [key for key in self.made if which(key)]:
            del self.made[key]

    def warm(self, layout: Layout[K]) -> None:
        """Nothing: the first steps pack weights and bind descriptors, the next ones record themselves."""

    def replay(self, key: K, layout: Layout[K], plan: StepPlan) -> Made | None:
        """Compute the step, and keep a recording where one can be made."""
        layout.fill(key, plan)
        found = self.made.get(key)
        if found is not None:
            found[1]()
            return found[0]
        if key not in self.seen:
            self.seen.add(key)
            return None
        keeps = layout.keeps(key) and key not in self.spilled
        if not keeps and (self.made or key in self.spilled):
            return layout.computing(key)()
        if self.room is None:  # numpy's zeros take memory when they are first used
            self.room = torch.from_numpy(np.zeros(self.room_bytes, dtype=np.uint8))
        made, again = self.kernels.record(layout.computing(key), self.room)
        if again is None:
            self.possible = layout.simplify()
        elif again.spilled > SPILL:
            self.spilled.add(key)
        elif keeps:
            self.made[key] = made, again
        return made


def logits_suffice(rows: Rows, plan: StepPlan) -> bool:
    """Nothing but this moment's hidden states or logits is wanted: no embeddings, no logprobs of prompts."""
    params = rows.sampling.params
    return not rows.pools and all(params[row].num_prompt_logprobs < 0 for row in plan.rows)
