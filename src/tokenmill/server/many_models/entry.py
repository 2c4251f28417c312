"""One model of a server: what was configured, and its present state. Owns: these records, and which models may be
loaded together.

Must not know: HTTP, engines, how loading is decided (catalogue.py).
"""

from __future__ import annotations

import asyncio
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from tokenmill.core.config import EngineConfig, ServerConfig
from tokenmill.core.errors import ParameterError
from tokenmill.core.sleeping import TAGS
from tokenmill.engine.options.adapter_names import read_modules
from tokenmill.server.adapters import AdapterBook

NEVER = -1.0
"""For ever, as seconds to stay loaded without requests."""
FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 60.0


class UnreadyError(Exception):
    """A model cannot be loaded now. `never`: trying again does not help until somebody changes something."""

    def __init__(self, message: str, retry_after: float = 1.0, *, never: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.never = retry_after, never


class GoneError(Exception):
    """The model was removed from the catalogue."""


class State(StrEnum):
    """An entry's state."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    FAILED = "failed"


@dataclass(frozen=True)
class Spec:
    """One model's configuration. `ttl`: seconds without requests until it is unloaded (0: never). `groups`: of each
    group only one member is loaded at a time. `alone`: nothing else is loaded beside it. `memory`: bytes, if set by
    hand."""

    engine: EngineConfig
    server: ServerConfig = field(default_factory=ServerConfig)
    aliases: tuple[str, ...] = ()
    ttl: float = 0.0
    pin: bool = False
    alone: bool = False
    groups: frozenset[str] = frozenset()
    memory: int | None = None
    stored: bool = False
    """Is it a stored model? Capitals make no difference to such a name."""

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names; answers carry the first one."""
        given = [name.strip() for name in (self.engine.model.served_model_name or "").split(",") if name.strip()]
        return (*(given or [self.engine.model.model]), *self.aliases)

    def check_names(self) -> None:
        """Refuse names that answers and lists could not carry. Names of folders may hold any bytes."""
        for name in self.names:
            if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
                raise ParameterError(
                    f"The model's name {ascii(name)[:200]} holds a character that is no text: give it another name "
                    "(--served-model-name, or an entry of --models).", param="served_model_name",
                )  # fmt: skip

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters with which its engines start."""
        return tuple(name for name, _ in read_modules(self.engine.adapters.lora_modules or []))

    @property
    def place(self) -> str:
        """The device whose memory it takes, as configured."""
        return self.engine.execute.device

    @property
    def sleeps(self) -> bool:
        """May its memory be given back without unloading it?"""
        return self.engine.execute.enable_sleep_mode

    @property
    def keep(self) -> float:
        """How long it stays loaded without requests."""
        return NEVER if self.pin or not self.ttl else self.ttl

    def with_kv(self, kv_bytes: int) -> Spec:
        """The same configuration with this many bytes of K/V cache."""
        cache = replace(self.engine.cache, kv_cache_memory_bytes=kv_bytes)
        return replace(self, engine=replace(self.engine, cache=cache))


class Unit(Protocol):
    """A loaded model."""

    def open_requests(self) -> int:
        """Requests on which it still works, even if their clients have left."""
        ...

    def held_bytes(self) -> int:
        """The bytes that it takes, as it has measured them. 0: it does not know."""
        ...

    def kept_bytes(self) -> int:
        """Host memory that it takes while it sleeps."""
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back. No request is open. If this fails, it raises, and the model stays awake."""
        ...

    async def wake(self, tags: Sequence[str]) -> list[str]:
        """Take memory again. Returns the tags of memory that is still missing."""
        ...

    async def abort_all(self) -> None:
        """End its open requests now."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Life:
    """An entry's changing state. `open`: requests that hold the model; `waiting`: requests that wait for it."""

    state: State = State.UNLOADED
    open: int = 0
    waiting: int = 0
    keep: float = NEVER
    used: float = field(default_factory=time.monotonic)
    """When a request last came or ended."""
    since: float = 0.0
    """When it became ready."""
    load_s: float = 0.0
    error: Exception | None = None
    failures: int = 0
    """Failed loads in a row."""
    retry_at: float = 0.0
    expiry: asyncio.TimerHandle | None = None
    loads: int = 0


@dataclass(slots=True)
class SleepRecord:
    """One model's sleep. `level`: of this sleep, or of the one for which it drains (0: it drains to be unloaded).
    `asleep`: tags of the memory given back. `by_hand`: a person put it to sleep, so only a person wakes it."""

    level: int = 0
    asleep: tuple[str, ...] = ()
    by_hand: bool = False
    kept: int = 0
    """Host memory that it takes while it sleeps, in bytes."""
    wakes: int = 0

    def over(self) -> None:
        """Reset: the model is awake or unloaded."""
        self.level, self.asleep, self.by_hand, self.kept = 0, (), False, 0


U = TypeVar("U", bound=Unit)


class Entry(Generic[U]):
    """One model."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.name = spec.names[0]
        self.book = AdapterBook(spec.engine.adapters, spec.names)
        """Its adapters. They outlive a load."""
        self.life = Life(keep=spec.keep)
        self.rest = SleepRecord()
        self.unit: U | None = None
        self.size = spec.memory or 0
        """The bytes that it takes: first as predicted, then as measured."""
        self.beside = 0
        """The part of `size` that the model cannot measure itself."""
        self.measured = False
        self.reserved = False
        """Does its memory count as taken? It does while the model is loaded, or being loaded or unloaded."""
        self.task: asyncio.Task[UnreadyError | None] | None = None
        """The task that loads or unloads it."""
        self.removed = False
        self.stay = False
        """It drains, but shall stay loaded after all."""
        self.must_go = False
        """It drains because somebody wants it gone, not only its room: it does not stay."""
        self.lost: str | None = None
        """Why its engines are gone for good, noted while a task loads, wakes or unloads it."""

    @property
    def state(self) -> State:
        """Its state."""
        return self.life.state

    @property
    def busy(self) -> bool:
        """Has it open requests?"""
        return self.life.open > 0 or (self.unit is not None and self.unit.open_requests() > 0)

    @property
    def idle(self) -> bool:
        """Could it be unloaded or put to sleep now?"""
        return self.state is State.READY and not self.busy and not self.life.waiting and not self.spec.pin

    @property
    def awake(self) -> bool:
        """Is it loaded, and not wholly asleep?"""
        return self.state is State.READY or (self.state is State.SLEEPING and self.rest.asleep != TAGS)

    @property
    def may_end(self) -> bool:
        """Is it asleep, and could it be unloaded now?"""
        return self.state is State.SLEEPING and not self.spec.pin and not self.life.waiting

    @property
    def expires_in(self) -> float | None:
        """Seconds until it is unloaded if no request comes. None: never."""
        if self.spec.pin or self.life.keep < 0:
            return None
        return self.life.keep if self.busy else max(0.0, self.life.used + self.life.keep - time.monotonic())

    def conflicts(self, other: Entry[U]) -> bool:
        """Is it forbidden to load both together?"""
        return other is not self and (
            self.spec.alone or other.spec.alone or not self.spec.groups.isdisjoint(other.spec.groups)
        )

    def failed(self, error: Exception) -> None:
        """Note a failed load. The pause before the next try grows each time."""
        life = self.life
        pause = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2**life.failures)
        life.state, life.error, life.failures = State.FAILED, error, life.failures + 1
        life.retry_at = time.monotonic() + pause
