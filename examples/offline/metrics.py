"""An engine's numbers after some work."""

from __future__ import annotations

import sys

from tokenmill import LLM, Counter, Gauge, Histogram, Metric, SamplingParams, Vector


def main(model: str = "demo") -> list[Metric]:
    """Generate, then print every metric by its kind."""
    llm = LLM(model=model, disable_log_stats=False)
    llm.generate(["Hello, my name is", "The capital of France is"], SamplingParams(max_tokens=8))
    found = llm.get_metrics()
    for metric in found:
        if isinstance(metric, (Gauge, Counter)):
            print(f"{metric.name} = {metric.value:g}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name}: {metric.count} values, {metric.sum:g} in all, {metric.buckets}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
