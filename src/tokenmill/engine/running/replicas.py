"""Several engines of one model behind the interface of one, for callers in this process (data parallel). Owns: which
engine works on what, waiting for whichever has something to commit, and what follows when an engine dies.

Each engine has processes of its own, so all compute at once while this thread plans for one after the other. If one
dies, the others continue its requests where they were, and another one is loaded in its place (successors.py). Must not
know: text, HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tokenmill.core.errors import EngineDeadError, IdInUseError, UserError
from tokenmill.core.request import Request, TokenDelta
from tokenmill.engine.running.picking import EnginePicker, asked_of
from tokenmill.engine.running.said import REPEATEDLY, Said
from tokenmill.engine.running.successors import Successors
from tokenmill.engine.running.trials import Trials
from tokenmill.engine.steps.engine import Engine
from tokenmill.process.pipe import LOOK_S

log = logging.getLogger("tokenmill.engine")


class Replicas:
    """Several engines, with the interface that callers use of an Engine."""

    def __init__(self, parts: list[Engine], prefix_block: int = 0, successors: Successors[Any] | None = None) -> None:
        """prefix_block: tokens per block of the engines' prefix caches; 0: they have none. successors: None: no engine
        comes in the place of a lost one."""
        self.parts = parts
        self.successors = successors
        self.alive = dict(enumerate(parts))
        self.admission, self.executor, self.scheduler = parts[0].admission, parts[0].executor, parts[0].scheduler
        self.picker = EnginePicker(prefix_block)
        self.open: dict[str, Said] = {}
        self.trials = Trials(lambda: {name: entry.engine for name, entry in self.open.items() if entry.engine >= 0})
        self.waiting: list[Said] = []
        """Requests that wait for an engine that may have them."""
        self.given_up: list[TokenDelta] = []
        self.replaced: Callable[[int, Engine], None] = lambda number, lost: None
        """Told of a lost engine in whose place another one comes."""
        self.dead = "no engine is left"
        self.news = select.poll()
        self.files = [list(executor.files) for executor in (_processes(part) for part in parts)]
        for file in (file for files in self.files for file in files):
            self.news.register(file, select.POLLIN)

    @property
    def flying(self) -> deque[Any]:
        """The plans in flight of all engines."""
        return deque(plan for part in self.alive.values() for plan in part.flying)

    @property
    def has_work(self) -> bool:
        """Has any engine work, or does any request wait for one?"""
        return bool(self.waiting or self.given_up) or any(part.has_work for part in self.alive.values())

    def add(self, request: Request, pooling: str | None = None) -> None:
        """Accept a request, or raise a UserError that says why not."""
        self._take_in()
        self._check_alive()
        if request.id in self.open:
            raise IdInUseError(request.id)
        able = self.trials.engines(list(self.alive), None)
        if not able:
            outputs = self.admission.check(request, 0, pooling).num_outputs
            request.again = True  # it is accepted
            self.open[request.id] = entry = Said(request, pooling, emitted=[[] for _ in range(outputs)])
            return self.waiting.append(entry)
        for number, part in self.alive.items():
            self.picker.cached(number, *part.scheduler.tables.cache.listener.take())
        number = self.picker.pick_engine(able, asked_of(request))
        try:
            self.parts[number].add(request, pooling)
        except BaseException:
            self.picker.done(number, request.id)
            raise
        outputs = self.parts[number].scheduler.roster.groups[request.id].num_outputs
        self.open[request.id] = Said(request, pooling, engine=number, emitted=[[] for _ in range(outputs)])

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> list[TokenDelta]:
        """End a request, or one of its outputs; returns the terminal deltas."""
        entry = self.open.get(request_id)
        if entry is None:
            return []
        if entry.engine < 0:
            return self._end(entry, index, reason)
        return self._seen(entry.engine, self.parts[entry.engine].abort(request_id, index, reason))

    def forget_prefixes(self, *, running: bool = False) -> None:
        """Empty the prefix caches."""
        for part in self.alive.values():
            part.forget_prefixes(running=running)

    def begin(self, tokens: int) -> None:
        """See Engine.begin; each engine has been given its share."""
        for number, part in list(self.alive.items()):
            with self._survived(number):
                part.begin(tokens // len(self.parts))

    def step(self) -> list[TokenDelta]:
        """Submit all plans that the engines can take, and commit results that have come; waits for at least one, or for
        a moment if no engine is there."""
        self._take_in()
        self._check_alive()
        self._go_on()
        for number, part in list(self.alive.items()):
            with self._survived(number):
                while part.has_work and len(part.flying) < part.executor.depth and part.submit():
                    pass
        found, self.given_up = self.given_up, []
        news = bool(found)
        if not news and not self.alive:
            time.sleep(LOOK_S)
        while not news and (waiting := {n: part for n, part in self.alive.items() if part.flying}):
            for number, part in waiting.items():
                with self._survived(number):
                    if _is_ready(part.flying[0][1]):
                        found += self._seen(number, part.commit())
                        news = True
            news = news or not waiting.keys() <= self.alive.keys()  # plans are to be made for what a dead one leaves
            if not news:
                self.news.poll(LOOK_S * 1000)
        return found

    def ask_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a control message to every rank of every engine that lives; see Executor.control_all. While they sleep,
        none is loaded."""
        found: list[dict[str, Any]] = []
        self._take_in()
        if self.successors is not None and message["what"] == "sleep":
            self.successors.rest()
        try:
            for number, part in list(self.alive.items()):
                with self._survived(number):
                    found += part.executor.control_all(message)
            if not self.alive and message["what"] == "sleep":
                raise EngineDeadError(self._why_dead())
        finally:
            if self.successors is not None and not any(each.get("asleep") for each in found):
                self.successors.rise()
        return found

    def close(self) -> None:
        """Stop all engines."""
        if self.successors is not None:
            self.successors.close()
        for part in self.parts:
            part.close()

    # ------------------------------------------------------------ death

    def _check_alive(self) -> None:
        coming = self.successors is not None and (self.successors.expected or self.successors.resting)
        if not self.alive and not coming:  # (those that died asleep come when they are woken)
            raise EngineDeadError(self._why_dead())

    def _why_dead(self) -> str:
        """Why the last engine died, and why no other one comes."""
        return self.dead if self.successors is None else self.successors.explain(self.dead)

    def _take_in(self) -> None:
        """Take in engines that have loaded, and let requests go on that waited for any."""
        for number, built in self.successors.take() if self.successors is not None else ():
            self.replaced(number, self.parts[number])
            part = self.parts[number] = self.alive[number] = built.engine
            if number == 0:
                self.admission, self.executor, self.scheduler = part.admission, part.executor, part.scheduler
            self.files[number] = list(_processes(part).files)
            for file in self.files[number]:
                self.news.register(file, select.POLLIN)
        self._go_on()

    @contextlib.contextmanager
    def _survived(self, number: int) -> Iterator[None]:
        """Within this context the engine may die. Others go on with its requests; if none is left and none comes, this
        raises."""
        try:
            yield
        except EngineDeadError as error:
            self.dead = str(error)
            self._lost(number)
            self._check_alive()

    def _lost(self, number: int) -> None:
        part = self.alive.pop(number)
        orphans = [entry for entry in self.open.values() if entry.engine == number]
        left = f"{len(self.alive)} of {len(self.parts)} engines are left"
        log.error("engine %d died (%s) with %d requests; %s", number, self.dead, len(orphans), left)
        for file in self.files[number]:
            self.news.unregister(file)
        self.picker.forget(number)
        groups = part.scheduler.roster.groups
        part.flying.clear()
        part.executor.close()
        if self.successors is not None:
            self.successors.lost(number)
        for entry in orphans:
            entry.died(groups[entry.request.id].reached if entry.request.id in groups else 0)
            if self.trials.died(entry, alone=len(orphans) == 1):
                self.given_up += self._end(entry, None, "error", REPEATEDLY)
            else:
                self.waiting.append(entry)
        self._go_on()

    def _go_on(self) -> None:
        """Give the requests that wait to engines that may have them."""
        for entry in list(self.waiting):
            if able := self.trials.engines(list(self.alive), entry):
                self.waiting.remove(entry)
                request = entry.replayed()
                entry.engine = self.picker.pick_engine(able, asked_of(request))
                try:
                    self.parts[entry.engine].add(request, entry.pooling)
                except UserError as error:
                    self.given_up += self._end(entry, None, "error", str(error))

    def _end(self, entry: Said, index: int | None, reason: str, error: str | None = None) -> list[TokenDelta]:
        """The last deltas of a request that no engine works on, or of one of its outputs."""
        number, entry.engine = entry.engine, -1
        indices = range(entry.num_outputs) if index is None else [index]
        name = entry.request.id
        left = [i for i in indices if i not in entry.ended]
        entry.ended.update(left)
        if len(entry.ended) == entry.num_outputs:
            del self.open[name]
            self.waiting = [each for each in self.waiting if each is not entry]
            self.trials.leave(name)
            if number >= 0:
                self.picker.done(number, name)
        return [TokenDelta(name, i, [], finish=reason, error=error) for i in left]

    def _seen(self, number: int, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """The deltas, without what was seen before; what they say is kept, and noted as the engine's load."""
        for delta in deltas:
            self.picker.answered(number, delta.request_id, len(delta.tokens))
            if (entry := self.open.get(delta.request_id)) is not None:
                entry.say(delta)
                self.trials.answered(delta.request_id)
                entry.ended.update([delta.index] if delta.finish is not None else ())
        ended = {delta.request_id for delta in deltas if delta.finish is not None}
        for name in ended - self.parts[number].scheduler.roster.groups.keys():
            self.open.pop(name, None)
            self.trials.leave(name)
            self.picker.done(number, name)
        return deltas


def _processes(part: Engine) -> Any:
    """The engine's executor: it has processes of its own."""
    return part.executor


def _is_ready(ticket: Any) -> bool:
    """Have all ranks answered? Only tickets of processes know."""
    ready: bool = ticket.ready()
    return ready
