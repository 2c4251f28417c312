"""How a verb ends. Owns: exit codes, and the one sentence that a failure prints. Must not know: torch, any verb.

2: something that the person can fix; 3: the engine died; 130: Ctrl-C; 1: one request failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import typer

from tokenmill.core.errors import EngineDeadError, TokenmillError, UserError

USER, DEAD, FAILED, INTERRUPTED = 2, 3, 1, 130


def told(verb: Callable[..., None]) -> Callable[..., None]:
    """The same verb, whose known failures become one red sentence and an exit code; others keep their traceback."""

    @functools.wraps(verb)
    def run(*args: object, **given: object) -> None:
        try:
            verb(*args, **given)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except TokenmillError as error:
            typer.secho(f"tokenmill: {error}", fg="red", err=True)
            raise typer.Exit(exit_code(error)) from None

    return run


def exit_code(error: TokenmillError) -> int:
    """The exit code of a failure."""
    if isinstance(error, UserError):
        return USER
    return DEAD if isinstance(error, EngineDeadError) else FAILED
