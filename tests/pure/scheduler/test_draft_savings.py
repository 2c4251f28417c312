"""What drafts are said to have saved is what a made up clock says that they have."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.core.drafting import AllOfThem
from tokenmill.core.request import TokenDelta
from tokenmill.core.step import StepPlan
from tokenmill.scheduler.device_drafts import Ahead
from tokenmill.scheduler.roster import Limits
from tokenmill.speculate.control import Control, TreeControl
from tokenmill.speculate.patience import HostControl

PLAIN, EACH = 1.0, 0.25
"""Seconds of a step, and of each token more that it computes."""


def ahead_of(control: Any) -> Ahead:
    tables: Any = None
    return Ahead(Limits(8, 64), tables, control)


def committed(ahead: Ahead, rows: int, tried: int, depth: int, right: list[int]) -> list[TokenDelta]:
    """A step in which the first rows tried so many drafts each."""
    plan = StepPlan(id=0, rows=list(range(rows)), depth=depth, guesses=dict.fromkeys(range(len(right)), tried))
    deltas = [TokenDelta(f"r{n}", 0, [7] * (1 + stood), drafted=tried, accepted=stood) for n, stood in enumerate(right)]
    deltas += [TokenDelta(f"r{n}", 0, [7]) for n in range(len(right), rows)]
    ahead.credit(plan, deltas)
    return deltas


def of_host(rows: int) -> HostControl:
    control = HostControl()
    for more in (0, 3, 6):
        for _ in range(4):
            control.worked(rows + more, rows, PLAIN + EACH * more)
    return control


def of_device(rows: int, kind: type[Control] = Control) -> Control:
    control = kind(3, None, 64)
    for depth in (0, 3):
        for _ in range(4):
            control.timed(rows, depth, PLAIN + EACH * depth * rows)
    return control


@pytest.mark.parametrize("make", [of_host, of_device, lambda rows: of_device(rows, TreeControl)])
def test_a_step_alone(make: Any) -> None:
    """Each right draft saves its row a step; what trying took is taken from that, and from rows that tried none."""
    ahead = ahead_of(make(2))
    first, second = committed(ahead, 2, 3, 3, [3, 0])
    more = 6 * EACH
    assert first.saved == pytest.approx(3 * PLAIN - more) and second.saved == pytest.approx(-more)
    assert (ahead.saved, ahead.spent) == (pytest.approx(1.5 * PLAIN), pytest.approx(more))


def test_rows_that_guess_nothing_pay_their_part() -> None:
    ahead = ahead_of(of_host(2))
    first, second = committed(ahead, 2, 3, 0, [2])
    assert first.saved == pytest.approx(2 * PLAIN - 3 * EACH) and second.saved == pytest.approx(-3 * EACH)
    assert ahead.saved - ahead.spent == pytest.approx((first.saved + second.saved) / 2)


@pytest.mark.parametrize("control", [AllOfThem(3), HostControl(), Control(3, None, 64)])
def test_what_was_not_measured_is_not_said(control: Any) -> None:
    ahead = ahead_of(control)
    assert [d.saved for d in committed(ahead, 1, 3, 3, [3])] == [0.0] and (ahead.saved, ahead.spent) == (0.0, 0.0)


def test_a_step_without_drafts_saves_nothing() -> None:
    ahead = ahead_of(of_device(2))
    assert [d.saved for d in committed(ahead, 2, 3, 3, [])] == [0.0, 0.0] and not ahead.spent


def test_a_whole_text_adds_up() -> None:
    """Of one row: what it would have taken, less what it took."""
    ahead, took, tokens, saved = ahead_of(of_device(1)), 0.0, 0, 0.0
    for n in range(40):
        (delta,) = committed(ahead, 1, 3, 3, [n % 4])
        took, tokens, saved = took + PLAIN + 3 * EACH, tokens + 1 + n % 4, saved + delta.saved
    assert saved == pytest.approx(tokens * PLAIN - took) == pytest.approx(ahead.saved - ahead.spent)
