"""Models that sleep. Owns: putting a model to sleep and waking it by hand, what happens if it cannot sleep, and how
much host memory sleeping models may take. Must not know: HTTP, what a model is, who needs room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tokenmill.core.errors import EngineDeadError, EngineFaultError, UserError
from tokenmill.core.sleeping import TAGS
from tokenmill.server.many_models.entry import Entry, State, Unit, UnreadyError

log = logging.getLogger("tokenmill.server")
_FOLDERS = re.compile(r"(?<![\w.:/~-])[~/](?:[^/\s'\"]*/)+(?=[^/\s])")
"""The folders of an absolute path, without its last part."""


class Models(Protocol):
    """The part of the catalogue that sleepers need."""

    bounds: Any
    entries: dict[str, Entry[Any]]
    removed: set[Entry[Any]]

    def drain(self, entry: Entry[Any], level: int = 0) -> None: ...
    def stays(self, entry: Entry[Any]) -> None: ...
    def notice_loss(self, entry: Entry[Any]) -> None: ...
    def arm(self, entry: Entry[Any]) -> None: ...
    def stir(self) -> None: ...
    async def unload_now(self, entry: Entry[Any]) -> UnreadyError | None: ...
    async def load(self, entry: Entry[Any]) -> None: ...
    async def take_room(self, entry: Entry[Any]) -> None: ...


class Sleepers:
    """The sleeping models of a catalogue."""

    def __init__(self, models: Models) -> None:
        self.models = models

    def all(self) -> list[Entry[Any]]:
        """All sleeping entries. They still take what they cannot give back (a process, recordings)."""
        models = self.models
        return [each for each in (*models.entries.values(), *models.removed) if each.state is State.SLEEPING]

    async def sleep(self, entry: Entry[Any], level: int, *, abort: bool = False) -> None:
        """Put a model to sleep by hand when its open requests have ended. Raises the reason if it cannot sleep."""
        await self.settled(entry)
        if entry.unit is None or entry.state not in (State.READY, State.SLEEPING):
            raise UserError(f"{entry.name!r} is not loaded: there is nothing to put to sleep.")
        if entry.state is State.SLEEPING:
            unit, entry.rest.by_hand = entry.unit, True
            if level > entry.rest.level or entry.awake:  # deeper, or parts of it are awake
                await unit.sleep(level)
                if entry.state is not State.SLEEPING:  # a request woke it meanwhile
                    return
                entry.rest.level, entry.rest.kept = level, unit.kept_bytes()
            entry.rest.asleep, entry.reserved = TAGS, False
            return
        self.models.drain(entry, level)
        entry.rest.by_hand = True
        task = entry.task
        if abort:
            await entry.unit.abort_all()
        if task is not None and (error := await asyncio.shield(task)) is not None:
            raise error

    async def wake(self, entry: Entry[Any], tags: Sequence[str]) -> None:
        """Wake a model by hand: all of its memory, or the parts in `tags`."""
        await self.settled(entry)
        if entry.state is not State.SLEEPING or entry.unit is None:
            return
        if set(entry.rest.asleep) - set(tags):
            await self._wake_part(entry, entry.unit, tags)
            return
        by_hand, entry.rest.by_hand = entry.rest.by_hand, False
        try:
            await self.models.load(entry)
        finally:
            entry.rest.by_hand = by_hand and entry.state is State.SLEEPING

    async def _wake_part(self, entry: Entry[Any], unit: Unit, tags: Sequence[str]) -> None:
        """Wake a part, which takes room as the whole would. A request may wake all of it meanwhile."""
        await self.models.take_room(entry)
        try:
            if entry.state is State.SLEEPING and entry.unit is unit:
                left = tuple(await unit.wake(tags))
                if entry.state is State.SLEEPING:
                    entry.rest.asleep = left
        except UserError as error:
            raise UnreadyError(f"{entry.name!r} cannot wake now: {error}", 5) from None
        finally:
            if entry.task is None:  # otherwise the task that loads or unloads it says so at its end
                entry.reserved = entry.awake

    async def settled(self, entry: Entry[Any]) -> None:
        """Wait until the entry neither loads nor falls asleep."""
        while entry.task is not None and (entry.state is State.LOADING or entry.rest.level):
            await asyncio.wait((entry.task,))

    async def lay(self, entry: Entry[Any]) -> UnreadyError | None:
        """Put a drained entry to sleep. If it cannot sleep, it stays loaded if a person asked for this, and is unloaded
        if others need room."""
        rest, unit = entry.rest, entry.unit
        assert unit is not None
        try:
            await unit.sleep(rest.level)
        except Exception as error:
            ours = None if isinstance(error, UserError | EngineDeadError) else error
            log.error("a model could not be put to sleep", exc_info=ours, extra={"data": {"model": entry.name}})
            if rest.by_hand:
                self.models.stays(entry)
                return UnreadyError(f"{entry.name!r} cannot sleep: {client_text(error)}", 5)
            rest.level = 0
            return await self.models.unload_now(entry)
        entry.task, entry.reserved = None, False
        entry.life.state, rest.asleep, rest.kept = State.SLEEPING, TAGS, unit.kept_bytes()
        self.models.arm(entry)
        self.models.notice_loss(entry)
        self._bound()
        self.models.stir()
        return None

    def _bound(self) -> None:
        """Unload the least recently used sleepers while all together take too much host memory."""
        most = self.models.bounds.sleep_memory
        if most is None:
            most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        asleep = [each for each in self.all() if each.rest.kept]
        while sum(each.rest.kept for each in asleep) > most:
            able = [each for each in asleep if each.may_end]
            if not able:
                return
            chosen = oldest(able)
            asleep.remove(chosen)
            self.models.drain(chosen)


def oldest(entries: Iterable[Entry[Any]]) -> Entry[Any]:
    """The least recently used entry."""
    return min(entries, key=lambda each: each.life.used)


def client_text(error: Exception | None) -> str:
    """An error's text for clients. It shows neither internal errors nor folders of this machine."""
    told = isinstance(error, UserError | EngineDeadError | OSError | MemoryError)
    if told and not isinstance(error, EngineFaultError) and str(error):
        return without_folders(str(error))
    return "it ended with an internal error (the log has it)."


def without_folders(text: str) -> str:
    """The same sentence with absolute paths cut to their last part."""
    return _FOLDERS.sub("", text)
