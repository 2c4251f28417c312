"""`tokenmill merge`: write a model with an adapter merged into it. Owns: its arguments and what is shown."""

from __future__ import annotations

from pathlib import Path

import typer

from tokenmill.checkpoint.new_folder import check_free
from tokenmill.cli.loading import show_waiting, size
from tokenmill.cli.unloaded_model import look_for
from tokenmill.core.errors import ParameterError
from tokenmill.engine.options.adapter_names import located


def merge(
    base: str = typer.Argument(..., metavar="BASE", help="Folder or hub name of an unquantised model, or `demo`."),
    adapter: str = typer.Argument(..., metavar="ADAPTER", help="Its adapter: a PEFT folder or a GGUF file."),
    target: Path = typer.Argument(..., metavar="OUT", help="The folder to write: a new or an empty one."),
) -> None:
    """Merge an adapter into a model's weights, and write the result as a folder that needs no adapter.

    Adapters that are served unmerged share their base: see --lora-modules of `serve`."""
    check_free(target)
    look_for(base)
    if not Path(located(adapter)).exists():
        raise ParameterError(f"{adapter}: there is no such adapter; name PEFT's folder, or a GGUF file.")
    with show_waiting("Merging"):
        from tokenmill.lora.merge import merge as merge_folders
        from tokenmill.measure.whole_source import whole_source

        count = merge_folders(whole_source(base).path, Path(located(adapter)), target)
    written = sum(path.stat().st_size for path in target.iterdir())
    typer.echo(f"{target}: {count} tensors changed, {size(written)}")
