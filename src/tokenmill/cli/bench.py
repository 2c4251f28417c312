"""`tokenmill bench ...`: benchmarks. Owns: their flags, and the tables at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from tokenmill.cli import bench_serve
from tokenmill.cli.bench_common import (
    JSON,
    MOST_LEN,
    MOST_REQUESTS,
    MOST_ROWS,
    MOST_RUNS,
    PLOT,
    BenchProgress,
    check_outputs,
    end,
    save,
)
from tokenmill.cli.command import Verb, Verbs
from tokenmill.cli.errors import with_exit_codes
from tokenmill.cli.flags import MODEL, engine_flags, flag, resolve_options, with_flags
from tokenmill.cli.interrupts import hear_time_limits
from tokenmill.cli.loading import show_waiting
from tokenmill.core.errors import ParameterError

app = typer.Typer(
    help="Measure speed; results go to a JSON file.", no_args_is_help=True, cls=Verbs, rich_markup_mode=None
)


@app.callback()
def group() -> None:
    """Measure speed; results go to a JSON file."""
    hear_time_limits()


MADE = {
    "inputs": flag("input_len", int, "Prompt tokens of a made-up workload (default: 512).", min=1, max=MOST_LEN),
    "outputs": flag("output_len", int, "Output tokens of a made-up workload (default: 128).", min=1, max=MOST_LEN),
    "requests": flag("num_prompts", int, "Requests of a made-up workload (default: 32).", min=1, max=MOST_REQUESTS),
}
USUAL = {"inputs": 512, "outputs": 128, "requests": 32}
WORKLOAD = typer.Option(
    None,
    "--workload",
    help='Lines {"prompt_token_ids": [...], "max_tokens": N} or {"prompt": ..., "max_tokens": N} (may be repeated).',
)


@engine_flags
@with_flags("made", MADE)
def throughput(
    model: str = MODEL,
    workload: list[Path] = WORKLOAD,
    repeat: int = typer.Option(
        1, "--repeat", min=1, max=MOST_RUNS, help="Run each workload this often; the best run counts."
    ),
    json_path: Path = JSON,
    plot: Path = PLOT,
    detokenize: bool = typer.Option(
        True, "--detokenize/--no-detokenize", help="Decode output to text, if there is a tokenizer."
    ),
    *,
    made: dict[str, int],
    options: dict[str, Any],
) -> None:
    """Measure how long an engine takes for requests that all arrive at once. Decoding is greedy, with full lengths."""
    config, keywords = resolve_options(model, options)
    check_outputs(json_path, plot)
    plans = workloads(workload, made, config.model.seed)
    with show_waiting("Getting ready"):
        from tokenmill.measure.throughput import measure

    with BenchProgress() as progress:
        result = measure(keywords, plans * repeat, detokenize=detokenize, progress=progress)
    _show(result)
    save(result, json_path, plot)
    end(result)


@engine_flags
def latency(
    model: str = MODEL,
    batch: int = typer.Option(1, "--batch", "--batch-size", min=1, max=MOST_ROWS, help="Requests at once."),
    input_len: int = typer.Option(128, "--input-len", min=1, max=MOST_LEN, help="Prompt tokens of each request."),
    output_len: int = typer.Option(128, "--output-len", min=1, max=MOST_LEN, help="Output tokens of each request."),
    repeat: int = typer.Option(5, "--repeat", min=1, max=MOST_RUNS, help="Runs; the median one counts."),
    json_path: Path = JSON,
    plot: Path = PLOT,
    *,
    options: dict[str, Any],
) -> None:
    """Measure how long one batch of fixed size takes."""
    config, keywords = resolve_options(model, options)
    check_outputs(json_path, plot)
    with show_waiting("Getting ready"):
        from tokenmill.measure import latency as latencies
        from tokenmill.measure.workloads import Uniform

    with BenchProgress() as progress:
        wanted = Uniform(batch, input_len, output_len, seed=config.model.seed)
        result = latencies.latency(keywords, wanted, repeat=repeat, progress=progress)
    _show(result)
    ms, runs = result["latency_ms"], len(result["runs"])
    typer.echo(f"whole batch: p50 {ms['p50']:.1f} ms, p90 {ms['p90']:.1f} ms, p99 {ms['p99']:.1f} ms, of {runs} runs")
    save(result, json_path, plot)
    end(result)


@engine_flags
def startup(
    model: str = MODEL,
    repeat: int = typer.Option(
        3, "--repeat", min=1, max=MOST_RUNS, help="Fresh processes, one after the other; the median counts."
    ),
    json_path: Path = JSON,
    *,
    options: dict[str, Any],
) -> None:
    """Measure the time from starting a process to the first token."""
    config, keywords = resolve_options(model, options)
    check_outputs(json_path, None)
    with show_waiting(f"Starting {'a process' if repeat == 1 else f'{repeat} processes, one after the other'}"):
        from tokenmill.measure import startup as starting

        result = starting.startup(keywords, repeat=repeat)
    typer.echo(f"{config.model.model}: seconds since the process was started, the median of {len(result['runs'])}")
    for stage, text in starting.STAGES.items():
        typer.echo(f"  {text:>20}  {result['stages_s'][stage]:.2f}")
    save(result, json_path, None)
    end(result)


@engine_flags
@with_flags("made", MADE)
def ablate(
    model: str = MODEL,
    workload: list[Path] = WORKLOAD,
    only: list[str] = typer.Option(None, "--only", help="Switch off only this optimisation (may be repeated)."),
    repeat: int = typer.Option(1, "--repeat", min=1, max=MOST_RUNS, help="Runs of each set; the best one counts."),
    json_path: Path = JSON,
    plot: Path = PLOT,
    *,
    made: dict[str, int],
    options: dict[str, Any],
) -> None:
    """Measure what each optimisation is worth: one workload with all of them, then without each in turn."""
    config, keywords = resolve_options(model, options)
    check_outputs(json_path, plot)
    plans = workloads(workload, made, config.model.seed)
    if len(plans) > 1:
        raise ParameterError("bench ablate takes one --workload.")
    with show_waiting("Getting ready"):
        from tokenmill.measure import ablate as ablation

    with BenchProgress() as progress:
        result = ablation.ablate(keywords, plans[0], repeat=repeat, only=only or (), progress=progress)
    _show_ablation(result)
    save(result, json_path, plot)
    end(result)


def compare(
    old: Path = typer.Argument(..., metavar="OLD", help="The result file to compare with."),
    new: Path = typer.Argument(..., metavar="NEW", help="The new result file."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compare two result files: ratios with 95 % confidence intervals (bootstrap)."""
    from tokenmill.measure.compare import compare as side_by_side
    from tokenmill.measure.compare import read_result

    rows = side_by_side(read_result(old), read_result(new))
    if as_json:
        print(json.dumps({"old": str(old), "new": str(new), "rows": rows}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for head in ("", "old", "new", "new / old", "95 %", "", "resampled"):
        table.add_column(head, justify="left" if not head else "right")
    for row in rows:
        span = "-" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"
        verdict = {True: "differs", False: "may be chance", None: ""}[row["sure"]]
        table.add_row(
            row["metric"],
            f"{row['old']:.2f}",
            f"{row['new']:.2f}",
            f"{row['ratio']:.3f}",
            span,
            verdict,
            row["basis"] or "",
        )
    Console().print(table)


for verb in (throughput, latency, startup, ablate, compare):
    app.command(verb.__name__, cls=Verb)(with_exit_codes(verb))
app.command("serve", cls=Verb)(with_exit_codes(bench_serve.serve))


def workloads(files: list[Path] | None, made: dict[str, int], seed: int) -> list[Any]:
    """What to run: files, or a made-up load. Settings that were not given are those of USUAL."""
    if files and made:
        raise ParameterError(
            "--workload brings its own lengths: leave out --input-len, --output-len and --num-prompts."
        )
    from tokenmill.measure import workloads as loads

    return [loads.read_workload(path) for path in files] if files else [loads.Uniform(**{**USUAL, **made}, seed=seed)]


def _show_ablation(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']} on {result['device_name']}, {result['workload']}")
    table.add_column("without")
    for head in ("output tok/s", "TTFT p50 ms", "TPOT p50 ms", "ITL p99 ms", "worth: tok/s, TTFT, ITL"):
        table.add_column(head, justify="right")
    figures = tuple(result[name][of] for name, of in (("ttft_ms", "p50"), ("tpot_ms", "p50"), ("itl_ms", "p99")))
    figures = (result["output_tokens_per_s"], *figures)
    table.add_row("(nothing: all on)", *(_number(value) for value in figures), "")
    for row in result["options"]:
        if row["error"] is not None:
            table.add_row(row["name"], "-", "-", "-", "-", row["error"][:60])
            continue
        figures = (row["output_tokens_per_s"], row["ttft_ms"], row["tpot_ms"], row["itl_p99_ms"])
        worths = " / ".join(_number(row[name], "{:.2f}") for name in ("worth", "worth_ttft", "worth_itl_p99"))
        table.add_row(row["name"], *(_number(value) for value in figures), worths)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "Worth: how many times better it is with than without; ITL p99 where 1,000 tokens and more were made."
    )


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']} on {result['device_name']}, {result['dtype']}", show_header=False)
    for name, text in _rows(result):
        table.add_row(name, text)
    console = Console()
    console.print(table)
    if len(result["runs"]) > 1:
        speeds = ", ".join(f"{run['output_tokens_per_s']:.1f}" for run in result["runs"])
        console.print(f"output tokens/s of all runs: {speeds}", highlight=False)
    slow = {name: n["fallbacks"] for name, n in result["kernels"].items() if n["fallbacks"]}
    if slow:
        console.print("kernels that fell back to plain torch: " + ", ".join(f"{k} {n} times" for k, n in slow.items()))
    for note in result["notes"]:
        console.print(f"note: {note}", highlight=False)


def _rows(best: dict[str, Any]) -> list[tuple[str, str]]:
    """The table with the figures of the best run."""
    times = [(head, best[key]) for head, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("end to end", "e2e_ms"))]
    return [
        ("workload", best["workload"]),
        ("requests", f"{best['requests']} ({best['prompt_tokens']} tokens in, {best['output_tokens']} out)"),
        ("seconds", f"{best['seconds']:.3f} (start-up {best['startup_s']:.1f})"),
        ("output tokens/s", f"{best['output_tokens_per_s']:.1f}"),
        ("total tokens/s", f"{best['total_tokens_per_s']:.1f}"),
        *((f"{head} p50, p99", f"{_number(ms['p50'])}, {_number(ms['p99'])} ms") for head, ms in times),
        ("mbu, mfu", f"{_number(best['mbu'], '{:.3f}')}, {_number(best['mfu'], '{:.3f}')}"),
        ("watts", _number(best["watts"])),
        ("joules per token out", _number(best["joules_per_output_token"], "{:.3g}")),
        ("share of the roofline", _number(best["roofline"], "{:.3f}")),
    ]


def _number(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)
