"""Ctrl-C in a conversation: heard where it can stop something, once; dropped everywhere else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tokenmill.cli.interrupts import Interrupts, hear_time_limits


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """Tests in the background have SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_what_cannot_be_stopped_goes_on() -> None:
    with Interrupts() as interrupts:
        press(3)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            press()
        press(3)
        reached = []
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            try:
                press()
            finally:
                press(2)  # the way out is not interrupted again
                reached.append("the end")
        assert reached == ["the end"]
        with interrupts.allowed():
            pass
        press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_work_is_cancelled_and_may_tidy_up() -> None:
    ended: list[str] = []

    async def work(presses: int) -> None:
        try:
            press(presses)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ended.append("whole")
        finally:
            press(presses)
            await asyncio.sleep(0)
            ended.append("tidy")

    with Interrupts() as interrupts, asyncio.Runner() as runner:
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(runner, work(2))
        assert ended == ["tidy"]
        interrupts.run(runner, work(0))
        assert ended == ["tidy", "whole", "tidy"]
        press()


def test_failures_of_work_are_raised() -> None:
    async def fails() -> None:
        raise ValueError("no")

    for ours in (True, False):
        with Interrupts(ours=ours) as interrupts, asyncio.Runner() as runner, pytest.raises(ValueError, match="no"):
            interrupts.run(runner, fails())


def test_without_a_terminal_the_first_one_ends_everything() -> None:
    with Interrupts(ours=False), pytest.raises(KeyboardInterrupt):
        press()


@pytest.mark.parametrize("ignored", [False, True], ids=("in front", "in the background"))
def test_a_time_limit_is_heard_as_ctrl_c(ignored: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hear_time_limits()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
