"""How far a call of LLM has come. Owns: the bar on the terminal, or the caller's own. Must not know: engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tokenmill.core.errors import ParameterError

TITLE = "Generating"


@contextmanager
def progress_of(use_tqdm: bool | Callable[..., Any] | None, total: int) -> Iterator[Callable[[int], object]]:
    """Yields a function that is called with how many more have ended. use_tqdm: whether to show a bar (for more than
    one), or a function like tqdm that makes one."""
    if callable(use_tqdm):
        with closing(use_tqdm(total=total, desc=TITLE)) as bar:
            yield bar.update
        return
    if use_tqdm is not None and not isinstance(use_tqdm, int):
        raise ParameterError("use_tqdm must be true, false, or what makes a bar as tqdm does.", param="use_tqdm")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)  # what a program prints may be read by another one
    visible = use_tqdm and total > 1 and (console.is_terminal or console.is_jupyter)
    with Progress(*columns, console=console, disable=not visible) as shown:
        task = shown.add_task(TITLE, total=total)
        yield lambda count: shown.advance(task, count)
