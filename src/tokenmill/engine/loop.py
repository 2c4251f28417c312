"""The loop around an engine that others talk to. Owns: taking commands, stepping, and one report per step.

Runs in a process of its own (the server's engines) or in a thread (AsyncLLM). Must not know: how messages travel, HTTP,
text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from tokenmill.core.errors import UserError
from tokenmill.core.request import TokenDelta
from tokenmill.core.sequence import FINISHED, WAITING, Sequence, SequenceGroup
from tokenmill.engine.build import Built
from tokenmill.engine.gauges import Gauges
from tokenmill.engine.wire import Abort, Add, Command, News, Ready, Report

BEAT_S = 0.25
"""An idle engine says that it lives this often; a busy one does so with every step."""
COMPILING_BEAT_S = 0.005
"""How often an engine without other work looks whether a grammar has been compiled."""

Receive = Callable[[float], list[Command] | None]
"""Commands that have come, waiting at most this long for one; None: the other side wants the loop to end."""


def describe(built: Built, load_s: float) -> Ready:
    """What the server must know of a loaded engine."""
    facts: dict[str, Any] = msgspec.to_builtins(built.facts)
    facts["root"] = str(built.config.model.model)
    facts["max_rows"] = built.config.schedule.max_num_seqs
    facts["block_size"] = built.config.cache.block_size
    facts["priorities"] = built.config.schedule.scheduling_policy == "priority"
    return Ready(
        facts=facts,
        eos_ids=sorted(built.engine.admission.eos_ids),
        generation=built.generation,
        tokenizer=built.tokenizer.state() if built.tokenizer is not None else None,
        load_s=load_s,
    )


class EngineLoop:
    """Drives one engine until it is told to stop."""

    def __init__(self, built: Built, receive: Receive, send: Callable[[News], None]) -> None:
        self.built = built
        self.engine = built.engine
        self.receive = receive
        self.send = send
        self.queued: deque[SequenceGroup] = deque()
        self.prefilling: dict[str, tuple[Sequence, int]] = {}
        self.compiling: list[tuple[Add, Future[None]]] = []
        self.gauges = Gauges(built)
        self.stats_at = 0.0
        self.tokens_before = 0
        self.preemptions_before = 0

    def run(self) -> None:
        """Until Stop, or until `receive` says that nobody listens any more."""
        while True:
            idle = COMPILING_BEAT_S if self.compiling else BEAT_S
            commands = self.receive(0.0 if self.engine.has_work else idle)
            if commands is None:
                break
            report = Report()
            for command in commands:
                self._take(command, report)
            self._take_compiled(report)
            if self.engine.has_work:
                report.deltas += self.engine.step()
            self._finish(report)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """End a request or one of its outputs now; its terminal deltas."""
        waiting = [add for add, _ in self.compiling if add.request.id == request_id]
        self.compiling = [(add, f) for add, f in self.compiling if add.request.id != request_id]
        ended = [TokenDelta(request_id, i, [], finish="abort") for a in waiting for i in range(a.num_outputs)]
        return ended + self.engine.abort(request_id, index)

    def _take(self, command: Command, report: Report) -> None:
        if isinstance(command, Add):
            self._prepare(command, report)
        elif isinstance(command, Abort):
            self.abort(command.request_id, command.index)  # its terminal deltas have no reader on the other side

    def _prepare(self, command: Add, report: Report) -> None:
        """A grammar is compiled beside the loop; its request is added when that is done."""
        try:
            future = self.engine.admission.prepare(command.request.params)
        except UserError as error:
            self._refuse(command, error, report)
            return
        if future is None:
            self._add(command, report)
        else:
            self.compiling.append((command, future))

    def _take_compiled(self, report: Report) -> None:
        still: list[tuple[Add, Future[None]]] = []
        for command, future in self.compiling:
            if not future.done():
                still.append((command, future))
            elif (error := future.exception()) is not None:
                self._refuse(command, error, report)  # not compiled again: a bomb would stall the loop
            else:
                self._add(command, report)
        self.compiling = still

    def _refuse(self, command: Add, error: BaseException, report: Report) -> None:
        name = command.request.id
        if isinstance(error, UserError):
            report.refused.append((name, str(error), error.param))
            return
        text = f"the request could not be accepted ({type(error).__name__})"
        report.deltas += [TokenDelta(name, i, [], finish="error", error=text) for i in range(command.num_outputs)]

    def _add(self, command: Add, report: Report) -> None:
        request = command.request
        admission = self.engine.admission
        try:
            if command.pooling is not None:
                group = admission.check_embedding(request, command.pooling)
            else:
                group = admission.check(request, len(self.engine.scheduler.roster.groups))
            self.engine.scheduler.add(group)
        except Exception as error:  # one broken request must not end the others
            self._refuse(command, error, report)
        else:
            self.queued.append(group)
            if command.ack:
                report.accepted.append(request.id)

    def _finish(self, report: Report) -> None:
        while self.queued and (not self.queued[0].sequences or self.queued[0].sequences[0].status != WAITING):
            group = self.queued.popleft()
            report.started.append(group.request.id)
            if group.sequences:
                self.prefilling[group.request.id] = (group.sequences[0], 0)
        if self.prefilling:
            report.prefilled = self._prefilled()
        counters = self.engine.scheduler.counters
        total = counters.prompt_tokens + counters.output_tokens
        report.tokens, self.tokens_before = total - self.tokens_before, total
        if counters.preemptions != self.preemptions_before:
            self.preemptions_before = counters.preemptions
            groups = self.engine.scheduler.roster.groups
            counted = {i: sum(seq.preemptions for seq in group.sequences) for i, group in groups.items()}
            report.preempted = {i: count for i, count in counted.items() if count}
        now = time.monotonic()
        if now - self.stats_at > BEAT_S or not self.engine.has_work:
            self.stats_at = now
            report.stats = self.gauges.read()
        self.send(report)

    def _prefilled(self) -> dict[str, int]:
        """Prompts of which more is computed now; those that are whole are watched no longer."""
        found: dict[str, int] = {}
        for request_id, (seq, before) in list(self.prefilling.items()):
            done = min(seq.computed, seq.num_prompt)
            if done > before:
                found[request_id] = done
                self.prefilling[request_id] = (seq, done)
            if done == seq.num_prompt or seq.status == FINISHED:
                del self.prefilling[request_id]
        return found
