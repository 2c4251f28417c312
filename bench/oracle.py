"""The hash oracle at length, JSON on stdout; exits 1 on any wrong text.

python bench/oracle.py [STORIES] [FIRST SEED] [--kind KIND]     KIND: trees, device_drafts, crowded_beams, plain, lives
(default: all by turns)
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from tests.pure.scheduler.oracle import run_story
from tests.pure.scheduler.oracle_lives import run_lives

from tokenmill.scheduler.scheduler import Scheduler

Tell = Callable[[int], Scheduler]
KINDS: dict[str, Tell] = {
    "plain": run_story,
    "device_drafts": partial(run_story, device_drafts=True),
    "crowded_beams": partial(run_story, crowded_beams=True),
    "trees": partial(run_story, trees=True),
    "lives": run_lives,
}
"""What stories are told by turns, each from its seed."""


def main(count: int, first: int, kinds: tuple[Tell, ...] = tuple(KINDS.values())) -> int:
    """Run `count` random stories; -> how many went wrong."""
    totals: dict[str, int] = {}
    wrong: list[int] = []
    start = time.perf_counter()
    for seed in range(first, first + count):
        try:
            scheduler = kinds[seed % len(kinds)](seed)
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
    parser.add_argument("--kind", choices=list(KINDS))
    given = parser.parse_args()
    told = tuple(KINDS.values()) if given.kind is None else (KINDS[given.kind],)
    sys.exit(1 if main(given.stories, given.first, told) else 0)
