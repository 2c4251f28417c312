"""What a person sees while a model loads. Owns: the spinner and the lines that describe a loaded model.

Imports rich and the engine only when called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.engine.async_llm import AsyncLLM
    from tokenmill.engine.build import Built


def load(options: Mapping[str, Any]) -> tuple[AsyncLLM, float]:
    """A streaming engine from checked options, and the seconds that loading took."""
    started = time.perf_counter()
    with waiting_told(f"Loading {options['model']}"):
        from tokenmill.engine.async_llm import AsyncLLM

        llm = AsyncLLM(**options)
    return llm, time.perf_counter() - started


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """A moving line on a terminal, whose text what is yielded replaces; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda new: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(text)
        yield lambda new: shown.update(task, description=new)


@contextlib.contextmanager
def waiting_told(doing: str, every: float = 5.0) -> Iterator[Callable[[str], None]]:
    """A moving line on a terminal; elsewhere a line now and then, so that nobody takes long work for a hang."""
    ended = threading.Event()
    began = time.monotonic()
    more = ""

    def tell() -> None:
        while not ended.wait(every):
            say(f"tokenmill: still {doing[:1].lower()}{doing[1:]} ({time.monotonic() - began:.0f} s){more}")

    def heard(new: str) -> None:
        nonlocal more
        more = f"; last: {new}"
        moving(f"{doing} ... {new}")

    thread = threading.Thread(target=tell, daemon=True)
    with spinner(f"{doing} ...") as moving:
        if not sys.stderr.isatty():
            thread.start()
        try:
            yield heard
        finally:
            ended.set()


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar over weights or layers (name, done, of how many), on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(doing, total=None)

        def tell(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=name[-60:])

        yield tell


def say(text: str) -> None:
    """A line for people, beside what a verb prints."""
    with contextlib.suppress(OSError):  # nobody reads it: the work goes on all the same
        sys.stderr.write(text + "\n")  # in one piece: log lines come between others
        sys.stderr.flush()


def describe(built: Built, seconds: float) -> list[str]:
    """The loaded model in a few lines: name, size, context, device, and what was decided for which reason."""
    facts, config = built.facts, built.config
    blocks = " + ".join(f"{n:,}" for n in facts.num_blocks)
    lines = [
        f"{config.model.model}: {size(facts.weight_bytes)} of weights in {facts.dtype} on {facts.device}, "
        f"ready in {seconds:.1f} s",
        f"context {facts.max_model_len:,} tokens; K/V cache of {blocks} blocks of {config.cache.block_size} tokens",
    ]
    return lines + [f"note: {reason}" for reason in facts.reasons]


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
