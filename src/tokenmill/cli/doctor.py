"""`tokenmill doctor`: what this machine has, and which kernels run. Owns: printing the findings."""

from __future__ import annotations

import json
import time
from typing import Any

import typer

from tokenmill.cli.errors import FAILED, INTERRUPTED
from tokenmill.cli.interrupts import hear_time_limits
from tokenmill.cli.loading import show_waiting
from tokenmill.core.errors import ParameterError
from tokenmill.device.named import check_device

_MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


TYPES = {"cpu": ("float32", "bfloat16", "int8", "int4"), "gpu": ("bfloat16", "fp8", "int8", "int4")}
"""The types that --measure multiplies. float16 is as fast as bfloat16 on GPUs, and slow on CPUs."""


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
    measure: bool = typer.Option(
        False,
        "--measure",
        help="Measure memory bandwidth and products instead, for a minute or more; Ctrl-C prints what there is.",
    ),
    device: str = typer.Option(
        None,
        "--device",
        help="The device to measure: `cpu`, `cuda`, `cuda:1`, `mps`, `xpu`, or `auto` (the default).",
    ),
) -> None:
    """Look at this machine: devices, memory, kernels, extras; each finding says what to do about it."""
    if measure:
        _measure(device or "auto", as_json)
        return
    if device is not None:
        raise ParameterError("--device needs --measure; without that flag all devices are examined.")
    with show_waiting("Looking around"):
        from tokenmill.measure.doctor import examine

        findings = examine()
    if as_json:
        print(json.dumps({"findings": [vars(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            mark, colour = _MARKS[finding.status]
            typer.secho(mark, fg=colour, nl=False)
            typer.echo(f"  {finding.name}: {finding.detail}")
            if finding.advice:
                typer.echo(f"      -> {finding.advice}")
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(FAILED)


def _measure(device: str, as_json: bool) -> None:
    """Measure, and tell on standard error what is done. If stopped early, print what has been measured."""
    check_device(device)
    with show_waiting("Getting ready"):
        from tokenmill.device.memory import pick_device
        from tokenmill.measure.calibrate import measure_calibrated
        from tokenmill.measure.kept_measurements import EXPERTS, keep_measurement

    picked, found = pick_device(device), dict[str, Any]()
    types = TYPES["cpu" if picked == "cpu" else "gpu"]
    start, stopped = time.perf_counter(), False
    hear_time_limits()
    try:
        with show_waiting("Measuring") as now:
            measure_calibrated(picked, types, told=_told, now=now, found=found)
    except KeyboardInterrupt:
        stopped = True
    unfinished = ", ".join(found.get("calibration", {"unfinished": ["everything"]})["unfinished"])
    _told(f"{'stopped' if stopped else 'done'} after {time.perf_counter() - start:.1f} s")
    if not unfinished:
        keep_measurement(found, picked, found["title"], (*types, EXPERTS))
    else:
        _told(f"not measured: {unfinished}")
    if as_json:
        print(json.dumps({"measured": found}, indent=2))
    elif "calibration" in found:
        _show(found)
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _told(line: str) -> None:
    typer.echo(line, err=True)


def _show(found: dict[str, Any]) -> None:
    typer.echo(f"{found['device']}: {found['title']}")
    typer.echo(f"  memory: read {found['read_gb_per_s']:.1f} GB/s, copy {found['copy_gb_per_s']:.1f} GB/s")
    for dtype, rate in found["tflops"].items():
        typer.echo(f"  products in {dtype}: {rate:.3f} TFLOP/s")
    if found["link"] is not None:
        typer.echo(f"  to the next device: {found['link']['gb_per_s']:.1f} GB/s, {found['link']['us']:.1f} us")
    known = found["calibration"]
    for name, head in (("linear", "products"), ("experts", "experts")):
        for curve in known[name]:
            parts = [f"{rows:.3g}: {2 * rows / ps:.2f}" for rows, ps in curve["ps_per_weight"] if ps]
            cycled = f"{curve['set_bytes'] / 2**20:.0f} MiB of them"
            typer.echo(f"  this engine's {curve['format']} {head}, {cycled}, TFLOP/s by rows: {', '.join(parts)}")
    for name, head in (("decode_gb_per_s", "K/V"), ("decode_8bit_gb_per_s", "8-bit K/V")):
        for size, rate in known.get("attention", {}).get(name, ()):
            typer.echo(f"  attention, decoding, {size / 2**20:.1f} MiB of {head}: {rate:.1f} GB/s")
    for count, rate in known.get("attention", {}).get("prefill_tflops", ()):
        typer.echo(f"  attention, prompts of {count} tokens: {rate:.3f} TFLOP/s")
    for name, head in (("decoding", "single tokens"), ("prompting", "prompts")):
        for point in known.get("host", {}).get(name, ()):
            step, layer = point["step_ms"], point["layer_ms"]
            typer.echo(f"  around a step of {point['rows']} rows, {head}: {step:.3f} ms, {layer:.4f} a layer")
