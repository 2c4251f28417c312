"""`tokenmill create`: a stored model from a Modelfile. Owns: its flags, and what paths in a Modelfile are relative
to."""

from __future__ import annotations

from pathlib import Path

import typer

from tokenmill.checkpoint.modelfile import MOST_CHARS, read_modelfile
from tokenmill.checkpoint.stored import open_store
from tokenmill.checkpoint.stored_names import short_name
from tokenmill.cli.loading import size
from tokenmill.cli.pull import shown_progress
from tokenmill.core.errors import ParameterError
from tokenmill.core.files import in_home
from tokenmill.core.text_file import read_text_file


def create(
    name: str = typer.Argument(..., metavar="NAME", help="The model's name."),
    file: Path = typer.Option(Path("Modelfile"), "--file", "-f", help="The Modelfile (default: ./Modelfile)."),
    quantize: str = typer.Option(None, "--quantize", "-q", hidden=True, help=""),
) -> None:
    """Store the model of a Modelfile: FROM another one, with its own PARAMETER, SYSTEM, TEMPLATE, ADAPTER, MESSAGE."""
    if quantize is not None:
        raise ParameterError(
            f"--quantize {quantize} is not done here: `tokenmill quantize SRC DST` writes a smaller model, FROM DST "
            "makes one of it."
        )
    try:
        text = read_text_file(file, "--file", MOST_CHARS)
    except ParameterError as error:
        raise ParameterError(f"{str(error).removesuffix('.')}; -f FILE names the Modelfile.") from error
    modelfile = read_modelfile(text)
    from tokenmill.server.ollama.create import Reach, create, from_modelfile

    def find(given: str) -> Path | None:
        for path in (file.parent / in_home(given), in_home(given)):
            if path.exists() and (path.is_dir() or path.suffix == ".gguf"):
                return path
        return None

    with shown_progress() as tell:
        entry = create(open_store(), from_modelfile(name, modelfile), Reach(find), tell)
    typer.echo(f"{short_name(entry.name)}: {entry.format}, {size(entry.size)}")
