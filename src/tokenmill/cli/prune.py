"""`tokenmill prune`: a copy of a model with fewer channels, heads and layers. Owns: its flags, and what is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from tokenmill.checkpoint.new_folder import check_free
from tokenmill.cli.flags import flag, spelling, with_flags
from tokenmill.cli.loading import progress, show_waiting, size, weight_bytes
from tokenmill.cli.unloaded_model import look_for
from tokenmill.core.errors import ParameterError
from tokenmill.core.text_file import check_file
from tokenmill.device.named import check_device

if TYPE_CHECKING:
    from tokenmill.engine.load.model_source import FolderSource
    from tokenmill.quantize.prune_model import Left

SHOWN = 5
Importance = Literal["obs", "wanda"]
CUT_FLAGS = {
    "multiple": flag("multiple", int, "The number of remaining channels is a multiple of this (default: 128 or 64)."),
    "importance": flag(
        "importance",
        Importance,
        "What goes: what costs least when the rest makes up for it (the default), or Wanda's sums.",
    ),
}
CALIBRATION_FLAGS = {
    "calibration": flag("calibration", Path, "Text to calibrate on (default: a short one in the package)."),
    "samples": flag("samples", int, "Sequences to calibrate on (default: 128)."),
    "length": flag("length", int, "Tokens of each sequence (default: 512)."),
    "device": flag("device", str, "Where to calibrate and learn (default: cpu)."),
}
REPAIR_FLAGS = {
    "steps": flag("steps", int, "With --repair: steps of learning (default: 1000)."),
    "minutes": flag("minutes", float, "With --repair: stop after this many minutes."),
    "batch": flag("batch", int, "With --repair: lines in a step (default: 8)."),
    "line": flag("line", int, "With --repair: tokens in a line (default: 256)."),
    "rate": flag("rate", float, "With --repair: learning rate (default: 0.0003)."),
}
"""Flags that only --repair uses."""


@with_flags("chosen", {**CUT_FLAGS, **CALIBRATION_FLAGS, **REPAIR_FLAGS})
def prune(
    source: str = typer.Argument(..., metavar="SRC", help="Folder or hub name of an unquantised model, or `demo`."),
    target: Path = typer.Argument(..., metavar="DST", help="The folder to write: a new or an empty one."),
    channels: float = typer.Option(0.0, "--channels", help="Part of each layer's MLP channels to remove."),
    heads: float = typer.Option(
        0.0, "--heads", help="Part of each layer's key heads to remove, with their query heads."
    ),
    layers: int = typer.Option(0, "--layers", help="How many layers to remove: those that change their input least."),
    repair: Path = typer.Option(
        None, "--repair", metavar="FILE", help="Text (or JSON lines) on which the copy learns from the original."
    ),
    chosen: dict[str, Any] | None = None,
) -> None:
    """Remove channels, heads and layers from a model, and let the copy relearn what it lost from the original.

    What is written is a plain model folder that every engine reads; `quantize` makes it smaller still."""
    chosen = chosen or {}
    alone = next((name for name in chosen if name in REPAIR_FLAGS and repair is None), None)
    if alone is not None:
        raise ParameterError(f"{spelling(alone)} goes with --repair.")
    if "multiple" in chosen and not channels:
        raise ParameterError("--multiple has no effect without --channels.")
    if "importance" in chosen and not channels and not heads:
        raise ParameterError("--importance has no effect without --channels or --heads.")
    check_free(target)
    look_for(source)
    check_file(chosen.get("calibration"), "--calibration")
    check_file(repair, "--repair")
    check_device(chosen.get("device", "cpu"))
    with show_waiting("Getting ready"):
        from tokenmill.device.memory import pick_device
        from tokenmill.measure.whole_source import whole_source
        from tokenmill.models.registry import context_of
        from tokenmill.quantize import calibration_text
        from tokenmill.quantize.prune_model import Cut, prune_model
    device = pick_device(chosen.get("device", "cpu"))
    found = whole_source(source)
    learn = None if repair is None else _repair(found, repair, chosen, device)
    cut = Cut(channels, heads, layers, chosen.get("multiple"), chosen.get("importance", "obs"))
    length = calibration_text.fitting(chosen.get("length"), 512, context_of(found.config()))
    with show_waiting("Reading the text"):
        tokens = calibration_text.sequences(
            calibration_text.read(chosen.get("calibration")),
            found.tokenizer().encode,
            chosen.get("samples", 128),
            length,
        )
    with progress("Pruning") as tell:
        left = prune_model(found.path, target, cut, tokens, device, tell)
    _show(found.path, target, left)
    if learn is not None:
        learn(target)


def _repair(found: FolderSource, data: Path, chosen: dict[str, Any], device: str) -> Callable[[Path], None]:
    """The settings for learning, read and checked before anything is removed."""
    with show_waiting("Getting ready"):
        from tokenmill.cli.distill import percent, show_progress
        from tokenmill.distill.repair import check, lines_of, repair
        from tokenmill.distill.texts import read_texts
        from tokenmill.distill.train import Course
    usual = {"steps": 1000, "batch": 8, "line": 256, "rate": 3e-4, "minutes": 0.0}
    steps, batch, line, rate, minutes = ({**usual, **chosen}[name] for name in usual)
    for name, value, least, most in (("steps", steps, 1, 1 << 31), ("batch", batch, 1, 4096),
                                     ("line", line, 16, 65536), ("rate", rate, 1e-7, 1.0),
                                     ("minutes", minutes, 0.0, 1e9)):  # fmt: skip
        if not least <= value <= most:
            raise ParameterError(f"--{name} {value:g}: use {least:g} to {most:g}.")
    check(found.config())
    lines = lines_of(found, read_texts(data, "--repair"), line)
    course = Course(steps, batch, rate, steps, seconds=60 * minutes)

    def learn(target: Path) -> None:
        right = repair(found.path, target, lines, course, device, show_progress)
        typer.echo(f"says what the original says at {percent(right)} of held-out tokens")

    return learn


def _show(source: Path, target: Path, left: Left) -> None:
    """Show sizes, removed layers, and the matrices that lost most."""
    typer.echo(f"{target}: {size(weight_bytes(target))} of weights instead of {size(weight_bytes(source))}")
    if left.channels is not None:
        typer.echo(f"{left.channels} channels are left (multiples of {left.multiple})")
    if left.heads is not None:
        from tokenmill.checkpoint.folder import read_config
        from tokenmill.quantize.prunable import heads_of

        had = heads_of(read_config(source))
        typer.echo(
            f"left: {left.heads.keys} of {had.keys} key heads, {left.heads.queries} of {had.queries} query heads "
            "(a key head goes whole, and at least one)"
        )
    gone = [(n, value) for n, value in enumerate(left.influence) if n not in left.layers]
    if gone:
        typer.echo("layers gone (influence): " + ", ".join(f"{n} ({value:.4f})" for n, value in gone))
    worst = sorted(left.lost.items(), key=lambda item: -item[1])[:SHOWN]
    if worst:
        typer.echo("outputs that lost most: " + ", ".join(f"{name} ({lost:.3f})" for name, lost in worst))
    typer.echo("All of them: pruning_report.json")
