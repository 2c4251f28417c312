"""Results as pictures. Owns: one figure per kind of result. Needs matplotlib (the extra `bench`), only when called."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tokenmill.core.errors import UserError
from tokenmill.core.extras import pip_install


def check_plot(path: Path) -> None:
    """Refuse before a run a picture that could not be drawn after it."""
    _figures()
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: there is no such folder.")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: the name must end in .png, .svg or .pdf.")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a result of `bench` into a file."""
    draw = {"sweep": _sweep, "ablate": _ablate, "plan": _plan}.get(result.get("bench", ""), _draw_run)
    figure = draw(result)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def _figures() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise UserError(f"--plot needs matplotlib: {pip_install('bench')}") from error


def _title(result: dict[str, Any]) -> str:
    """What was measured, and on what."""
    where = result.get("device_name") or result.get("base_url") or "this machine"
    return f"{Path(str(result.get('model', ''))).name} on {where}: {result.get('workload', '')}"


def _logarithmic(axes: Any, which: str) -> None:
    """Label powers of ten as plain numbers, and if there are few, some numbers between them."""
    ticker = importlib.import_module("matplotlib.ticker")
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1.5, 0.6)))


def _legend(axes: Any, columns: int = 4) -> None:
    """Put the legend below the axes, where it covers nothing."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=columns, frameon=False, fontsize=9)


def _draw_run(result: dict[str, Any]) -> Any:
    """Distributions of latencies, and the make-up of steps over time if it is known."""
    timeline = result.get("timeline") or []
    figure = _figures()(figsize=(11 if timeline else 6.5, 4.4))
    axes = figure.subplots(1, 2 if timeline else 1, squeeze=False)[0]
    _distributions(axes[0], result)
    if timeline:
        seconds, ones, prompts = zip(*timeline, strict=True)
        since = [second - seconds[0] for second in seconds]
        axes[1].stackplot(since, ones, prompts, labels=("decoding rows", "prompt tokens"), step="post")
        axes[1].set(xlabel="seconds since the first step", ylabel="tokens in a step", title="what steps were made of")
        axes[1].set_yscale("symlog", linthresh=16)
        axes[1].yaxis.set_major_formatter("{x:g}")
        _legend(axes[1])
    figure.suptitle(_title(result), fontsize=11)
    return figure


def _distributions(axes: Any, result: dict[str, Any]) -> None:
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "end to end"}
    for name, label in names.items():
        values = [value for value in result.get("samples", {}).get(name, []) if value > 0]
        if values:
            shares = [i / len(values) for i in range(len(values) + 1)]
            axes.step([values[0], *values], shares, where="post", label=label)
    axes.set(xlabel="ms", ylabel="share of requests (ITL: of gaps)", ylim=(0, 1.02), title="latencies")
    _logarithmic(axes, "x")
    axes.grid(alpha=0.3)
    _legend(axes)


def _sweep(result: dict[str, Any]) -> Any:
    """Throughput against latency, one point per rate."""
    figure = _figures()(figsize=(11, 4.4))
    left, right = figure.subplots(1, 2)
    runs = result["runs"]
    rates = [run["offered_rate"] for run in runs]
    for colour, (name, label) in enumerate((("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))):
        for percent, style in (("p50", "-"), ("p99", "--")):
            times = [run[name][percent] for run in runs]
            left.plot(rates, times, style, color=f"C{colour}", marker="o", label=f"{label} {percent}")
    left.set(xlabel="requests/s offered", ylabel="ms", title="latency against load")
    right.plot([run["output_tokens_per_s"] for run in runs], [run["e2e_ms"]["p50"] for run in runs], marker="o")
    knee = result.get("knee_rate")
    for run in runs:
        if run["offered_rate"] in (rates[0], rates[-1], knee):  # all of them would lie on each other
            said, at = f"{run['offered_rate']:.3g} requests/s", (run["output_tokens_per_s"], run["e2e_ms"]["p50"])
            right.annotate(said, at, xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8)
    right.margins(x=0.15, y=0.12)
    right.set(xlabel="output tokens/s", ylabel="end to end p50, ms", ylim=(0, None), title="throughput against latency")
    if knee:
        left.axvline(knee, color="grey", linestyle=":", label="knee")
    for which in ("x", "y"):
        _logarithmic(left, which)
    _legend(left, 3)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{_title({**result, 'workload': ''}).removesuffix(': ')}, rate by rate", fontsize=11)
    return figure


def _plan(result: dict[str, Any]) -> Any:
    """Predicted speed by users at a time, one line per context."""
    figure = _figures()(figsize=(11, 4.4))
    left, right = figure.subplots(1, 2)
    for context in sorted({point["context"] for point in result["points"]}):
        points = [point for point in result["points"] if point["context"] == context]
        users = [point["batch"] for point in points]
        left.plot(users, [point["output_tokens_per_s"] for point in points], marker="o", label=f"{context} tokens in")
        right.plot(users, [point["tpot_ms"] for point in points], marker="o", label=f"{context} tokens in")
    left.set(xlabel="users at a time", ylabel="output tokens/s", ylim=(0, None), title="throughput, predicted")
    right.set(xlabel="users at a time", ylabel="ms", ylim=(0, None), title="time per token (TPOT), predicted")
    count = result.get("devices", result["ranks"])
    where = f"{count} x {result['device_title']}" if count > 1 else result["device_title"]
    figure.suptitle(f"{Path(result['model']).name} on {where}", fontsize=11)
    for axes in (left, right):
        _logarithmic(axes, "x")
        axes.grid(alpha=0.3)
        _legend(axes)
    return figure


def _ablate(result: dict[str, Any]) -> Any:
    """The worth of each option: throughput with it over throughput without, and latencies without it over latencies
    with it. `kinds` of a result: other columns of its rows, by name, with their headings."""
    rows = [row for row in result["options"] if row["worth"] is not None]
    usual = {"worth": "output tokens/s", "worth_ttft": "TTFT p50", "worth_itl_p99": "ITL p99"}
    kinds = result.get("kinds") or usual
    kinds = {kind: head for kind, head in kinds.items() if any(row.get(kind) for row in rows)}
    figure = _figures()(figsize=(3 + 3.2 * len(kinds), 1.6 + 0.4 * len(rows)))
    names = [row["name"] for row in rows]
    every = figure.subplots(1, max(1, len(kinds)), sharey=True, squeeze=False)[0]
    for axes, (kind, head) in zip(every, kinds.items(), strict=False):
        values = [row.get(kind) or 1.0 for row in rows]
        axes.barh(names, [value - 1.0 for value in values], left=1.0, color=["C0" if v >= 1 else "C3" for v in values])
        axes.axvline(1.0, color="black", linewidth=0.8)
        for i, row in enumerate(rows):
            label = "-" if row.get(kind) is None else f"{row[kind]:.2f}"
            axes.annotate(label, (max(values[i], 1.0), i), xytext=(3, 0), textcoords="offset points", va="center")
        if values and (max(values) > 5 or min(values) < 0.2):
            _logarithmic(axes, "x")
        axes.margins(x=0.18)
        axes.set(title=head, xlabel="times better with it")
    every[0].invert_yaxis()
    figure.suptitle(_title(result), fontsize=10)
    return figure
