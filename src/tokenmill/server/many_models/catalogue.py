"""Which models are loaded. Owns: the states of all entries, which requests wait for a load, and which model is unloaded
when memory is short.

States: `unloaded -> loading -> ready -> draining -> unloaded`, and `failed`, from which a later request tries again. A
load waits for room. The least recently used entry without open requests is unloaded. If all have some, the least
recently used one takes no new requests until its open ones have ended. An entry that may sleep goes to `sleeping`
instead; waking works like loading. If that frees too little, the least recently used sleeper is unloaded. Everything
runs in the event loop's thread. Must not know: HTTP, what a model is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic

from tokenmill.core.errors import EngineDeadError, EngineLostError, ParameterError, UserError
from tokenmill.core.sleeping import TAGS
from tokenmill.server.many_models.coming_names import ComingNames
from tokenmill.server.many_models.entry import Entry, GoneError, Spec, State, U, UnreadyError
from tokenmill.server.many_models.sleepers import Sleepers, client_text, oldest
from tokenmill.server.many_models.spellings import Spellings, with_and_without_tag

log = logging.getLogger("tokenmill.server")
LOOK_S = 0.05
"""How often a load that waits for room checks for changes that raise no event."""
TRIES = 3
"""Attempts to load a model while a request waits. An engine that was killed says nothing about the model."""
LEAST_STAY_S = 0.25
"""A model with open requests serves at least this long, and at least as long as its load took, before it must make
room."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Bounds:
    """`memory`: bytes of a device for all loaded models (None: as measured). `queue`: most requests that wait for one
    model. `patience_s`: how long a load waits for room."""

    memory: int | None = None
    queue: int = 256
    patience_s: float = 30.0
    sleep_memory: int | None = None
    """Host memory for all sleeping models (None: half of the machine's)."""


