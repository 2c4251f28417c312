"""How large each model will be. Owns: asking another process to count the models, once for all whose files are on this
machine.

Must not know: how models are counted, HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from tokenmill.core.config import EngineConfig
from tokenmill.core.files import in_home
from tokenmill.demo.files import demo_model
from tokenmill.measure.memory_need import Need
from tokenmill.process.parent import end_with_parent, starts_last
from tokenmill.server.engines.links import without_main
from tokenmill.server.many_models.entry import Entry, Spec

log = logging.getLogger("tokenmill.server")
PATIENCE_S = 600.0
LOOK_S = 0.02
Asked = tuple[Sequence[EngineConfig], int | None, int]
Counted = tuple[int, list[Need]]


def count_needs(answer: Any, asked: Asked, lasting: bool) -> None:
    """Count the models, and send the counts or what went wrong. This runs in the other process, which imports torch and
    ends when the server is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    end_with_parent(lasting)
    from tokenmill.measure.memory_needs import find_needs

    try:
        answer.send(find_needs(*asked))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def name_places(answer: Any, asked: Sequence[str], lasting: bool) -> None:
    """Send which names of devices mean the same, or what went wrong; in the other process, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(lasting)
    from tokenmill.measure.memory_needs import find_places

    try:
        answer.send(find_places(asked))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


async def ask_child(asked: Asked) -> Counted:
    """The sizes of models, as another process counts them."""
    counted: Counted = await _ask(count_needs, asked)
    return counted


async def ask_places(names: Sequence[str]) -> dict[str, str]:
    """One name for all names of the same device, as another process finds them."""
    found: dict[str, str] = await _ask(name_places, names)
    return found


async def _ask(work: Callable[..., None], asked: Any) -> Any:
    """Start the other process, ask it, and end it. Whoever is cancelled meanwhile does not wait for it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with contextlib.closing(ours):
        with contextlib.closing(theirs), without_main(work):
            child = context.Process(target=work, args=(theirs, asked, starts_last()))
            child.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not ours.poll():
                    await asyncio.sleep(LOOK_S)
            found = ours.recv()
        finally:
            child.kill()
            child.join()
            child.close()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


class Survey:
    """The sizes of a catalogue's entries. `ask` counts several models; `found_memory` receives the bytes that all
    together may take; `served` gives the models that there are now, because models come and go."""

    def __init__(
        self,
        served: Callable[[], Iterable[Spec]],
        memory: int | None,
        ask: Callable[[Asked], Awaitable[Counted]] = ask_child,
        ask_places: Callable[[Sequence[str]], Awaitable[dict[str, str]]] = ask_places,
    ) -> None:
        self.served, self.memory, self.ask, self.ask_places = served, memory, ask, ask_places
        self.places: dict[str, str] = {}
        """One name for each device, by the names under which models have it. Empty while all models have one name."""
        self.measured: dict[str, int] = {}
        """Free bytes by device."""
        self.known: dict[str, tuple[EngineConfig, Need]] = {}
        """By name, what was counted: another model of that name is counted anew."""
        self.lock = asyncio.Lock()
        self.found_memory: Callable[[str, int], None] = lambda place, memory: None

    async def size_of(self, entry: Entry[Any]) -> int:
        """An entry's bytes; 0: not known. An entry that sets no size of its K/V cache gets its share of memory."""
        async with self.lock:
            await self._learn_places(entry.spec)
            need = self._need(entry.spec) or await self._look(entry.spec)
        if need.whole and not need.fixed and need.kv:
            entry.spec = entry.spec.with_kv(need.kv)
            self.known[entry.name] = entry.spec.engine, need
        entry.beside = max(0, need.beside)
        return need.whole

    def _need(self, spec: Spec) -> Need | None:
        """What was counted for this model. None: nothing yet."""
        config, need = self.known.get(spec.names[0], (None, None))
        return need if config == spec.engine else None

    def place_of(self, entry: Entry[Any]) -> str:
        """The device whose memory an entry takes, by a name that all its models share."""
        return self._place(entry.spec)

    def _place(self, spec: Spec) -> str:
        return self.places.get(spec.place, spec.place)

    async def _learn_places(self, spec: Spec) -> None:
        """`auto` and `cpu` may be one device, whose memory all its models share."""
        names = {spec.place, *(each.place for each in self.served())}
        if len(names) < 2 or names <= self.places.keys():
            return
        try:
            self.places.update({name: name for name in names} | await self.ask_places(sorted(names)))
        except Exception:
            log.exception("the names of devices could not be compared")

    async def _look(self, spec: Spec) -> Need:
        """Count this model, and all others of its device whose files are on this machine."""
        place = self._place(spec)
        mates = [each for each in self.served() if self._place(each) == place and each.names[0] != spec.names[0]]
        batch = [spec, *(each for each in mates if self._need(each) is None and _is_here(each))]
        given = self.measured.get(place) if self.memory is None else self.memory
        try:
            memory, needs = await self.ask(([each.engine for each in batch], given, 1 + len(mates)))
        except Exception:
            log.exception("models could not be counted: they are loaded without knowing their sizes")
            needs = [Need()]
        else:
            if given is None:
                self.measured[place] = memory
                self.found_memory(place, memory)
        self.known |= {each.names[0]: (each.engine, need) for each, need in zip(batch, needs, strict=False)}
        return needs[0]


def _is_here(spec: Spec) -> bool:
    name = spec.engine.model.model
    return demo_model(name) is not None or in_home(name).exists()
