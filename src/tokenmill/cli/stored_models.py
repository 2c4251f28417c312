"""`tokenmill list`, `show`, `rm` and `cp`: the stored models. Owns: what is printed about them.

Must not know: how they are stored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import typer

from tokenmill.checkpoint.pull import describe_source, drop_files
from tokenmill.checkpoint.stored import open_store
from tokenmill.checkpoint.stored_names import short_name
from tokenmill.cli.flags import model_names, stored_names
from tokenmill.cli.loading import say, size
from tokenmill.core.errors import ParameterError

NAME = typer.Argument(
    ..., metavar="NAME", help="A stored model (`tokenmill list`), or `demo`.", autocompletion=model_names
)


Part = Literal["modelfile", "parameters", "template", "system", "license"]
"""The parts that `show` can print alone."""


def list_models() -> None:
    """List the stored models: name, size, format, and when each changed."""
    entries, wrong = open_store().entries()
    rows = [("NAME", "ID", "SIZE", "FORMAT", "CHANGED")]
    rows += [(e.name, e.digest[:12], size(e.size), e.format, ago(time.time() - e.changed)) for e in entries]
    typer.echo(table(rows))
    for sentence in wrong:
        say(f"tokenmill: {sentence}")


def show(
    name: str = NAME,
    part: Part = typer.Option(
        None, "--only", metavar="PART", help="Print only the modelfile, parameters, template, system or license."
    ),
) -> None:
    """Show a stored model as a Modelfile, or a part of it."""
    from tokenmill.checkpoint.modelfile_parameters import listed
    from tokenmill.server.ollama.create import known_entry

    entry = known_entry(open_store(), name)

    words = entry.words
    if part in (None, "modelfile"):
        from tokenmill.server.ollama.create import modelfile_of

        if part is None:
            about = (
                f"{entry.name}, {entry.format}, {size(entry.size)}, from {describe_source(entry)}, {entry.digest[:12]}"
            )
            typer.echo(f"# {about}")
        typer.echo(modelfile_of(entry), nl=False)
    elif part == "parameters":
        typer.echo(listed(entry.parameters))
    elif part == "template":
        typer.echo(words.written or words.template)
    elif part == "system":
        typer.echo(words.system)
    else:
        typer.echo("\n".join(words.license))


def rm(
    names: list[str] = typer.Argument(..., metavar="NAME", help="Stored models.", autocompletion=stored_names),
) -> None:
    """Remove stored models. Downloaded files are deleted with the last model that needs them; other files stay."""
    from tokenmill.server.ollama.create import is_demo

    store = open_store()
    for name in names:
        if is_demo(name):
            raise ParameterError("`demo` is part of this program and not stored: it cannot be removed.")
        entry = store.remove(name)
        freed = drop_files(store, entry) if entry is not None else 0
        more = f", {size(freed)} of downloads with it" if freed else ""
        typer.echo(f"removed {short_name(entry.name) if entry is not None else name}{more}")


def cp(
    source: str = typer.Argument(..., metavar="SOURCE", help="A stored model, or `demo`.", autocompletion=model_names),
    target: str = typer.Argument(..., metavar="TARGET", help="The other name."),
) -> None:
    """Store a model under a second name."""
    from tokenmill.server.ollama.create import copy_model

    store = open_store()
    if store.find(target) is not None:
        raise ParameterError(f"{target!r} is stored already: remove it first, or choose another name.")
    typer.echo(f"{short_name(copy_model(store, source, target).name)}: the same as {short_name(source)}")


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def ago(seconds: float) -> str:
    """How long ago something was, for people."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit} ago"
    whole = max(0, round(seconds))
    return f"{whole} second{'s' if whole != 1 else ''} ago"
