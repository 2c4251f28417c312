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
from tokenmill.runner.graph_maker import GraphMaker
from tokenmill.runner.rows import Rows

SPILL = 1 << 20
"""Bytes of its own that a recording may take, besides the room that all recordings share."""
K = TypeVar("K", bound=Hashable)
Best = tuple[Tensor, Tensor, Tensor]
"""What `Kernels.greedy` returns."""


@dataclass(slots=True)
class Made:
    """What a recording computes, in tensors that each replay fills again. logits, best: None if it ends before
    these."""

    tokens: Tensor
    token_rows: Tensor
    hidden: Tensor
    ctx: ForwardContext
    logits: Tensor | None = None
    best: Best | None = None


@dataclass(slots=True)
class Step:
    """A step that has been enqueued: its batch and its final hidden states [T, hidden]; also the logits and the most
    likely tokens of the sampled lines, if the recording computed them."""

    batch: Batch
    hidden: Tensor
    logits: Tensor | None = None
    best: Best | None = None


class StepRecorder(Protocol):
    """Runs steps of some kind from recordings."""

    def fits(self, plan: StepPlan) -> bool: ...
    def warm(self) -> None:
        """Record ahead what can be recorded, so that no request waits for it."""
        ...

    def replay_step(self, plan: StepPlan) -> Step | None:
        """Enqueue the plan's step; None: it is not recorded (yet)."""
        ...

    def forget_weights(self) -> None:
        """Weights were changed in place."""
        ...

    def start_anew(self) -> None:
        """A step has failed, and not every rank has got as far with it: forget what only some of them may have made. A
        step that is replayed exchanges more between ranks than one that is not recorded yet."""
        ...

    def forget_adapted(self) -> None:
        """Adapters now change products that existing recordings with adapters leave unchanged: forget those."""
        ...

    def forget_all(self) -> None:
        """Forget all recordings: from now on other kernels may be chosen."""
        ...


class Layout(Generic[K]):
    """How steps of one kind lie in memory."""

    def __init__(self, model: CausalLM, kernels: Kernels, rows: Rows, pool: KVPool) -> None:
        self.model = model
        self.kernels = kernels
        self.rows = rows
        self.pool = pool
        self.kinds: tuple[bool, ...] = (False,)
        """Which steps are recorded ahead: without adapters (False), with adapters (True)."""

    def takes(self, plan: StepPlan) -> bool:
        """Is the plan's step of this kind?"""
        raise NotImplementedError

    def key(self, plan: StepPlan) -> K:
        """The key of the recording that serves this plan."""
        raise NotImplementedError

    def fill(self, key: K, plan: StepPlan | None) -> None:
        """Write the plan into the tensors that recordings of this key read; None: write the spare row."""
        raise NotImplementedError

    def computing(self, key: K) -> Callable[[], Made]:
        """The computation that starts from these tensors."""
        raise NotImplementedError

    def step(self, key: K, plan: StepPlan, made: Made) -> Step:
        """The part of the results that belongs to the plan's rows."""
        raise NotImplementedError

    def keeps(self, key: K) -> bool:
        """Is a recording worth its memory?"""
        return True

    def ahead(self) -> Iterable[K]:
        """Keys to record ahead, the largest first: smaller ones can use its memory."""
        return ()

    def adapted(self, key: K) -> bool:
        """Do steps of this key have adapters?"""
        raise NotImplementedError

    def forget_adapted(self) -> None:
        """Drop what the layout itself has recorded for steps with adapters."""

    def follow(self, key: K, made: Made) -> None:
        """Compile what follows such a step and is not part of its recording."""

    def simplify(self) -> bool:
        """Record less from now on; False: there is nothing to leave out."""
        return False


class Recordings(Protocol[K]):
    """Recordings of one layout's steps. possible: becomes False once this model proves impossible to record."""

    @property
    def possible(self) -> bool: ...
    def warm(self, layout: Layout[K]) -> None: ...
    def replay(self, key: K, layout: Layout[K], plan: StepPlan) -> Made | None:
        """Compute the plan's step exactly once (layers overwrite states); None: not recorded, and nothing was
        computed."""
        ...

    def forget_weights(self) -> None: ...
    def start_anew(self) -> None:
        """See StepRecorder."""
        ...

    def forget(self, which: Callable[[K], bool]) -> None:
        """Drop the recordings of these keys."""
        ...


