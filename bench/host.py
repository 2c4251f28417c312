"""Cost of the host: median plan() + commit() for decode with N running sequences. JSON on stdout.

python bench/host.py [N ...]        (default 64 256 1024)
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import SequenceGroup
from tokenmill.core.step import RowSampling, StepResult
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.scheduler.search import Sampling
from tokenmill.speculate.none import NoDrafter


def measure(rows: int, steps: int = 200) -> float:
    """Median milliseconds of one decode step's plan() and commit(), device time excluded."""
    tables = BlockTables([GroupLayout(0)], [rows * 40], 16)
    limits = Limits(max_rows=rows, max_step_tokens=max(rows * 64, 8192))
    scheduler = Scheduler(limits, tables, make_policy("fcfs"), NoDrafter())
    for i in range(rows):
        prompt = [i + 1, *range(2, 65)]
        request = Request(id=str(i), prompt_ids=prompt, params=SamplingParams(), arrival=float(i))
        scheduler.add(SequenceGroup(request, Sampling(), RowSampling(end_ids=[0]), 64 + steps + 50))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.plan()
        middle = time.perf_counter()
        assert plan is not None
        result = StepResult(plan_id=plan.id, tokens=[[7] if s else [] for s in plan.samples])
        resumed = time.perf_counter()
        scheduler.commit(result)
        times.append((middle - start + time.perf_counter() - resumed) * 1e3)
    return statistics.median(times[20:])


if __name__ == "__main__":
    sizes = [int(a) for a in sys.argv[1:]] or [64, 256, 1024]
    print(json.dumps({"plan_commit_ms": {n: round(measure(n), 4) for n in sizes}}))
