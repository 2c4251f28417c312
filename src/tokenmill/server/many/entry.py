"""One model of a server: what was asked for, and where its life stands. Owns: the records, what may lie together.

Must not know: HTTP, engines, how loading is decided (catalogue.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from tokenmill.core.config import EngineConfig, ServerConfig
from tokenmill.engine.adapter_names import read_modules
from tokenmill.server.adapters import AdapterBook

NEVER = -1.0
"""Seconds to stay without requests: for ever."""
FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 60.0


class UnreadyError(Exception):
    """A model cannot be had now. `never`: trying again will not help until somebody changes something."""

    def __init__(self, message: str, retry_after: float = 1.0, *, never: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.never = retry_after, never


class GoneError(Exception):
    """The model has been taken out of the catalogue."""


class State(StrEnum):
    """Where an entry stands."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    FAILED = "failed"


@dataclass(frozen=True)
class Spec:
    """What is asked of one model. `ttl`: seconds without requests until it is unloaded (0: never). `groups`: of each,
    one member is loaded at a time; `alone`: nothing else is. `memory`: bytes, if somebody knows better than we do."""

    engine: EngineConfig
    server: ServerConfig = field(default_factory=ServerConfig)
    aliases: tuple[str, ...] = ()
    ttl: float = 0.0
    pin: bool = False
    alone: bool = False
    groups: frozenset[str] = frozenset()
    memory: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its names; the first one is what answers carry."""
        given = [name.strip() for name in (self.engine.model.served_model_name or "").split(",") if name.strip()]
        return (*(given or [self.engine.model.model]), *self.aliases)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that it is started with."""
        return tuple(name for name, _ in read_modules(self.engine.adapters.lora_modules or []))

    @property
    def place(self) -> str:
        """The device whose memory it takes, as it was asked for."""
        return self.engine.execute.device

    @property
    def sleeps(self) -> bool:
        """May its memory be given back without unloading it?"""
        return self.engine.execute.enable_sleep_mode

    @property
    def keep(self) -> float:
        """How long it stays without requests."""
        return NEVER if self.pin or not self.ttl else self.ttl

    def with_kv(self, kv_bytes: int) -> Spec:
        """The same with so much K/V cache."""
        cache = replace(self.engine.cache, kv_cache_memory_bytes=kv_bytes)
        return replace(self, engine=replace(self.engine, cache=cache))


class Unit(Protocol):
    """A loaded model."""

    def open_requests(self) -> int:
        """Requests that it still works on, whoever waits for them."""
        ...

    def held_bytes(self) -> int:
        """What it takes, as it measured itself; 0: it cannot tell."""
        ...

    def kept_bytes(self) -> int:
        """Host memory that it takes instead while it sleeps."""
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back; nothing is open. Raises what is wrong, and stays awake."""
        ...

    async def wake(self, tags: Sequence[str]) -> list[str]:
        """Take memory again; -> tags that are still not here."""
        ...

    async def abort_all(self) -> None:
        """Its open requests end now."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Life:
    """What comes and goes with time. `open`: leases; `waiting`: who wants one."""

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
    """In a row."""
    retry_at: float = 0.0
    expiry: asyncio.TimerHandle | None = None
    loads: int = 0


@dataclass(slots=True)
class Rest:
    """One model's sleep. `level`: of it, or of the sleep that it drains for (0: it drains to be unloaded); `asleep`:
    which of its memory is not here; `by_hand`: somebody put it to sleep, and somebody wakes it."""

    level: int = 0
    asleep: tuple[str, ...] = ()
    by_hand: bool = False
    kept: int = 0
    """Bytes of the host."""
    wakes: int = 0

    def over(self) -> None:
        """It is awake, or gone."""
        self.level, self.asleep, self.by_hand, self.kept = 0, (), False, 0


U = TypeVar("U", bound=Unit)


class Entry(Generic[U]):
    """One model."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.name = spec.names[0]
        self.book = AdapterBook(spec.engine.adapters, spec.names)
        """Its adapters outlive what is loaded."""
        self.life = Life(keep=spec.keep)
        self.rest = Rest()
        self.unit: U | None = None
        self.size = spec.memory or 0
        """Bytes: what was predicted, then what was measured."""
        self.beside = 0
        """Of them, what it cannot measure itself."""
        self.measured = False
        self.reserved = False
        """Its memory is its own: it is loaded, or being loaded or unloaded."""
        self.task: asyncio.Task[UnreadyError | None] | None = None
        """Its loading, or its unloading."""
        self.removed = False
        self.stay = False
        """It drains, and shall not after all."""

    @property
    def state(self) -> State:
        """Where it stands."""
        return self.life.state

    @property
    def busy(self) -> bool:
        """Has it open requests?"""
        return self.life.open > 0 or (self.unit is not None and self.unit.open_requests() > 0)

    @property
    def idle(self) -> bool:
        """Could it go now?"""
        return self.state is State.READY and not self.busy and not self.life.waiting and not self.spec.pin

    @property
    def may_end(self) -> bool:
        """Does it sleep, so that it could be unloaded now?"""
        return self.state is State.SLEEPING and not self.spec.pin and not self.life.waiting

    @property
    def expires_in(self) -> float | None:
        """Seconds until it is unloaded if nobody asks; None: never."""
        if self.spec.pin or self.life.keep < 0:
            return None
        return self.life.keep if self.busy else max(0.0, self.life.used + self.life.keep - time.monotonic())

    def conflicts(self, other: Entry[U]) -> bool:
        """May they not be loaded together?"""
        return other is not self and (
            self.spec.alone or other.spec.alone or not self.spec.groups.isdisjoint(other.spec.groups)
        )

    def failed(self, error: Exception) -> None:
        """It could not be loaded: the next try waits, longer each time."""
        life = self.life
        pause = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2**life.failures)
        life.state, life.error, life.failures = State.FAILED, error, life.failures + 1
        life.retry_at = time.monotonic() + pause
