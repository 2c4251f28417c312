"""Users in a closed loop on an engine. Owns: which user asks when, on a real clock or on a predicted one.

Must not know: servers, terminals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenmill.core.errors import TokenmillError
from tokenmill.core.request import Request, SamplingParams
from tokenmill.engine.steps.engine import Engine
from tokenmill.measure.throughput import Trace, summaries
from tokenmill.measure.workloads import Job

Clock = Callable[[], float]


def closed_loop(engine: Engine, clock: Clock, jobs: Sequence[Job], users: int, seconds: float = 0.0) -> dict[str, Any]:
    """`users` at a time ask; each asks the next job when its last answer has ended. Returns the figures of the answers
    that ended. After `seconds` (0: never) nobody asks any more. Decoding is greedy, and every answer has its full
    length."""
    start = clock()
    coming = deque(enumerate(jobs))
    asked: dict[str, float] = {}
    traces: dict[str, Trace] = {}
    prompts = still = 0
    while True:
        late = seconds and clock() - start >= seconds and traces
        while coming and not late and still < users:
            still += 1
            number, (ids, count) = coming.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            engine.add(Request(id=str(number), prompt_ids=ids, params=params))
            asked[str(number)], traces[str(number)] = clock(), Trace()
            prompts += len(ids)
        if not engine.has_work:
            break
        for delta in engine.step():
            trace, now = traces[delta.request_id], clock() - asked[delta.request_id]
            if delta.error is not None:
                raise TokenmillError(f"Request {int(delta.request_id) + 1} failed: {delta.error}")
            if delta.tokens:
                trace.marks.append((now, len(delta.tokens)))
            if delta.finish is not None:
                trace.end = now
                still -= 1
    took = clock() - start
    outputs = sum(trace.count for trace in traces.values())
    return {
        "requests": len(traces),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "seconds": round(took, 6),
        "output_tokens_per_s": round(outputs / took, 4),
        "total_tokens_per_s": round((prompts + outputs) / took, 4),
        **summaries(list(traces.values())),
        "each": [_figures(trace) for trace in traces.values()],
    }


def _figures(trace: Trace) -> dict[str, float]:
    """The figures of one request in milliseconds, by the names of an objective."""
    first = trace.marks[0][0]
    gaps = [b[0] - a[0] for a, b in zip(trace.marks, trace.marks[1:], strict=False)]
    found = {"ttft": first, "e2e": trace.end}
    found["tpot"] = (trace.end - first) / (trace.count - 1) if trace.count > 1 else 0.0
    found["itl"] = max(gaps, default=0.0)
    return {name: 1000 * value for name, value in found.items()}


def share_within(found: Mapping[str, Any], slo: Mapping[str, float]) -> float:
    """The share of requests that meet every term of the objective (milliseconds by metric)."""
    good = [all(each[metric] <= limit for metric, limit in slo.items()) for each in found["each"]]
    return sum(good) / len(good) if good else 0.0
