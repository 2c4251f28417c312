"""The short search for faster products when a model is loaded. Owns: when it runs, that all ranks of an engine make
products in the same ways, and what is reported.

It needs the model's operations, which are known once steps have been recorded, and an idle device. Steps that were
recorded with other kernels are recorded again. Must not know: kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.core.config import TuningOptions
from tokenmill.runner.runner import Runner

Share = Callable[[Any], list[Any]]


def warm(options: TuningOptions, runner: Runner, reasons: list[str], share: Share = lambda said: [said]) -> None:
    """Record ahead what can be recorded, with the kernels that `--kernel-search` finds. share: gives plain data to all
    ranks, and returns each rank's (parallel/stages.py)."""
    search = getattr(runner.kernels, "search", None)
    if search is not None:
        _meet(runner, share)
    runner.warm()
    if options.kernel_search == "off":
        return
    if search is None:
        reasons.append("--kernel-search: only products of NVIDIA's GPUs are searched")
        return
    report = search(options.kernel_search_seconds)
    if any(share(bool(report.found))):
        _meet(runner, share)
        for recorder in runner.recorders:
            recorder.forget_all()
        runner.warm()
    best = max(report.gains.values(), default=1.0)
    reasons.append(
        f"--kernel-search: {len(report.found)} of {report.operations} products are faster now, up to {best:.2f} times "
        f"({report.tried} ways tried, {report.unusable} unusable, {report.left} products not looked at)"
    )


def _meet(runner: Runner, share: Share) -> None:
    """Take the ways that any rank has found; of several the first rank's. Ranks that round a drafter's products, or
    others that each of them makes whole, in different orders would choose different tokens."""
    kernels: Any = runner.kernels
    said = share(kernels.found_ways())
    if len(said) > 1:
        kernels.take_ways({name: way for each in reversed(said) for name, way in each.items()})
