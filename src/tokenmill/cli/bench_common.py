"""What all benchmarks share. Owns: --json and --plot, and the progress bar. Must not know: what is measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from tokenmill.cli.errors import INTERRUPTED
from tokenmill.cli.loading import Heartbeat, say
from tokenmill.cli.named_files import write_named
from tokenmill.core.errors import ParameterError

MOST_ROWS, MOST_REQUESTS, MOST_RUNS, MOST_LEN = 65_536, 1_000_000, 1_000, 1 << 24
"""Limits of a benchmark: rows at once, requests in all, repetitions, and tokens of one request."""
JSON = typer.Option(None, "--json", metavar="OUT", help="Write the results here.")
PLOT = typer.Option(None, "--plot", metavar="OUT.png", help="Draw the results here (needs matplotlib).")


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Refuse before a long run an output that could not be written after it."""
    if json_path is not None:
        check_place(json_path, "--json")
    if plot_path is not None:
        from tokenmill.measure.plots import check_plot

        check_plot(plot_path)


def check_place(path: Path, flag: str) -> None:
    """Refuse a file that cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ParameterError(f"{flag} {path}: there is no such folder.")
    if path.is_dir():
        raise ParameterError(f"{flag} {path} is a folder; name a file in it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ParameterError(f"{flag} {path} cannot be written: no permission.")


def save(result: dict[str, Any], json_path: Path | None, plot_path: Path | None) -> None:
    """Write and draw a result, if this was asked for. Verbs show it first: the disk may be full by now."""
    if json_path is not None:
        write_named(json_path, json.dumps(result, indent=2) + "\n")
    if plot_path is not None:
        from tokenmill.measure.plots import plot

        plot(result, plot_path)


def end(result: dict[str, Any], what: str = "runs") -> None:
    """End as after Ctrl-C, if that came before all was measured. The result is shown and written by now. what: it is
    made of these."""
    from tokenmill.measure.result_files import STOPPED

    if STOPPED in result:
        say(f"tokenmill: stopped; these are the {what} that had ended")
        raise typer.Exit(INTERRUPTED)


class BenchProgress:
    """A bar on standard error if that is a terminal, else a line now and then. It redraws seldom, because drawing takes
    time from the run."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = sys.stderr.isatty()
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not shown, refresh_per_second=1)
        self.beat = Heartbeat("measuring")
        self.task: Any = None
        self.name, self.done, self.total = "", 0, 0

    def __enter__(self) -> BenchProgress:
        self.beat.__enter__()
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.beat.__exit__()

    def start(self, name: str, total: int) -> None:
        """Begin another stage."""
        if self.task is not None:
            self.bar.remove_task(self.task)
        self.task = self.bar.add_task(name, total=total)
        self.name, self.done, self.total = name, 0, total
        self._say_how_far()

    def advance(self) -> None:
        """One more is done."""
        self.bar.advance(self.task)
        self.done += 1
        self._say_how_far()

    def _say_how_far(self) -> None:
        self.beat.more = f"{self.name}, {self.done} of {self.total}" if self.total > 1 else self.name