class RecordedSteps(Generic[K]):
    """The only StepRecorder: it joins a layout and its recordings."""

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

    def start_anew(self) -> None:
        self.recordings.start_anew()

    def forget_all(self) -> None:
        self.recordings.forget(lambda key: True)

    def forget_adapted(self) -> None:
        self.layout.forget_adapted()
        self.recordings.forget(self.layout.adapted)


class Graphs(Generic[K]):
    """CUDA graphs. Layouts may share a `recorder`, because steps run one after the other."""

    def __init__(self, kernels: Kernels, recorder: Recorder, on_all: Callable[[bool], bool] = bool) -> None:
        """on_all: see GraphMaker."""
        self.maker = GraphMaker(kernels, recorder, on_all)
        self.made: dict[K, Recording[Made]] = {}

    @property
    def possible(self) -> bool:
        """Can this model's steps be recorded?"""
        return self.maker.possible

    def warm(self, layout: Layout[K]) -> None:
        """Record the layout's keys."""
        for key in layout.ahead():
            recording = self._find(key, layout)
            if recording is not None:
                layout.follow(key, recording.made)

    def replay(self, key: K, layout: Layout[K], plan: StepPlan) -> Made | None:
        """Enqueue the recording of this key; make it first if there is none."""
        recording = self._find(key, layout)
        if recording is None:
            return None
        layout.fill(key, plan)
        return recording.replay()

    def forget_weights(self) -> None:
        """Do nothing: a graph reads the tensors that a weight settled into, and these stay where they are."""

    def start_anew(self) -> None:
        """Do nothing: ranks record together, and a step is enqueued in the same way once it is recorded."""

    def forget(self, which: Callable[[K], bool]) -> None:
        """Drop the recordings of these keys. All share one memory, which is freed with the last one."""
        for key in [key for key in self.made if which(key)]:
            del self.made[key]

    def _find(self, key: K, layout: Layout[K]) -> Recording[Made] | None:
        """Find or make a recording; None: an operation of this model waits for the device."""
        if key not in self.made and self.possible:
            layout.fill(key, None)  # with the spare row: no real row's state changes
            found = self.maker.record_work(layout.computing(key), layout.adapted(key))
            if found is not None:
                self.made[key] = found
        return self.made.get(key)


class Tapes(Generic[K]):
    """Native tapes. All share one room for their temporary tensors, because they run one after the other.

    The room begins as zeros: if a model turns out not to be recordable, torch reads unused entries of gathered
    tables."""

    def __init__(self, kernels: Kernels, room_bytes: int) -> None:
        self.kernels = kernels
        self.room_bytes = room_bytes
        self.room: Tensor | None = None
        self.made: dict[K, tuple[Made, Again]] = {}
        self.seen: set[K] = set()
        self.spilled: set[K] = set()
        """Keys whose recordings would take too much memory of their own."""
        self.possible = True

    def forget_weights(self) -> None:
        """Drop all recordings: they name copies that the kernels made of small tensors. Steps are then recorded
        again."""
        self.start_anew()

    def start_anew(self) -> None:
        """Drop all recordings, and forget which steps have come."""
        self.made.clear()
        self.seen.clear()

    def forget(self, which: Callable[[K], bool]) -> None:
        """Drop the recordings of these keys; their steps are recorded again."""
        for key in [key for key in self.made if which(key)]:
            del self.made[key]

    def warm(self, layout: Layout[K]) -> None:
        """Do nothing: the first steps pack weights and bind descriptors; later steps record themselves."""

    def replay(self, key: K, layout: Layout[K], plan: StepPlan) -> Made | None:
        """Compute the step, and keep a recording of it if one can be made."""
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
        if self.room is None:  # numpy's zeros take memory only when they are first used
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
    """Does the step need logits of its sampled lines only, with no embeddings and no prompt logprobs?"""
    params = rows.sampling.params
    return not rows.pools and all(params[row].num_prompt_logprobs < 0 for row in plan.rows)
