"""Every message format: so many generated messages, every split position into two pieces, equal to the whole.

python bench/structured/messages.py [--count 100]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tokenmill.text.messages.parser import MessageParser

made: Any = importlib.import_module("tests.pure.messages.test_formats")
FORMATS, messages, read = made.FORMATS, made.messages, made.read
TOOLS: Any = importlib.import_module("tests.pure.messages.writing").TOOLS


def splits(name: str, count: int) -> tuple[int, int]:
    """-> positions tried, and how many gave another message."""
    tried = wrong = 0
    for _, text, opened in messages(name, count):
        whole = read(FORMATS[name], [text], opened)
        for cut in range(1, len(text)):
            tried += 1
            wrong += read(FORMATS[name], [text[:cut], text[cut:]], opened) != whole
    return tried, wrong


HOSTILE = ('[{"', "'(", "<tool_call>", '{"name":"now","arguments":{', "now(a=[", "\\", " <")


def seconds(name: str, piece: str, size: int) -> float:
    """The best of three readings of `size` characters in pieces of 64."""
    calls = FORMATS[name].calls
    text = (calls.blocks[0].open if calls is not None else "<think>") + piece * (size // len(piece))
    best = 1e9
    for _ in range(3):
        began = time.process_time()
        parser = MessageParser(FORMATS[name], tools=TOOLS)
        for at in range(0, len(text), 64):
            parser.feed(text[at : at + 64])
        parser.finish()
        best = min(best, time.process_time() - began)
    return best


def growth(name: str, size: int = 1 << 19) -> float:
    """Time of 1 MB of hostile text over that of 512 KB, the worst of several kinds."""
    return max(seconds(name, piece, 2 * size) / seconds(name, piece, size) for piece in HOSTILE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    bad = 0
    for name in FORMATS:
        tried, wrong = splits(name, options.count)
        bad += wrong
        print(
            f"{name:24} {tried:7} splits, {wrong} wrong; 1 MB / 512 KB of hostile text: {growth(name):.2f}", flush=True
        )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
