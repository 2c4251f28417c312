"""The hash oracle at length, JSON on stdout; exits 1 on any wrong text.

python bench/oracle.py [STORIES] [FIRST SEED] [KIND]     KIND: trees, device_drafts, crowded_beams (default: by turns)
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
import traceback
from dataclasses import asdict

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from tests.pure.scheduler.oracle import run_story

KINDS: tuple[dict[str, bool], ...] = ({}, {"device_drafts": True}, {"crowded_beams": True}, {"trees": True})
"""What stories are told by turns."""


def main(count: int, first: int, kinds: tuple[dict[str, bool], ...] = KINDS) -> int:
    """Run `count` random stories; -> how many went wrong."""
    totals: dict[str, int] = {}
    wrong: list[int] = []
    start = time.perf_counter()
    for seed in range(first, first + count):
        try:
            scheduler = run_story(seed, **kinds[seed % len(kinds)])
        except Exception:
            wrong.append(seed)
            traceback.print_exc()
            continue
        for name, value in asdict(scheduler.counters).items():
            if isinstance(value, int):
                totals[name] = totals.get(name, 0) + value
        snapshots = scheduler.tables.snapshots
        if snapshots is not None:
            for name in ("saved", "hits", "evicted"):
                totals["states " + name] = totals.get("states " + name, 0) + getattr(snapshots, name)
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"stories": count, "wrong": len(wrong), "wrong_seeds": wrong[:20], "seconds": seconds, **totals}))
    return len(wrong)


if __name__ == "__main__":
    told = sys.argv[1:]
    only = ({told.pop(): True},) if told and not told[-1].isdigit() else KINDS
    numbers = [int(a) for a in told] + [10_000, 0][len(told) :]
    sys.exit(1 if main(numbers[0], numbers[1], only) else 0)
