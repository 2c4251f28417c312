"""Several requests wait for one adapter: each hears what came of the reading."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.core.config import AdapterOptions
from tokenmill.engine.steps import adapters
from tokenmill.engine.steps.adapters import AdapterDesk, Reading


class Devices:
    """An executor whose one device reads an adapter within `slow` questions; `broken` ones cannot be read."""

    def __init__(self, slow: int) -> None:
        self.slow, self.broken = slow, True
        self.reading: dict[int, int] = {}
        self.kept: set[int] = set()

    def control_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if message["op"] == "read":
            self.reading.setdefault(message["id"], self.slow)
        failed: dict[int, str] = {}
        for number in message.get("ids", ()):
            left = self.reading.get(number)
            if left is not None and left > 0:
                self.reading[number] = left - 1
            elif left is not None:
                del self.reading[number]
                if self.broken:
                    failed[number] = "broken"
                else:
                    self.kept.add(number)
        ready = [number for number in message.get("ids", ()) if number in self.kept]
        return [{"ready": ready, "failed": failed, "elsewhere": {number: {} for number in ready}}]


def outcome(readings: list[Reading | None]) -> list[str | None]:
    """What each hears, in the order of the engine's loop: one is told before the next is looked at."""
    found: dict[int, str | None] = {i: None for i, reading in enumerate(readings) if reading is None}
    for _ in range(20):
        for i, reading in enumerate(readings):
            if i not in found and reading is not None and reading.done():
                error = reading.exception()
                found[i] = None if error is None else str(error)
    assert len(found) == len(readings), "somebody waits for ever"
    return [found[i] for i in range(len(readings))]


@pytest.mark.parametrize("slow", [0, 3])
def test_all_who_wait_hear_of_it(slow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "ASK_S", 0)
    devices = Devices(slow)
    roster = SimpleNamespace(adapters=SimpleNamespace(held={}, drop=lambda number: None), groups={})
    scheduler: Any = SimpleNamespace(roster=roster, flying=[])
    desk = AdapterDesk(devices, scheduler, AdapterOptions(enable_lora=True))  # type: ignore[arg-type]
    number = desk.register("one", str(tmp_path))
    assert outcome([desk.begin(number) for _ in range(3)]) == ["broken"] * 3
    first = desk.begin(number)
    while first is not None and not first.done():
        pass
    assert outcome([first, desk.begin(number)]) == ["broken"] * 2, "the second one has it read anew"
    devices.broken = False
    assert outcome([desk.begin(number) for _ in range(3)]) == [None] * 3, "its files were put right"
    assert desk.begin(number) is None
    devices.broken, devices.kept = True, set()
    assert outcome([desk.begin(number)]) == ["broken"]
    desk.dismiss(number)
    assert not desk.failed and not desk.numbers
