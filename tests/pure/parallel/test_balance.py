"""When experts move: behind which steps, how much at a time, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.core.config import make_config
from tokenmill.core.errors import UserError
from tokenmill.engine.options.balance_settings import BalanceConfig, check_balance, read_balance
from tokenmill.engine.steps import balance as balancing
from tokenmill.engine.steps.balance import Balance
from tokenmill.parallel.experts import Move, apply_move, balance_of, first_placement

COUNTS = [[90, 80, 1, 1], [1, 1, 50, 60]]


class Ranks:
    """Two ranks' worth of answers."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def control(self, message: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(message)
        return {"experts": [4, 4], "bytes": [10, 10]} if message["op"] == "state" else {"counts": COUNTS}

    def control_all(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        self.asked.append(message)
        return [{}, {}]


def ops(ranks: Ranks) -> list[str]:
    return [message["op"] for message in ranks.asked]


def make(**said: Any) -> tuple[Ranks, Balance]:
    ranks = Ranks()
    return ranks, Balance(ranks, BalanceConfig(**said), 2)  # type: ignore[arg-type]


def test_nothing_moves_while_plans_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing, "PAUSE_BYTES", 20)
    ranks, found = make(window_size=3, step_interval=8)
    for steps in range(5):
        assert found.between(steps, 0, flying=True)
    assert ops(ranks) == ["state"]
    assert not found.between(5, 0, flying=True), "what came before the window is about to be forgotten"
    assert found.between(5, 0, flying=False) and ops(ranks) == ["state", "counts"]
    assert found.between(7, 0, flying=True)
    assert not found.between(8, 0, flying=True) and found.between(8, 7, flying=False)
    assert ops(ranks) == ["state", "counts", "counts", "move"]
    assert ranks.asked[-1]["epoch"] == 7 and found.left and found.moved == 2
    assert found.balancedness == pytest.approx(0.5 * (172 + 112) / (170 + 110))
    assert found.between(11, 0, flying=True)
    assert not found.between(12, 0, flying=True) and found.between(12, 0, flying=False)
    assert ops(ranks)[-1] == "move" and not found.left and found.moved == 4
    now = [first_placement(4, 2, 0) for _ in COUNTS]
    for message in ranks.asked:
        for number, moves in message.get("moves", []):
            for to, source, swap in moves:
                apply_move(now[number], Move(to, source, swap))
    assert now == found.placements
    assert [balance_of(seen, each, 2) > 0.9 for seen, each in zip(COUNTS, now, strict=True)] == [True, True]


def test_a_window_may_be_longer_than_an_interval() -> None:
    ranks, found = make(window_size=20, step_interval=8)
    for steps in range(80):
        assert found.between(steps, 0, flying=False)
    assert len(found.windows) == 3 and ops(ranks).count("counts") == 9
    assert ops(ranks).count("move") == 1, "what is well placed stays"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs --enable-expert-parallel"),
        ({"enable_expert_parallel": True, "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"enable_expert_parallel": True, "enable_lora": True}, "--enable-lora"),
        ({"enable_expert_parallel": True, "enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({"eplb_config": {"steps": 4}}, "'steps' is unknown; there are window_size, step_interval"),
        ({"eplb_config": {"window_size": 0}}, "window_size is a whole number of at least 1"),
        ({"eplb_config": {"step_interval": 1.5}}, "step_interval is a whole number"),
        ({"eplb_config": {"num_redundant_experts": -1}}, "at least 0"),
        ({"eplb_config": {"log_balancedness": 1}}, "true or false"),
        ({"eplb_config": {"use_async": True}}, "use_async is not built"),
        ({"eplb_config": {"policy": "random"}}, "policy"),
        ({"enable_eplb": False, "eplb_config": {"window_size": 5}}, "no effect without --enable-eplb"),
        ({"enable_eplb": False, "eplb_config": {}}, "no effect without --enable-eplb"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    config = make_config({}, **{"tensor_parallel_size": 2, "enable_eplb": True, **options})
    with pytest.raises(UserError, match=said):
        check_balance(config)


def test_what_is_said_is_read() -> None:
    asked = {"window_size": 5, "policy": "default", "use_async": False}
    assert read_balance(make_config({}, enable_eplb=True, eplb_config=asked).parallel) == BalanceConfig(window_size=5)
    assert read_balance(make_config({}).parallel) is None
