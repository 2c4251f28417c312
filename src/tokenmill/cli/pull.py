"""`tokenmill pull`: put a model into the store, from the hub or from this machine. Owns: its flags, and showing
progress. Must not know: how files come.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

from tokenmill.checkpoint.pull import Progress, Tell, pull_hub, pull_local
from tokenmill.checkpoint.stored import open_store
from tokenmill.checkpoint.stored_names import short_name
from tokenmill.cli.loading import say, size
from tokenmill.cli.terminal import harmless
from tokenmill.cli.unloaded_model import plain_name
from tokenmill.core.errors import ParameterError
from tokenmill.core.files import in_home
from tokenmill.demo.files import demo_model


def pull(
    model: str = typer.Argument(..., metavar="MODEL", help="OWNER/NAME, OWNER/NAME:Q4_K_M, a folder or a .gguf file."),
    name: str = typer.Option(None, "--name", help="The model's name here (default: that of the hub or the file)."),
    revision: str = typer.Option(None, "--revision", help="Branch, tag or commit of a hub model."),
    download_dir: str = typer.Option(None, "--download-dir", help="Folder for downloads (default: the hub's cache)."),
    hf_token: str = typer.Option(None, "--hf-token", help="Token for the hub (default: HF_TOKEN, or the stored one)."),
) -> None:
    """Download a model and store it under a name. A folder or file on this machine stays where it is.

    A download that was interrupted continues where it ended."""
    store = open_store()
    model = plain_name(model)
    path = in_home(model)
    if not model.strip():
        raise ParameterError("Say which model: OWNER/NAME, a folder or a .gguf file.")
    if path.exists():
        entry = pull_local(store, path, name)
    elif "://" in model:
        raise ParameterError(f"{model} is not fetched: models come from the hub (OWNER/NAME). Download the file, and "
                             "pull it by its path.")  # fmt: skip
    elif model.startswith((".", "/", "~")) or model.endswith(".gguf"):
        raise ParameterError(f"{model}: there is no such folder or file.")
    elif demo_model(model) is not None:
        raise ParameterError(
            f"{model} is in the package: there is nothing to pull. `tokenmill chat {model}` talks with it."
        )
    elif "/" not in model:
        raise ParameterError(
            f"{model!r} is neither a folder or file here nor a name of the hub (OWNER/NAME): names without an owner "
            "belong to Ollama's own registry, which is not asked."
        )
    else:
        from tokenmill.checkpoint.hub import Hub

        with shown_progress() as tell:
            entry = pull_hub(store, model, revision, Hub(download_dir, hf_token), tell, name)
    typer.echo(f"{short_name(entry.name)}: {entry.format}, {size(entry.size)}")


@contextlib.contextmanager
def shown_progress() -> Iterator[Tell]:
    """One bar per file on a terminal, else a line when a file begins and ends."""
    if not sys.stderr.isatty():
        shown_bytes: dict[str, int] = {}

        def tell_lines(step: Progress) -> None:
            status = _line(step)
            if not step.total or status not in shown_bytes or step.completed == step.total:
                shown_bytes[status] = step.completed
                much = f" ({size(step.completed)} of {size(step.total)})" if step.total else ""
                say(f"tokenmill: {status}{much}")

        yield tell_lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def tell_bars(step: Progress) -> None:
            status = _line(step)
            if step.total:
                if status not in tasks:
                    tasks[status] = bars.add_task(status, total=step.total)
                bars.update(tasks[status], completed=step.completed)  # type: ignore[arg-type]
            else:
                bars.console.print(status, style="dim", markup=False)

        yield tell_bars


def _line(step: Progress) -> str:
    """The words of a step, which may hold a name that the hub chose, as one line."""
    return " ".join(harmless(step.status).split())
