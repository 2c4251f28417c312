"""The hash oracle at length, JSON on stdout; exits 1 on any wrong text.

python bench/oracle.py [STORIES] [FIRST SEED] [--kind KIND]     KIND: trees, device_drafts, crowded_beams, plain
(default: all by turns)
"""

from __future__ import annotations

import argparse
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
NAMES = [next(iter(kind), "plain") for kind in KINDS]


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", nargs="?", type=int, default=10_000)
    parser.add_argument("first", nargs="?", type=int, default=0)
    parser.add_argument("--kind", choices=NAMES)
    given = parser.parse_args()
    told = KINDS if given.kind is None else (KINDS[NAMES.index(given.kind)],)
    sys.exit(1 if main(given.stories, given.first, told) else 0)
