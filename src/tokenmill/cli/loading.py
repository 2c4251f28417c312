"""What a person sees while a model loads. Owns: showing that long work is going on, and the lines that describe a
loaded model.

It imports rich and the engine only when called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.engine.interfaces.async_llm import AsyncLLM
    from tokenmill.engine.running.build import Built

FIRST_S, OFTEN_S = 0.8, 1.5
"""Seconds until the first line about long work on an output that is not a terminal (a command takes about a second to
begin), and between lines."""


def load_engine(options: Mapping[str, Any]) -> tuple[AsyncLLM, float]:
    """Load a streaming engine with checked options. Returns it with the seconds that loading took."""
    started = time.perf_counter()
    with show_waiting(f"Loading {options['model']}"):
        from tokenmill.engine.interfaces.async_llm import AsyncLLM

        llm = AsyncLLM(**options)
    return llm, time.perf_counter() - started


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """A moving line on a terminal, and nothing elsewhere. The yielded function replaces its text."""
    if not sys.stderr.isatty():
        yield lambda new: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(text)
        yield lambda new: shown.update(task, description=new)


class Heartbeat:
    """Lines on a standard error that is not a terminal, so that long work does not look like a hang. `more`: further
    words of the next line."""

    def __init__(self, doing: str, first: float = FIRST_S) -> None:
        self.doing = doing
        self.more = ""
        self._first = first
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> Heartbeat:
        if not sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _tell(self) -> None:
        pause = self._first
        while not self._ended.wait(pause):
            more = f"; {self.more}" if self.more else ""
            spent = time.monotonic() - self._began
            say(f"tokenmill: still {self.doing} ({spent:.0f} s){more}")
            pause = OFTEN_S


@contextlib.contextmanager
def show_waiting(doing: str, first: float = FIRST_S) -> Iterator[Callable[[str], None]]:
    """A moving line on a terminal, else a line now and then. The yielded function says how far the work is."""
    with spinner(f"{doing} ...") as moving, Heartbeat(f"{doing[:1].lower()}{doing[1:]}", first) as beat:

        def heard(new: str) -> None:
            beat.more = new
            moving(f"{doing} ... {new}")

        yield heard


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[str, int, int], None]]:
    """The progress of weights or layers (name, done, of how many): a bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    with bars as bar, Heartbeat(f"{doing[:1].lower()}{doing[1:]}") as beat:
        task = bar.add_task(doing, total=None)

        def tell(name: str, done: int, total: int) -> None:
            beat.more = f"{done} of {total}"
            bar.update(task, completed=done, total=total, description=name[-60:])

        yield tell


def say(text: str) -> None:
    """Print a line for people to standard error."""
    with contextlib.suppress(OSError):  # nobody reads it, and the work goes on
        sys.stderr.write(text + "\n")  # in one write, because log lines may come between two
        sys.stderr.flush()


def describe(name: str, built: Built, seconds: float) -> list[str]:
    """The loaded model in a few lines: its name, size, context, device, and why the engine decided as it did."""
    facts, config = built.facts, built.config
    held = min(facts.num_blocks, default=0) * config.cache.block_size
    lines = [
        f"{name}: {size(facts.weight_bytes)} of weights in {facts.dtype} on {facts.device}, ready in {seconds:.1f} s",
        f"context {facts.max_model_len:,} tokens" + (f"; K/V cache of {held:,} tokens" if held else ""),
    ]
    return lines + [f"note: {reason}" for reason in facts.reasons]


def weight_bytes(folder: Path) -> int:
    """The bytes of a folder's files of weights."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
