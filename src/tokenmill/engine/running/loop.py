"""The loop around an engine that others talk to. Owns: taking commands, stepping, and one report per step.

It runs in a process of its own (the server's engines) or in a thread (AsyncLLM). Must not know: how messages travel,
HTTP, text. A bug in the handling of one request ends that request; a step that fails as a whole ends the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from tokenmill.core.errors import EngineDeadError, UserError
from tokenmill.core.request import Request, TokenDelta
from tokenmill.core.sequence import FINISHED, Sequence, SequenceGroup
from tokenmill.core.sleeping import Slept
from tokenmill.engine.running.build import Built
from tokenmill.engine.running.gauges import Gauges
from tokenmill.engine.running.wire import (
    Abort,
    Adapt,
    Add,
    Broken,
    Command,
    EngineStats,
    News,
    Ready,
    Refused,
    Report,
    Sleep,
    Wake,
)
from tokenmill.engine.steps.adapters import Reading
from tokenmill.scheduler.pace import STALL_S, Pace

log = logging.getLogger("tokenmill.engine")
BEAT_S = 0.25
"""How often an idle engine reports that it lives; a busy one does so with every step."""
COMPILING_BEAT_S = 0.005
"""How often an engine without other work checks whether a grammar has been compiled."""

Pending = Future[None] | Reading
"""What a request waits for before it is added."""
Receive = Callable[[float], list[Command] | None]
"""The commands that have arrived; waits at most this long for one. None: the other side wants the loop to end."""


def describe(built: Built, load_s: float) -> Ready:
    """What the server must know about a loaded engine."""
    facts: dict[str, Any] = msgspec.to_builtins(built.facts)
    facts["root"] = str(built.config.model.model)
    facts["max_rows"] = built.config.schedule.max_num_seqs
    facts["block_size"] = built.config.cache.block_size
    facts["prefix_block"] = built.prefix_block
    facts["vectors"] = msgspec.to_builtins(built.engine.admission.vectors)
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
        self.queued: set[str] = set()
        self.begun: list[tuple[SequenceGroup, float]] = []
        self.engine.scheduler.roster.on_begin = self._begin
        self.engine.scheduler.pace = Pace(STALL_S)  # somebody reads each token as it comes
        self.prefilling: dict[str, tuple[Sequence, int]] = {}
        self.compiling: list[tuple[Add, list[Pending]]] = []
        self.adapting: list[tuple[Adapt, Reading]] = []
        self.rest: Sleep | Wake | None = None
        self.resting = False
        self.gauges = Gauges(built)
        self.stats_at = 0.0
        self.tokens_before = 0
        self.preemptions_before = 0
        self.rounds = 0

    def run_loop(self) -> None:
        """Run until a Stop comes, or until `receive` says that nobody listens any more."""
        while True:
            self.rounds += 1
            idle = COMPILING_BEAT_S if self.compiling or self.adapting else BEAT_S
            commands = self.receive(0.0 if self.engine.has_work else idle)
            if commands is None:
                break
            report = Report()
            for command in commands:
                if isinstance(command, Add):
                    self._add(command, report)
                else:
                    self._obey(command, report)
            self._take_compiled(report)
            if self.adapting:
                self._take_adapted(report)
            if self.engine.has_work:
                report.deltas += self.engine.step()
            else:
                self.engine.executor.check()
            if self.rest is not None and not self.engine.has_work:
                report.slept = self._sleep_or_wake(self.rest)
            self._finish(report)

    def done(self) -> int:
        """A number that grows while a step makes progress; another thread may ask."""
        done = self.engine.executor.progress()
        return done + int(time.process_time() * 4) if self.resting else done

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """End a request or one of its outputs now; returns the terminal deltas."""
        waiting = [entry for entry in self.compiling if entry[0].request.id == request_id]
        self.compiling = [entry for entry in self.compiling if entry[0].request.id != request_id]
        for each in (each for _, waits in waiting for each in waits if isinstance(each, Future)):
            each.cancel()  # others' grammars stand in line behind it
        ended = [TokenDelta(request_id, i, [], finish="abort") for a, _ in waiting for i in range(a.num_outputs)]
        ended += self.engine.abort(request_id, index)
        if request_id not in self.engine.scheduler.roster.groups:
            self.queued.discard(request_id)
        return ended

    def _obey(self, command: Command, report: Report) -> None:
        if isinstance(command, Adapt):
            self._adapt(command, report)
        elif isinstance(command, Sleep | Wake):
            self.rest = command
        elif isinstance(command, Abort | Broken):
            self._end(command, report)

    def _sleep_or_wake(self, command: Sleep | Wake) -> Slept:
        """Sleep or wake while no request is open. If that fails, the reason is reported and the engine stays as it
        was."""
        desk, self.rest, self.resting = self.built.sleep, None, True
        try:
            return desk.sleep(command.level) if isinstance(command, Sleep) else desk.wake(command.tags)
        except UserError as error:
            return Slept(list(desk.asleep), error=str(error))
        finally:
            self.resting = False

    def _adapt(self, command: Adapt, report: Report) -> None:
        """Take an adapter, which is read while the loop goes on, or let it go."""
        adapters = self.built.adapters
        try:
            if command.path is None:
                adapters.dismiss(command.number)
                return
            adapters.serve(command.name, command.path, command.number)
            reading = adapters.begin(command.number)
        except UserError as error:
            report.adapted[command.number] = str(error)
            adapters.dismiss(command.number)
        else:
            if reading is None:
                report.adapted[command.number] = ""
            else:
                self.adapting.append((command, reading))

    def _take_adapted(self, report: Report) -> None:
        """Report adapters that have been read, or cannot be."""
        for command, reading in [each for each in self.adapting if each[1].done()]:
            error = reading.exception()
            report.adapted[command.number] = "" if error is None else str(error)
            if error is not None:
                self.built.adapters.dismiss(command.number)
        self.adapting = [each for each in self.adapting if each[0].number not in report.adapted]

    def _end(self, command: Abort | Broken, report: Report) -> None:
        """End a request or output that nobody reads any more; its terminal deltas are not sent."""
        index = command.index if isinstance(command, Abort) else None
        try:
            self.abort(command.request_id, index)
        except Exception as error:
            self._fail(command.request_id, error, report)
        if isinstance(command, Broken):
            report.failed[command.request_id] = "the engine could not read what it was told"

    def _fail(self, request_id: str, error: BaseException, report: Report) -> None:
        """End a request after an unexpected exception in its work, and remove everything of it. A lost engine is not
        the request's: another life takes it over."""
        if isinstance(error, EngineDeadError):
            raise error
        log.exception("a request could not be handled", exc_info=error)
        report.failed[request_id] = f"the engine could not handle it ({type(error).__name__})"
        try:
            self.abort(request_id)
        except Exception as again:
            log.exception("a request could not be ended", exc_info=again)

    def _take_compiled(self, report: Report) -> None:
        still: list[tuple[Add, list[Pending]]] = []
        for command, waits in self.compiling:
            if not all(each.done() for each in waits):
                still.append((command, waits))
                continue
            try:
                error = next((said for each in waits if (said := each.exception()) is not None), None)
                if error is not None:
                    self._refuse(command, error, report)  # not compiled again: a bomb would stall the loop
                else:
                    self._add(command, report, ready=True)
            except Exception as mistake:
                self._fail(command.request.id, mistake, report)
        self.compiling = still

    def _refuse(self, command: Add, error: BaseException, report: Report) -> None:
        """Say why a request is not accepted. An unexpected error fails it: its caller may wait for an answer."""
        name = command.request.id
        if isinstance(error, UserError):
            report.refused.append(Refused.by(name, error))
        else:
            self._fail(name, error, report)

    def _add(self, command: Add, report: Report, *, ready: bool = False) -> None:
        """Add a request when its grammar is compiled and its adapter read (`ready`). The loop goes on until then."""
        try:
            waits = [] if ready else self._waits(command.request)
            if waits:
                self.compiling.append((command, waits))
                return
            self.engine.add(command.request, command.pooling)
            self.queued.add(command.request.id)
            if command.ack:
                report.accepted.append(command.request.id)
        except Exception as error:  # one broken request must not end the others
            self._refuse(command, error, report)

    def _waits(self, request: Request) -> list[Pending]:
        """Begin to compile a request's grammar and to read its adapter: what must be done before it is added."""
        grammar = self.engine.admission.prepare(request.params)
        self.built.adapters.check(request.adapter)
        adapter = self.built.adapters.begin(request.adapter)
        return [each for each in (grammar, adapter) if each is not None]

    def _begin(self, group: SequenceGroup) -> None:
        """Note that the group's first sequence has a row; the order is the scheduler's, not that of arrival."""
        if group.request.id in self.queued:
            self.queued.remove(group.request.id)
            self.begun.append((group, time.monotonic()))

    def _finish(self, report: Report) -> None:
        now = time.monotonic()
        for group, began in self.begun:
            report.started[group.request.id] = now - began
            self.prefilling[group.request.id] = (group.sequences[0], 0)
        self.begun.clear()
        self.built.adapters.let_go()
        if self.prefilling:
            report.prefilled = self._prefilled()
        report.published, report.gone = self.engine.scheduler.tables.cache.listener.take()
        counters = self.engine.scheduler.counters
        total = counters.prompt_tokens + counters.recomputed + counters.output_tokens
        report.tokens, self.tokens_before = total - self.tokens_before, total
        if counters.preemptions != self.preemptions_before:
            self.preemptions_before = counters.preemptions
            groups = self.engine.scheduler.roster.groups
            report.preempted = {i: group.preemptions for i, group in groups.items() if group.preemptions}
        if now - self.stats_at > BEAT_S or not self.engine.has_work:
            self.stats_at = now
            report.stats = self._stats()
        self.send(report)

    def _stats(self) -> EngineStats | None:
        try:
            return self.gauges.read()
        except EngineDeadError:
            raise
        except Exception:  # an error in mere statistics must not end an engine
            log.exception("the engine's gauges could not be read")
            return None

    def _prefilled(self) -> dict[str, int]:
        """Prompts of which more has been computed; prompts that are complete are not watched any longer."""
        found: dict[str, int] = {}
        for request_id, (seq, before) in list(self.prefilling.items()):
            done = min(seq.computed, seq.num_prompt)
            if done > before:
                found[request_id] = done
                self.prefilling[request_id] = (seq, done)
            if done == seq.num_prompt or seq.status == FINISHED:
                del self.prefilling[request_id]
        return found