class Catalogue(Generic[U]):
    """The states of all entries. `make` loads one; `predict` gives the bytes that it will take (0: not known)."""

    def __init__(
        self,
        make: Callable[[Entry[U]], Awaitable[U]],
        bounds: Bounds | None = None,
        predict: Callable[[Entry[U]], Awaitable[int]] | None = None,
    ) -> None:
        self.make, self.predict = make, predict
        self.bounds = bounds or Bounds()
        self.place_of: Callable[[Entry[U]], str] = lambda entry: entry.spec.place
        self.limits: dict[str, int] = {}
        """The measured bytes for models, by device."""
        self.entries: dict[str, Entry[U]] = {}
        self.names: dict[str, Entry[U]] = {}
        """Entries by every name and alias."""
        self.coming = ComingNames()
        self.spellings = Spellings()
        self.removed: set[Entry[U]] = set()
        """Removed entries that are not unloaded yet."""
        self.room = asyncio.Lock()
        self.pulse = asyncio.Event()
        self.started = self.closed = False
        self.sleepers = Sleepers(self)

    # ------------------------------------------------------------ what there is

    def limit(self, place: str, memory: int) -> None:
        """Set how many bytes of a device models may take, besides those of the models already loaded."""
        self.limits[place] = memory + sum(each.size for each in self._loaded() if self.place_of(each) == place)

    def memory_of(self, place: str) -> int | None:
        """Bytes of a device for all loaded models. None: there is no limit."""
        return self.limits.get(place) if self.bounds.memory is None else self.bounds.memory

    async def start(self) -> None:
        """Load the pinned models. The first error is raised."""
        for entry in [each for each in self.entries.values() if each.spec.pin]:
            try:
                await self.load(entry)
            except UnreadyError as error:
                raise entry.life.error or UserError(str(error)) from None
        self.started = True

    def adopt(self, spec: Spec, unit: U) -> Entry[U]:
        """Add a model that is already loaded."""
        entry = self.add(spec)
        entry.unit, entry.reserved = unit, True
        self._ready(entry, time.monotonic())
        self.started = True
        return entry

    @property
    def first(self) -> Entry[U]:
        """The entry for requests that name no model."""
        return next(iter(self.entries.values()))

    def find(self, name: str) -> Entry[U] | None:
        """The entry with this name or alias, or with an adapter of this name."""
        found = self.names.get(name)
        if found is None:
            adapted = [each for each in self.entries.values() if name in each.book.by_name]
            found = adapted[0] if adapted else None
        return found

    def add(self, spec: Spec) -> Entry[U]:
        """Add a model. It is loaded when a request asks for it."""
        spec.check_names()
        for name in (*spec.names, *spec.adapters):
            if any(map(self.find, with_and_without_tag(name))) or name in self.coming:
                raise ParameterError(f"Two models are called {name!r}: give each a name of its own.", param="model")
        entry: Entry[U] = Entry(spec)
        for other in self.entries.values():
            if spec.pin and other.spec.pin and entry.conflicts(other):
                raise ParameterError(
                    f"{entry.name!r} and {other.name!r} are both pinned, and may not be loaded together.", param="pin"
                )
        self.entries[entry.name] = entry
        self.names |= dict.fromkeys(spec.names, entry)
        if spec.stored:
            self.spellings.add((*spec.names, *spec.adapters))
        return entry

    async def remove(self, name: str) -> None:
        """Remove a model. New requests are refused at once, and it is unloaded when its open requests have ended."""
        entry = self.names.get(name)
        if entry is None:
            raise GoneError(name)
        del self.entries[entry.name]
        self.names = {each: kept for each, kept in self.names.items() if kept is not entry}
        if entry.spec.stored:
            self.spellings.remove((*entry.spec.names, *entry.spec.adapters))
        entry.removed = True
        self.removed.add(entry)
        self.stir()
        try:
            await self.unload(entry)
        finally:
            self.removed.discard(entry)

    # ------------------------------------------------------------ requests

    async def enter(self, entry: Entry[U]) -> U:
        """Wait until the model is loaded for one more request."""
        if entry.removed:
            raise GoneError(entry.name)
        if entry.state is not State.READY:
            await self._wait(entry)
        life = entry.life
        life.open += 1
        life.used = time.monotonic()
        if life.expiry is not None:
            life.expiry.cancel()
            life.expiry = None
        assert entry.unit is not None
        return entry.unit

    def leave(self, entry: Entry[U]) -> None:
        """A request has ended."""
        entry.life.open -= 1
        entry.life.used = time.monotonic()
        if not entry.life.open:
            self.arm(entry)
            self.stir()

    def keep(self, entry: Entry[U], seconds: float) -> None:
        """Keep a model loaded for this long without requests (below zero: for ever), until it is unloaded or told
        otherwise. Pinned models stay anyway."""
        if not entry.spec.pin:
            entry.life.keep = seconds
            if not entry.life.open:
                self.arm(entry)

    async def load(self, entry: Entry[U]) -> None:
        """Load a model that no request asks for."""
        await self.enter(entry)
        self.leave(entry)

    async def unload(self, entry: Entry[U]) -> None:
        """Unload a model when its open requests have ended. New requests wait for its next load."""
        await self.sleepers.settled(entry)
        if entry.state in (State.READY, State.SLEEPING):
            self.drain(entry)
        entry.must_go = True
        if entry.task is not None:  # it drains, or what is left of a broken one ends
            await asyncio.wait((entry.task,))

    async def _wait(self, entry: Entry[U]) -> None:
        life = entry.life
        if life.waiting >= self.bounds.queue:
            raise UnreadyError(f"{life.waiting} requests wait for {entry.name!r} already; it takes no more now.")
        life.waiting += 1
        try:
            while entry.state is not State.READY:
                if entry.removed or self.closed:
                    raise GoneError(entry.name)
                self._check_failure(entry)
                if entry.state is State.SLEEPING and entry.spec.pin and entry.rest.by_hand:
                    raise UnreadyError(f"{entry.name!r} sleeps until somebody wakes it (POST /wake_up).", 5)
                if entry.task is None:
                    entry.task = asyncio.get_running_loop().create_task(self._load(entry, entry.state))
                    life.state = State.LOADING  # at once: whoever unloads it must not take it for unloaded
                task = entry.task
                falls_asleep = entry.state is State.DRAINING
                await asyncio.wait((task,))  # a caller that leaves does not cancel the task
                if (error := task.result()) is not None and not (falls_asleep or entry.removed):
                    raise UnreadyError(str(error), error.retry_after, never=error.never)
            if entry.removed:
                raise GoneError(entry.name)
        finally:
            life.waiting -= 1

    @staticmethod
    def _check_failure(entry: Entry[U]) -> None:
        left = entry.life.retry_at - time.monotonic()
        if entry.state is State.FAILED and left > 0:
            raise UnreadyError(f"{entry.name!r} could not be loaded: {client_text(entry.life.error)}", max(1.0, left))

    # ------------------------------------------------------------ loading

    async def _load(self, entry: Entry[U], before: State) -> UnreadyError | None:
        """Load or wake an entry whose state was `before`. Returns the error or None, and never raises."""
        life, tries = entry.life, TRIES
        began = time.monotonic()
        try:
            if self.predict is not None and not entry.size:
                entry.size = await self.predict(entry)
            await self.take_room(entry)
            while True:
                try:
                    await self._make_or_wake(entry)
                    break
                except EngineLostError:
                    tries -= 1
                    if not (tries and self.started and life.waiting):
                        raise
                    log.error("a model's engine ended before it was ready", extra={"data": {"model": entry.name}})
                    entry.reserved, before = True, State.UNLOADED
        except UnreadyError as error:
            life.state = before if before in (State.FAILED, State.SLEEPING) else State.UNLOADED
            return error
        except Exception as error:
            if self.started:  # before that, the person who starts the server gets the error
                ours = None if isinstance(error, UserError | EngineDeadError) else error
                facts = {"model": entry.name, "reason": str(error)[:1000]}
                log.error("a model could not be loaded", exc_info=ours, extra={"data": facts})
            entry.failed(error)
            left = life.retry_at - time.monotonic()
            return UnreadyError(f"{entry.name!r} could not be loaded: {client_text(error)}", max(1.0, left),
                                never=isinstance(error, MemoryError))  # fmt: skip
        else:
            self._ready(entry, began, woken=before is State.SLEEPING)
            return None
        finally:
            entry.reserved, entry.task = entry.awake, None
            self.notice_loss(entry)
            self.stir()

    async def _make_or_wake(self, entry: Entry[U]) -> None:
        """Make the entry's unit, or wake it if it sleeps. If its memory is not available now, it stays asleep."""
        try:
            if entry.unit is None:
                entry.unit = await self.make(entry)
            else:
                await entry.unit.wake(TAGS)
            if entry.lost is not None:
                raise EngineDeadError(entry.lost)
        except UserError as error:
            if entry.unit is None:
                raise
            raise UnreadyError(f"{entry.name!r} cannot wake now: {error}", 5) from None
        except Exception:
            unit, entry.unit = entry.unit, None
            await self._close_unit(entry, unit)
            raise

    def _ready(self, entry: Entry[U], began: float, *, woken: bool = False) -> None:
        life, unit = entry.life, entry.unit
        assert unit is not None
        now = time.monotonic()
        life.state, life.error, life.failures = State.READY, None, 0
        life.used = life.since = now
        life.load_s, life.loads = now - began, life.loads + (not woken)
        entry.rest.wakes += woken
        entry.rest.over()
        if (held := unit.held_bytes()) and entry.spec.memory is None:
            entry.size, entry.measured = held + entry.beside, True
        if not entry.spec.pin:
            life.keep = entry.spec.keep
        self.arm(entry)

    async def take_room(self, entry: Entry[U]) -> None:
        """Wait for room. From then on the entry's memory counts as taken."""
        async with self.room:
            await self._make_room(entry)
            entry.reserved = True

    async def _make_room(self, entry: Entry[U]) -> None:
        """Wait until this entry may be loaded beside the other loaded ones."""
        until = time.monotonic() + self.bounds.patience_s
        closed: list[Entry[U]] = []
        try:
            while rivals := self._rivals(entry):
                if entry.removed or self.closed:
                    raise UnreadyError(f"{entry.name!r} is no longer served.")
                self._check_hope(entry, rivals)
                idle = [each for each in rivals if each.idle] or [each for each in rivals if each.may_end]
                if idle:
                    self._make_go(oldest(idle))
                elif not any(each.state is State.DRAINING for each in rivals):
                    closed += self._close_one(rivals)
                going = [each for each in rivals if each.state is State.DRAINING and not each.busy]
                if not going and time.monotonic() >= until:
                    busy = ", ".join(repr(each.name) for each in rivals)
                    raise UnreadyError(
                        f"There is no room for {entry.name!r} now: {busy} must finish open requests first. "
                        "Try again later.", 5,
                    )  # fmt: skip
                await self._change()
        except BaseException:
            for each in closed:
                each.stay = True
            raise

    def _rivals(self, entry: Entry[U]) -> list[Entry[U]]:
        """The entries of which some must go: those that may not be loaded together with this one, or all if memory is
        short."""
        others = [each for each in self._loaded() if each is not entry]
        conflicting = [each for each in others if entry.conflicts(each)]
        place = self.place_of(entry)
        memory = self.memory_of(place)
        if conflicting or memory is None:
            return conflicting
        others = [each for each in others if self.place_of(each) == place]
        asleep = [each for each in self.sleepers.all() if each is not entry and self.place_of(each) == place]
        left = memory - sum(each.beside for each in asleep)
        if sum(each.size for each in others) + entry.size <= left:
            return []
        self._check_size(entry, others)
        return [*others, *asleep]

    def _check_size(self, entry: Entry[U], others: Iterable[Entry[U]]) -> None:
        """Refuse an entry that could never fit beside the pinned ones."""
        most = self.memory_of(self.place_of(entry)) or 0
        fixed = [each for each in others if each.spec.pin]
        left = most - sum(each.size for each in fixed)
        if entry.size > left:
            stay = f", of which {', '.join(repr(e.name) for e in fixed)} keep {_gib(most - left)}" if fixed else ""
            raise UnreadyError(
                f"{entry.name!r} needs {_gib(entry.size)}, and models may take {_gib(most)} in all{stay}: it does not "
                "fit.", 60, never=True,
            )  # fmt: skip

    @staticmethod
    def _check_hope(entry: Entry[U], rivals: Iterable[Entry[U]]) -> None:
        pinned = [each for each in rivals if each.spec.pin and entry.conflicts(each)]
        if pinned:
            raise UnreadyError(
                f"{entry.name!r} may not be loaded beside {pinned[0].name!r}, which stays loaded.", 60, never=True
            )

    def _close_one(self, rivals: Iterable[Entry[U]]) -> list[Entry[U]]:
        """Drain the least recently used entry of those that have served long enough. Empty: there is none."""
        now = time.monotonic()
        ready = [each for each in rivals if each.state is State.READY and not each.spec.pin]
        able = [each for each in ready if now - each.life.since >= max(LEAST_STAY_S, each.life.load_s)]
        if not able:
            return []
        chosen = oldest(able)
        self._make_go(chosen)
        return [chosen]

    def _make_go(self, entry: Entry[U]) -> None:
        """Make room: put the entry to sleep, or unload it if it may not sleep or already does."""
        self.drain(entry, 1 if entry.spec.sleeps and entry.state is State.READY else 0)

    def _loaded(self) -> list[Entry[U]]:
        """All entries that take memory, including those being removed."""
        return [each for each in (*self.entries.values(), *self.removed) if each.reserved]

    # ------------------------------------------------------------ unloading

    def drain(self, entry: Entry[U], level: int = 0) -> None:
        """Take no new requests, then put the entry to sleep at this level (0: unload it)."""
        entry.life.state, entry.stay, entry.must_go, entry.rest.level = State.DRAINING, False, False, level
        if entry.life.expiry is not None:
            entry.life.expiry.cancel()
        entry.task = asyncio.get_running_loop().create_task(self.unload_now(entry))

    async def unload_now(self, entry: Entry[U]) -> UnreadyError | None:
        while entry.busy:
            await self._change()
            if entry.stay and not entry.must_go:  # another load gave up, so this entry may stay
                self.stays(entry)
                return None
        if entry.rest.level:
            return await self.sleepers.lay(entry)
        unit, entry.unit = entry.unit, None
        await self._close_unit(entry, unit)
        entry.life.state, entry.task = State.UNLOADED, None
        self.stir()
        return None

    def stays(self, entry: Entry[U]) -> None:
        """Make a draining entry ready again."""
        entry.life.state, entry.task = State.READY, None
        entry.rest.over()
        self.arm(entry)
        self.notice_loss(entry)
        self.stir()

    async def _close_unit(self, entry: Entry[U], unit: U | None) -> None:
        try:
            if unit is not None:
                await unit.close()
        except Exception:
            log.exception("a model could not be closed in an orderly way")
        finally:
            entry.reserved, entry.lost = False, None
            entry.rest.over()
            self.stir()

    def broken(self, entry: Entry[U], reason: str) -> None:
        """The entry's engines cannot be kept alive. Its requests have got their errors. A later request loads it
        again."""
        if entry.state not in (State.READY, State.SLEEPING):
            entry.lost = reason  # the task that loads or unloads it handles this
            return
        unit, entry.unit = entry.unit, None
        entry.failed(EngineDeadError(reason))
        entry.task = asyncio.get_running_loop().create_task(self._bury(entry, unit))

    def notice_loss(self, entry: Entry[U]) -> None:
        """A task leaves the entry loaded: its engines may have been lost meanwhile."""
        if entry.lost is not None:
            self.broken(entry, entry.lost)

    async def _bury(self, entry: Entry[U], unit: U | None) -> UnreadyError | None:
        await self._close_unit(entry, unit)
        entry.task = None
        return None

    async def close(self) -> None:
        """Unload everything and end."""
        self.closed = True
        every = [*self.entries.values(), *self.removed]
        for entry in every:
            if entry.life.expiry is not None:
                entry.life.expiry.cancel()
            if entry.task is not None:
                entry.task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await entry.task
        units = [entry.unit for entry in every if entry.unit is not None]
        await asyncio.gather(*(unit.close() for unit in units), return_exceptions=True)

    # ------------------------------------------------------------ time

    def arm(self, entry: Entry[U]) -> None:
        """Start the timer that unloads an entry without requests."""
        life = entry.life
        if life.expiry is not None:
            life.expiry.cancel()
            life.expiry = None
        if entry.state in (State.READY, State.SLEEPING) and life.keep >= 0 and not entry.spec.pin:
            wait = max(0.0, life.used + life.keep - time.monotonic())
            life.expiry = asyncio.get_running_loop().call_later(wait, self._expire, entry)

    def _expire(self, entry: Entry[U]) -> None:
        entry.life.expiry = None
        if (entry.idle or entry.may_end) and not self.closed:
            self.drain(entry)
        elif entry.state is State.READY and not entry.life.open:  # its client has left, but the model still computes
            entry.life.expiry = asyncio.get_running_loop().call_later(1.0, self._expire, entry)

    def stir(self) -> None:
        """Wake everything that waits for a change."""
        pulse, self.pulse = self.pulse, asyncio.Event()
        pulse.set()

    async def _change(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self.pulse.wait()


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
