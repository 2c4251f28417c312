"""What all benchmarks share. Owns: --json and --plot, and the progress bar. Must not know: what is measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from tokenmill.core.errors import ParameterError

JSON = typer.Option(None, "--json", metavar="OUT", help="Write the results here.")
PLOT = typer.Option(None, "--plot", metavar="OUT.png", help="Draw the results here (needs tokenmill[bench]).")


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Refuse before a long run what could not be written after it."""
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ParameterError(f"--json {json_path}: there is no such folder.")
    if plot_path is not None:
        from tokenmill.measure.plots import check_plot

        check_plot(plot_path)


def save(result: dict[str, Any], json_path: Path | None, plot_path: Path | None) -> None:
    """Write and draw a result where that was asked for."""
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    if plot_path is not None:
        from tokenmill.measure.plots import plot

        plot(result, plot_path)


class BenchProgress:
    """A bar on standard error where that is a terminal; it redraws seldom, because drawing takes time from the run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = sys.stderr.isatty()
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not shown, refresh_per_second=1)
        self.task: Any = None

    def __enter__(self) -> BenchProgress:
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
