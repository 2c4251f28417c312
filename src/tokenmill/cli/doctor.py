"""`tokenmill doctor`: what this machine has, and which kernels run. Owns: printing the findings."""

from __future__ import annotations

import json

import typer

from tokenmill.cli.errors import FAILED
from tokenmill.cli.loading import spinner

_MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


TYPES = {"cpu": ("float32", "bfloat16", "int8", "int4"), "gpu": ("bfloat16", "fp8", "int8", "int4")}
"""What --measure multiplies; float16 is as fast as bfloat16 on GPUs, and slow on CPUs."""


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
    measure: bool = typer.Option(False, "--measure", help="Measure memory bandwidth and products instead (seconds)."),
    device: str = typer.Option("auto", "--device", help="`cpu`, `cuda`, `cuda:1`, or `auto`; for --measure."),
) -> None:
    """Look at this machine: devices, memory, kernels, extras; each finding says what to do about it."""
    if measure:
        _measure(device, as_json)
        return
    with spinner("Looking around ..."):
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
    with spinner("Measuring ..."):
        from tokenmill.device.memory import pick_device
        from tokenmill.measure.calibrate import measure_calibrated

        picked = pick_device(device)
        found = measure_calibrated(picked, TYPES["cpu" if picked == "cpu" else "gpu"])
    if as_json:
        print(json.dumps({"measured": found}, indent=2))
        return
    typer.echo(f"{found['device']}: {found['title']}")
    typer.echo(f"  memory: read {found['read_gb_per_s']:.1f} GB/s, copy {found['copy_gb_per_s']:.1f} GB/s")
    for dtype, rate in found["tflops"].items():
        typer.echo(f"  products in {dtype}: {rate:.3f} TFLOP/s")
    if found["link"] is not None:
        typer.echo(f"  to the next device: {found['link']['gb_per_s']:.1f} GB/s, {found['link']['us']:.1f} us")
    known = found["calibration"]
    for name, head in (("linear", "products"), ("experts", "experts")):
        for curve in known[name]:
            parts = [f"{rows:g}: {2 * rows / ps:.2f}" for rows, ps in curve["ps_per_weight"] if ps]
            cycled = f"{curve['set_bytes'] / 2**20:.0f} MiB of them"
            typer.echo(f"  this engine's {curve['format']} {head}, {cycled}, TFLOP/s by rows: {', '.join(parts)}")
    for size, rate in known["attention"]["decode_gb_per_s"]:
        typer.echo(f"  attention, decoding, {size / 2**20:.0f} MiB of K/V: {rate:.1f} GB/s")
    for count, rate in known["attention"]["prefill_tflops"]:
        typer.echo(f"  attention, prompts of {count} tokens: {rate:.3f} TFLOP/s")
    for name, head in (("decoding", "single tokens"), ("prompting", "prompts")):
        for point in known["host"][name]:
            step, layer = point["step_ms"], point["layer_ms"]
            typer.echo(f"  around a step of {point['rows']} rows, {head}: {step:.3f} ms, {layer:.4f} a layer")
