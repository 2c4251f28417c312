"""Fleets at every moment: whoever kills engines is given up, nobody else is, and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.pure.server.fleet_stories import tell_story

TWO_SUSPECTS = 111
"""In this story one suspect passes its trial and kills the engine while the next one is tried."""


@pytest.mark.parametrize("seeds", [range(15), range(15, 30), [TWO_SUSPECTS]], ids=["first", "second", "two suspects"])
def test_random_stories(seeds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        tell_story(seed, monkeypatch)
