"""Sleep and wake of an engine. Owns: that all its runners sleep or none, and that a sleeping engine takes no requests.

What each runner does is in load/sleeping.py. Must not know: tensors, HTTP, who decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tokenmill.core.errors import BusyError, UserError
from tokenmill.core.sleeping import TAGS, Slept, check_level, check_mode, check_tags
from tokenmill.engine.running.replicas import Replicas
from tokenmill.engine.steps.driver import Driver
from tokenmill.engine.steps.engine import Engine


def fall_asleep(desk: SleepDesk, driver: Driver, level: int, mode: str) -> None:
    """Let an engine that its caller steps fall asleep: first step open requests to their end, or end them."""
    check_level(level)
    engine = driver.engine
    with driver.alone():
        if check_mode(mode) == "abort":
            driver.end([name for part in engine.parts for name in part.scheduler.roster.groups])
        while engine.has_work or engine.flying:
            driver.step()
        desk.sleep(level)


def wake(desk: SleepDesk, driver: Driver, tags: Iterable[str] | None) -> None:
    """Wake an engine that its caller steps."""
    with driver.alone():
        desk.wake(tags)


class SleepDesk:
    """An engine's sleep, with the interface for whoever steps the engine."""

    def __init__(self, engine: Engine | Replicas) -> None:
        self.engine = engine
        self.asleep: tuple[str, ...] = ()
        self.level = 0
        self.closing = False
        """The engine will sleep once its requests have ended."""
        self.reread: Callable[[], object] = lambda: None
        """Called when weights must be read from the files again."""
        self.settle: Callable[[], object] = lambda: None
        """Called before weights go: waits for whoever reads them beside the steps."""

    def check(self, *, new: bool = False) -> None:
        """Refuse a request while the engine sleeps; a new one also while it is about to."""
        if self.asleep or (self.closing and new):
            raise BusyError("the model sleeps: wake_up() brings it back.")

    def sleep(self, level: int = 1) -> Slept:
        """Let all runners sleep; no request may be open."""
        check_level(level)
        if self.engine.has_work or self.engine.flying:
            raise UserError("requests are open: an engine sleeps between requests.")
        self.settle()
        self.engine.forget_prefixes()
        return self._tell({"what": "sleep", "level": level}, level)

    def wake(self, tags: Iterable[str] | None = None) -> Slept:
        """Wake the memory that these tags name."""
        return self._tell({"what": "wake", "tags": check_tags(tags)}, self.level)

    def _tell(self, message: dict[str, Any], level: int) -> Slept:
        said = self._ask(message)
        failed = next((each.error for each in said if each.error is not None), None)
        if failed is not None and message["what"] == "sleep":  # all ranks sleep, or none
            self._ask({"what": "wake", "tags": list(TAGS)})
        self.level = level if self.asleep else 0
        if failed is not None:
            raise UserError(failed)
        if self.level == 2:
            self.reread()
        return Slept(list(self.asleep), sum(each.freed for each in said), sum(each.kept for each in said))

    def _ask(self, message: dict[str, Any]) -> list[Slept]:
        said = [Slept(**each) for each in self.engine.ask_all(message)]
        self.asleep = tuple(tag for tag in TAGS if any(tag in each.asleep for each in said))
        return said
