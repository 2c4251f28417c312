"""What all tests of whole engines share. Workers start warm. Guesses change no byte, and how many of them pay is a
matter of time: here all of them are made, as often as text gives any (tests/pure/scheduler/test_draft_control.py has a
clock of its own)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.warm_starts_helpers import warm_starts

__all__ = ["warm_starts"]


@pytest.fixture(autouse=True)
def every_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of n-grams and suffixes; models and heads are told by each test."""
    pytest.importorskip("torch")
    from tokenmill.engine.options import drafting
    from tokenmill.engine.running import build
    from tokenmill.speculate.patience import HostControl, Patience

    def control_of(found: drafting.Speculation | None, step_guesses: int, *, on_device: bool) -> Any:
        if on_device and found is not None and found.method in drafting.OF_HOST:
            return None
        return drafting.control_of(found, step_guesses, on_device=on_device)

    monkeypatch.setattr(build, "control_of", control_of)
    monkeypatch.setattr(HostControl, "closed", False)
    monkeypatch.setattr(Patience, "most", lambda self, tokens, most, control: most)
