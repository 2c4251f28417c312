"""The short search for faster products when a model is loaded. Owns: when it runs, and what is reported of it.

It needs the model's operations, which are known once steps have been recorded, and an idle device. Steps that were
recorded with other kernels are recorded again. Must not know: kernels.
"""

from __future__ import annotations

from tokenmill.core.config import TuningOptions
from tokenmill.runner.runner import Runner


def warm(options: TuningOptions, runner: Runner, reasons: list[str]) -> None:
    """Record ahead what can be recorded, with the kernels that `--kernel-search` finds."""
    runner.warm()
    if options.kernel_search == "off":
        return
    search = getattr(runner.kernels, "search", None)
    if search is None:
        reasons.append("--kernel-search: only products of NVIDIA's GPUs are searched")
        return
    report = search(options.kernel_search_seconds)
    if report.found:
        for recorder in runner.recorders:
            recorder.forget_all()
        runner.warm()
    best = max(report.gains.values(), default=1.0)
    reasons.append(
        f"--kernel-search: {len(report.found)} of {report.operations} products are faster now, up to {best:.2f} times "
        f"({report.tried} ways tried, {report.unusable} unusable, {report.left} products not looked at)"
    )
