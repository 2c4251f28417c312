"""What a person sees while a model loads. Owns: the spinner and the lines that describe a loaded model.

Imports rich and the engine only when called.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.engine.async_llm import AsyncLLM
    from tokenmill.engine.build import Built


def load(options: Mapping[str, Any]) -> tuple[AsyncLLM, float]:
    """A streaming engine from checked options, and the seconds that loading took."""
    started = time.perf_counter()
    with spinner(f"Loading {options['model']} ..."):
        from tokenmill.engine.async_llm import AsyncLLM

        llm = AsyncLLM(**options)
    return llm, time.perf_counter() - started


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """A moving line on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


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
