"""Sleep: a loaded model gives memory back and takes it again. Owns: levels, tags and modes by name, what is refused,
and the protocol of sleepers.

Level 1 keeps the weights' contents in host memory or a file; level 2 reads them from the model's files again. Keys and
values are dropped at both. Must not know: devices, requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from tokenmill.core.errors import ParameterError, UserError, shown

WEIGHTS, CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, CACHE)
LEVELS = (1, 2)
MODES = ("wait", "abort")
"""What happens to open requests: wait until they end, or end them with the output they have."""


class Slept(msgspec.Struct, array_like=True):
    """The result of sleeping or waking. `asleep`: tags that still sleep. `freed`: bytes of device memory that were
    given back. `kept`: bytes of pinned host memory that are used instead."""

    asleep: list[str] = []
    freed: int = 0
    kept: int = 0
    error: str | None = None


class Sleeper(Protocol):
    """Gives a runner's memory back, and takes it again. `asleep`: tags whose memory is given back."""

    @property
    def asleep(self) -> list[str]:
        """Tags whose memory is given back."""
        ...

    def sleep(self, level: int) -> Slept: ...
    def wake(self, tags: Iterable[str]) -> Slept: ...
    def changed(self) -> None:
        """Weights were changed: copies of the old numbers are wrong now."""
        ...


class NoSleep:
    """The Sleeper of an engine that was started without sleep."""

    def __init__(self) -> None:
        self.asleep: list[str] = []

    def sleep(self, level: int) -> Slept:
        raise UserError("this engine cannot sleep: load it with --enable-sleep-mode (enable_sleep_mode=True).")

    def wake(self, tags: Iterable[str]) -> Slept:
        """Nothing to do: it is awake."""
        return Slept()

    def changed(self) -> None:
        """Nothing is kept."""


def check_level(level: object) -> int:
    """Return the level, 1 or 2; refuse anything else."""
    if type(level) is not int or level not in LEVELS:
        raise ParameterError(
            f"level must be 1 (weights are kept in host memory) or 2 (they are read again), got {level!r}.",
            param="level",
        )
    return level


def check_tags(tags: Iterable[str] | None) -> list[str]:
    """Return the tags; refuse unknown ones. None or an empty list means all."""
    if isinstance(tags, str):
        tags = [tags]
    if tags is not None and not isinstance(tags, Iterable):
        raise ParameterError(f"tags must be a list of names, got {shown(tags)}.", param="tags")
    given = list(tags or TAGS)
    for tag in given:
        if tag not in TAGS:
            raise ParameterError(f"tags must be among {', '.join(TAGS)}, got {tag!r}.", param="tags")
    return given


def check_mode(mode: object) -> str:
    """Return the mode, which says how open requests end; refuse an unknown one."""
    if mode not in MODES:
        more = ": requests are not frozen across a sleep" if mode == "keep" else ""
        raise ParameterError(f"mode must be {' or '.join(MODES)}, got {mode!r}{more}.", param="mode")
    return str(mode)


def obey(sleeper: Sleeper, message: dict[str, Any]) -> dict[str, Any]:
    """Obey a control message; returns the result or the error as plain data."""
    try:
        slept = sleeper.sleep(message["level"]) if message["what"] == "sleep" else sleeper.wake(message["tags"])
    except (UserError, OSError, MemoryError) as error:
        slept = Slept(list(sleeper.asleep), error=str(error))
    return {"asleep": slept.asleep, "freed": slept.freed, "kept": slept.kept, "error": slept.error}
