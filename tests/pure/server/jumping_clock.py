"""An event loop whose clock jumps to the next timer whenever nothing runs: what happens on it takes no time, and
depends on nothing but its dice."""

from __future__ import annotations

import asyncio
import selectors
import types
from collections.abc import Coroutine
from typing import Any


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[name-defined, misc]
    """Waits for nothing: time passes instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found: list[Any] = super().select(0)
        if not found:
            self.now += timeout or 0.0
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop on that clock."""

    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run_on_jumping_clock(story: Coroutine[Any, Any, None], patch: Any, *modules: Any) -> None:
    """Run the story. patch: pytest's monkeypatch, which gives these modules its clock."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        clock = types.SimpleNamespace(monotonic=runner.get_loop().time)
        for module in modules:
            patch.setattr(module, "time", clock)
        runner.run(story)
