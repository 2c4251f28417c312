"""How large each model will be. Owns: asking another process to count the models, once for all whose files are on this
machine.

Must not know: how models are counted, HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tokenmill.core.config import EngineConfig
from tokenmill.core.files import in_home
from tokenmill.demo.files import demo_model
from tokenmill.measure.memory_need import Need
from tokenmill.server.engines.links import without_main
from tokenmill.server.many_models.entry import Entry, Spec

log = logging.getLogger("tokenmill.server")
PATIENCE_S = 600.0
Asked = tuple[Sequence[EngineConfig], int | None, int]


def count_needs(asked: Asked) -> tuple[int, list[Need]]:
    """Count the models. This runs in the other process, which imports torch."""
    from tokenmill.measure.memory_needs import find_needs

    return find_needs(*asked)


def ask_child(asked: Asked) -> tuple[int, list[Need]]:
    """Start the other process, ask it, and end it."""
    context = multiprocessing.get_context("spawn")
    quiet = (signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the server
    with ProcessPoolExecutor(1, mp_context=context, initializer=signal.signal, initargs=quiet) as pool:
        with without_main(count_needs):
            counted = pool.submit(count_needs, asked)
        return counted.result(timeout=PATIENCE_S)


class Survey:
    """The sizes of a catalogue's entries. `ask` counts several models; `found_memory` receives the bytes that all
    together may take."""

    def __init__(
        self,
        specs: Sequence[Spec],
        memory: int | None,
        ask: Callable[[Asked], tuple[int, list[Need]]] = ask_child,
    ) -> None:
        self.specs = {spec.names[0]: spec for spec in specs}
        self.memory, self.ask = memory, ask
        self.measured: dict[str, int] = {}
        """Free bytes by device."""
        self.known: dict[str, Need] = {}
        self.lock = asyncio.Lock()
        self.found_memory: Callable[[str, int], None] = lambda place, memory: None

    async def size_of(self, entry: Entry[Any]) -> int:
        """An entry's bytes; 0: not known. An entry that sets no size of its K/V cache gets its share of memory."""
        async with self.lock:
            if entry.name not in self.known:
                await self._look(entry)
        need = self.known[entry.name]
        if need.whole and not need.fixed and need.kv:
            entry.spec = entry.spec.with_kv(need.kv)
        entry.beside = max(0, need.beside)
        return need.whole

    async def _look(self, entry: Entry[Any]) -> None:
        """Count this entry, and all others of its device whose files are on this machine."""
        self.specs.setdefault(entry.name, entry.spec)
        batch, place = [entry.name], entry.spec.place
        mates = [name for name, spec in self.specs.items() if spec.place == place]
        batch += [n for n in mates if n not in self.known and n != entry.name and _is_here(self.specs[n])]
        configs = [self.specs[name].engine for name in batch]
        given = self.measured.get(place) if self.memory is None else self.memory
        try:
            memory, needs = await asyncio.to_thread(self.ask, (configs, given, len(mates)))
        except Exception:
            log.exception("models could not be counted: they are loaded without knowing their sizes")
            self.known[entry.name] = Need()
            return
        self.known |= dict(zip(batch, needs, strict=True))
        if given is None:
            self.measured[place] = memory
            self.found_memory(place, memory)


def _is_here(spec: Spec) -> bool:
    name = spec.engine.model.model
    return demo_model(name) is not None or in_home(name).exists()
