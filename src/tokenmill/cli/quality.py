"""`tokenmill quality`: how much quality smaller copies of a model keep. Owns: its flags, the table and where pictures
go."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer

from tokenmill.checkpoint.new_folder import check_place
from tokenmill.cli.loading import show_waiting, size
from tokenmill.cli.unloaded_model import look_for
from tokenmill.core.errors import ParameterError, why
from tokenmill.core.text_file import check_file
from tokenmill.device.named import check_device


def quality(  # noqa: PLR0913
    models: list[str] = typer.Argument(..., metavar="MODEL", help="Folders, files or names of the copies."),
    against: str = typer.Option(..., "--against", metavar="BASE", help="The model from which the copies were made."),
    text: Path = typer.Option(None, "--text", metavar="FILE", help="Text to measure on (default: a short one)."),
    tasks: Path = typer.Option(None, "--tasks", metavar="FILE", help="JSON lines: prompt, answer (and choices)."),
    speed: bool = typer.Option(True, "--speed/--no-speed", help="Time one user's answer on this machine."),
    picture: Path = typer.Option(None, "--picture", metavar="FILE", help="Draw size against loss, as .svg or .html."),
    device: str = typer.Option("cpu", "--device", help="Where the models run."),
    kv_cache_dtype: str = typer.Option(
        None, "--kv-cache-dtype", help="Type of K/V in all models except the base: int8, fp8, int4, int4-fp8k."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print figures as JSON."),
) -> None:
    """Compare models with the one they were made from: perplexity, divergence, agreement, tasks, size and speed."""
    if picture is not None and (picture.suffix not in (".svg", ".html") or not picture.absolute().parent.is_dir()):
        raise ParameterError(f"--picture {picture}: name a .svg or .html file in a folder that exists.")
    if picture is not None:
        check_place(picture)
    for name in (against, *models):
        look_for(name)
    check_file(text, "--text")
    check_file(tasks, "--tasks")
    check_device(device)
    with show_waiting("Reading"):
        from tokenmill.core.config import make_config
        from tokenmill.device.memory import pick_device
        from tokenmill.measure.quality import Questions, compare, read_tasks
        from tokenmill.quantize import calibration_text

        cache = None if kv_cache_dtype is None else make_config(kv_cache_dtype=kv_cache_dtype).cache
        words, questions = calibration_text.read(text, "--text"), None if tasks is None else read_tasks(tasks)
        asked = Questions(words, questions, speed, pick_device(device), cache)
        found = compare(against, models, asked)
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
    else:
        _table([asdict(one) for one in found])
    if picture is not None:
        from tokenmill.measure.quality_picture import draw

        try:
            picture.write_text(draw(found), encoding="utf-8")
        except OSError as error:
            raise ParameterError(f"--picture {picture} cannot be written: {why(error)}.") from error


def _table(found: list[dict[str, float | int | str | None]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tokenmill.measure.quality_picture import short_names

    table = Table()
    table.add_column("model", overflow="fold")
    for column in ("weights", "perplexity", "KL", "same top token", "tasks", "tokens/s"):
        table.add_column(column, justify="right")
    for name, one in zip(short_names([str(one["model"]) for one in found]), found, strict=True):

        def shown(name: str, form: str, one: dict[str, float | int | str | None] = one) -> str:
            return "" if one[name] is None else format(one[name], form)

        table.add_row(
            name, size(int(one["weight_bytes"] or 0)), shown("perplexity", ".3f"),
            shown("kl", ".5f"), shown("agreement", ".2%"), shown("tasks", ".1%"), shown("tokens_per_s", ".1f"),
        )  # fmt: skip
    Console().print(table)
