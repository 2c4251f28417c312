"""Every message format: so many generated messages, every split position into two pieces, equal to the whole.

python bench/structured/messages.py [--count 100]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.pure.messages.test_formats import FORMATS, messages, read
from tests.pure.messages.writing import TOOLS

from tokenmill.text.messages.parser import parse_message


def splits(name: str, count: int) -> tuple[int, int]:
    """-> positions tried, and how many gave another message."""
    tried = wrong = 0
    for _, text, opened in messages(name, count):
        whole = read(FORMATS[name], [text], opened)
        for cut in range(1, len(text)):
            tried += 1
            wrong += read(FORMATS[name], [text[:cut], text[cut:]], opened) != whole
    return tried, wrong


def growth(name: str) -> float:
    """Seconds of 2 MB of hostile brackets over those of 1 MB, the best of three each."""
    calls = FORMATS[name].calls
    opened = calls.blocks[0].open if calls is not None else "<think>"
    spent = []
    for size in (1 << 20, 2 << 20):
        text = opened + '[{"' * (size // 3)
        best = 1e9
        for _ in range(3):
            began = time.process_time()
            parse_message(FORMATS[name], text, tools=TOOLS)
            best = min(best, time.process_time() - began)
        spent.append(best)
    return spent[1] / spent[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    bad = 0
    for name in FORMATS:
        tried, wrong = splits(name, options.count)
        bad += wrong
        print(f"{name:24} {tried:7} splits, {wrong} wrong; 2 MB / 1 MB of brackets: {growth(name):.2f}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
