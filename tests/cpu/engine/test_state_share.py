"""How many rows a model with states gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenmill.compute.descriptors import KVFormat, KVSpec, ModelSpec, StateSpec
from tokenmill.core.config import EngineConfig
from tokenmill.engine.load.memory import count_states, pages_beside
from tokenmill.kvcache.pool import make_layout

EACH = StateSpec((("float32", (256, 1024)),))
"""1 MiB."""
MIB = 1 << 20


def rows(budget: int, *, wanted: int = 1 << 15, asked: int = 512, guesses: int = 0, told: bool = True) -> int:
    """The rows in a cache of so many MiB. A token's pages take 2 KiB, so a usual sequence's take about 2 MiB."""
    config = EngineConfig()
    config = replace(config, schedule=replace(config.schedule, max_num_seqs=asked))
    layout = make_layout((KVSpec("full", 2, 256, 256),), 16, KVFormat("bfloat16"))
    reasons: list[str] = []
    beside = pages_beside(layout, wanted, 8192)
    spec = ModelSpec(vocab_size=1, max_positions=1, kv_specs=(), hidden_size=1, states=(EACH,))
    found = count_states(config, spec, budget * MIB, reasons, guesses, beside if told else None)[0]
    assert bool(reasons) == (found < asked)
    return found


@pytest.mark.parametrize("guesses", [0, 3])
def test_states_leave_pages_for_usual_sequences_and_one_of_the_longest(guesses: int) -> None:
    for budget in (100, 400, 1000, 3000):
        found = rows(budget, guesses=guesses)
        assert found >= min(512, budget // 2 - 1), "half is always theirs"
        assert rows(budget, guesses=guesses, told=False) == min(512, budget // 2 - 1)
    assert rows(200, wanted=1 << 16) == 99, "the longest sequence needs 128 MiB, so states take no more than half"
    assert rows(1200, wanted=256) == 512, "short sequences need few pages"
    assert rows(2000, asked=30) == 30
