"""Results as pictures. Owns: one figure per kind of result. Needs matplotlib (the extra `bench`), only when called."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tokenmill.core.errors import UserError


def check_plot(path: Path) -> None:
    """Refuse before a run what could not be drawn after it."""
    _figures()
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: there is no such folder.")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: the name must end in .png, .svg or .pdf.")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a result of `bench` into a file."""
    draw = {"sweep": _sweep, "ablate": _ablate, "plan": _plan}.get(result.get("bench", ""), _run)
    figure = draw(result)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def _figures() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'tokenmill[bench]'.") from error


def _run(result: dict[str, Any]) -> Any:
    """Latency distributions, and what steps were made of where that is known."""
    timeline = result.get("timeline") or []
    figure = _figures()(figsize=(11 if timeline else 6, 4))
    axes = figure.subplots(1, 2 if timeline else 1, squeeze=False)[0]
    _distributions(axes[0], result)
    if timeline:
        seconds, ones, prompts = zip(*timeline, strict=True)
        axes[1].stackplot(seconds, ones, prompts, labels=("decoding rows", "prompt tokens"), step="post")
        axes[1].set(xlabel="seconds", ylabel="tokens in the step", title="what steps were made of")
        axes[1].set_yscale("symlog", linthresh=16)
        axes[1].legend(loc="upper right")
    return figure


def _distributions(axes: Any, result: dict[str, Any]) -> None:
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "end to end"}
    for name, label in names.items():
        values = [value for value in result.get("samples", {}).get(name, []) if value > 0]
        if values:
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axes.step(values, shares, where="post", label=label)
    axes.set(xscale="log", xlabel="ms", ylabel="share of requests", ylim=(0, 1.02), title=str(result["workload"]))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _sweep(result: dict[str, Any]) -> Any:
    """Throughput against latency, one point per rate."""
    figure = _figures()(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    runs = result["runs"]
    rates = [run["offered_rate"] for run in runs]
    for name, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")):
        for percent, style in (("p50", "-"), ("p99", "--")):
            left.plot(rates, [run[name][percent] for run in runs], style, marker="o", label=f"{label} {percent}")
    left.set(xlabel="requests/s offered", xscale="log", ylabel="ms", yscale="log", title="latency against load")
    right.plot([run["output_tokens_per_s"] for run in runs], [run["e2e_ms"]["p50"] for run in runs], marker="o")
    right.set(xlabel="output tokens/s", ylabel="end to end p50, ms", title="throughput against latency")
    if result.get("knee_rate"):
        left.axvline(result["knee_rate"], color="grey", linestyle=":", label="knee")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _plan(result: dict[str, Any]) -> Any:
    """Predicted speed by users at a time, one line per context."""
    figure = _figures()(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    for context in sorted({point["context"] for point in result["points"]}):
        points = [point for point in result["points"] if point["context"] == context]
        users = [point["batch"] for point in points]
        left.plot(users, [point["output_tokens_per_s"] for point in points], marker="o", label=f"{context} tokens in")
        right.plot(users, [point["tpot_ms"] for point in points], marker="o", label=f"{context} tokens in")
    left.set(xlabel="users at a time", xscale="log", ylabel="output tokens/s", title="throughput, predicted")
    right.set(xlabel="users at a time", xscale="log", ylabel="ms", ylim=(0, None), title="time per token, predicted")
    figure.suptitle(f"{result['model']} on {result.get('devices', result['ranks'])} x {result['device_title']}")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _ablate(result: dict[str, Any]) -> Any:
    """What each option is worth: throughput with it over throughput without, and latencies without it over with it."""
    rows = [row for row in result["options"] if row["worth"] is not None]
    kinds = {"worth": "output tokens/s", "worth_ttft": "TTFT p50", "worth_itl_p99": "ITL p99"}
    kinds = {kind: head for kind, head in kinds.items() if any(row.get(kind) for row in rows)}
    figure = _figures()(figsize=(3 + 3.2 * len(kinds), 1.6 + 0.4 * len(rows)))
    names = [row["name"] for row in rows]
    every = figure.subplots(1, max(1, len(kinds)), sharey=True, squeeze=False)[0]
    for axes, (kind, head) in zip(every, kinds.items(), strict=False):
        values = [row.get(kind) or 1.0 for row in rows]
        axes.barh(names, [value - 1.0 for value in values], left=1.0, color=["C0" if v >= 1 else "C3" for v in values])
        axes.axvline(1.0, color="black", linewidth=0.8)
        for i, row in enumerate(rows):
            said = "-" if row.get(kind) is None else f"{row[kind]:.2f}"
            axes.annotate(said, (max(values[i], 1.0), i), xytext=(3, 0), textcoords="offset points", va="center")
        if values and (max(values) > 5 or min(values) < 0.2):
            axes.set_xscale("log")
        axes.margins(x=0.18)
        axes.set(title=head, xlabel="times better with it")
    every[0].invert_yaxis()
    figure.suptitle(f"{result.get('model', '')} on {result.get('device_name', '')}, {result['workload']}", fontsize=10)
    return figure
