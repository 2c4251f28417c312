"""Loading and unloading adapters in engines. Owns: telling every engine which adapters come and go, and waiting for all
engines.

Must not know: HTTP, where adapters lie.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from tokenmill.core.errors import EngineDeadError, ParameterError
from tokenmill.core.request import Request
from tokenmill.engine.running.wire import Adapt
from tokenmill.server.adapters import AdapterBook, Served
from tokenmill.server.backend import ModelInfo
from tokenmill.server.engines.state import EngineRecord, Open

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("tokenmill.server")
LOOK_S = 0.5
"""How often a caller that waits for an adapter checks that there still are engines."""
MOST_DEATHS = 2
"""Deaths of engines while they read one adapter, after which the adapter is given up: the next life would die as
well."""


class AdapterFleet(Protocol):
    """The part of a fleet that loading adapters needs."""

    engines: Sequence[EngineRecord]
    open_requests: dict[str, Open]

    @property
    def broken(self) -> str | None: ...

    def tell_names(self) -> None: ...


@dataclass(slots=True)
class Loading:
    """An adapter that engines are reading. missing: the engines that have not answered yet."""

    served: Served
    missing: set[int]
    done: asyncio.Future[None]
    deaths: int = 0


class AdapterTraffic:
    """The adapters in a fleet's engines."""

    def __init__(self, fleet: AdapterFleet, book: AdapterBook) -> None:
        self.fleet, self.book = fleet, book
        self.waiting: dict[int, Loading] = {}
        """Loads in progress, by the adapter's number."""
        self.lock = asyncio.Lock()

    def named(self, info: ModelInfo, names: tuple[str, ...]) -> ModelInfo:
        """The model's facts, with the names of the model and of its adapters."""
        folders = {name: served.path for name, served in self.book.by_name.items()}
        numbers = dict(self.book.numbers)
        return replace(info, names=(*names, *numbers), adapters=numbers, folders=folders)

    async def load(self, name: str, path: Path, *, instead: bool = False) -> Served:
        """Load an adapter in every engine, then serve it. Errors in the adapter are raised. `instead`: replace the
        adapter of this name."""
        async with self.lock:
            ready = {engine.number for engine in self.fleet.engines if engine.ready}
            if not ready:
                raise EngineDeadError("no engine is ready")
            served = self.book.add(name, path, instead=instead)
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting[served.number] = Loading(served, ready, done)
            try:
                self._tell(Adapt(served.number, served.name, served.path))
                while not done.done():
                    await asyncio.wait((done,), timeout=LOOK_S)
                    if self.fleet.broken is not None:
                        raise EngineDeadError(self.fleet.broken)
                done.result()
            except BaseException:
                self.book.coming.pop(served.number, None)
                self._tell(Adapt(served.number, served.name))
                raise
            finally:
                del self.waiting[served.number]
            self.book.serve(served)
            self.fleet.tell_names()
            self.let_go()
            return served

    def current(self, request: Request) -> Request:
        """The request with its present adapter. Names may have changed while its prompt was read."""
        if not request.adapter or (number := self.book.current(request.adapter)) == request.adapter:
            return request
        return msgspec.structs.replace(request, adapter=number)

    def unload(self, name: str) -> Served:
        """Refuse new requests for it at once. Engines drop it when its open requests have ended."""
        served = self.book.remove(name)
        self.fleet.tell_names()
        self.let_go()
        return served

    def let_go(self) -> None:
        """Tell engines to drop adapters that have no name any more and that no open request uses."""
        if not self.book.left:
            return
        used = {entry.request.adapter for entry in self.fleet.open_requests.values()}
        for number in [number for number in self.book.left if number not in used]:
            served = self.book.left.pop(number)
            self._tell(Adapt(number, served.name))

    def introduce(self, engine: EngineRecord) -> None:
        """Tell a new life of an engine which adapters were loaded since the start. By itself it loads only those that
        engines start with."""
        for command in self.book.commands():
            self._send(engine, command)
        for loading in self.waiting.values():
            loading.deaths += engine.number in loading.missing
            if loading.deaths < MOST_DEATHS:
                loading.missing.add(engine.number)
                self._send(engine, Adapt(loading.served.number, loading.served.name, loading.served.path))
            elif not loading.done.done():
                loading.done.set_exception(EngineDeadError("engines died while they read this adapter"))

    def heard(self, engine: EngineRecord, adapted: Mapping[int, str]) -> None:
        """Take an engine's answer about an adapter: an empty text, or an error."""
        for number, said in adapted.items():
            waiting = self.waiting.get(number)
            if waiting is None:
                continue
            waiting.missing.discard(engine.number)
            if waiting.done.done():
                continue
            if said:
                waiting.done.set_exception(ParameterError(said, param="lora_path"))
            elif not waiting.missing:
                waiting.done.set_result(None)

    def _tell(self, command: Adapt) -> None:
        for engine in self.fleet.engines:
            if engine.ready:
                self._send(engine, command)

    def _send(self, engine: EngineRecord, command: Adapt) -> None:
        if engine.link is None:
            return
        try:
            engine.link.send(command)
        except Exception:
            log.exception("an engine could not be told of an adapter")
