"""`tokenmill bench ...`: measure. Owns: the flags of benchmarks, the progress bar and the table at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from tokenmill.cli.errors import told
from tokenmill.cli.flags import MODEL, engine_flags, flag, settle, with_flags
from tokenmill.core.errors import ParameterError

app = typer.Typer(help="Measure speed; results go to a JSON file.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure speed; results go to a JSON file."""


MADE = {
    "inputs": flag("input_len", int, "Prompt tokens of a made-up workload.", min=1),
    "outputs": flag("output_len", int, "Output tokens of a made-up workload.", min=1),
    "requests": flag("num_prompts", int, "Requests of a made-up workload.", min=1),
}


@engine_flags
@with_flags("made", MADE)
def throughput(
    model: str = MODEL,
    workload: list[Path] = typer.Option(
        None,
        "--workload",
        help='Lines {"prompt_token_ids": [...], "max_tokens": N} or {"prompt": ..., "max_tokens": N}; may repeat.',
    ),
    repeat: int = typer.Option(1, "--repeat", min=1, help="Run each workload this often; the best run counts."),
    json_path: Path = typer.Option(None, "--json", metavar="OUT", help="Write the results here."),
    detokenize: bool = typer.Option(True, "--detokenize/--no-detokenize", help="Make text, if there is a tokenizer."),
    *,
    made: dict[str, int],
    options: dict[str, Any],
) -> None:
    """All requests arrive at once; how long until the last one is done? Greedy, and every output has full length."""
    config, keywords = settle(model, options)
    if bool(workload) == bool(made) or (made and len(made) < len(MADE)):
        raise ParameterError("Give --workload FILE, or all of --input-len, --output-len and --num-prompts.")
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ParameterError(f"--json {json_path}: there is no such folder.")
    from tokenmill.measure import workloads

    plans: list[workloads.Workload] = [workloads.read(path) for path in workload or []]
    if made:
        plans = [workloads.Uniform(**made, seed=config.model.seed)]
    from tokenmill.measure.throughput import measure

    with _Progress() as progress:
        result = measure(keywords, plans * repeat, detokenize=detokenize, progress=progress)
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    _show(result)


app.command("throughput")(told(throughput))


class _Progress:
    """A bar on standard error where that is a terminal; it redraws seldom, because drawing takes time from the run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = sys.stderr.isatty()
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not shown, refresh_per_second=1)
        self.task: Any = None

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def start(self, name: str, total: int) -> None:
        """Another stage begins."""
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(name, total=total)

    def advance(self) -> None:
        """One more is done."""
        self.bar.advance(self.task)


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
    """The table: figures of the best run."""
    times = [(head, best[key]) for head, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("end to end", "e2e_ms"))]
    return [
        ("workload", best["workload"]),
        ("requests", f"{best['requests']} ({best['prompt_tokens']} tokens in, {best['output_tokens']} out)"),
        ("seconds", f"{best['seconds']:.3f} (start-up {best['startup_s']:.1f})"),
        ("output tokens/s", f"{best['output_tokens_per_s']:.1f}"),
        ("total tokens/s", f"{best['total_tokens_per_s']:.1f}"),
        *((f"{head} p50, p99", f"{_number(ms['p50'])}, {_number(ms['p99'])} ms") for head, ms in times),
        ("mbu, mfu", f"{_number(best['mbu'], '{:.3f}')}, {_number(best['mfu'], '{:.3f}')}"),
    ]


def _number(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)
