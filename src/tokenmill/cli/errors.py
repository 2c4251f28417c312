"""How a verb ends. Owns: exit codes, and the one sentence that a failure prints. Must not know: torch, any verb.

Codes: 1: one request failed; 2: the person can fix it; 3: the engine died; 130: Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from tokenmill.core.errors import EngineDeadError, ParameterError, TokenmillError, UserError, why

USER, DEAD, FAILED, INTERRUPTED = 2, 3, 1, 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing that name no file."""


def with_exit_codes(verb: Callable[..., None]) -> Callable[..., None]:
    """The same verb, but known failures (also of files and memory) become one red sentence and an exit code. Other
    failures keep their traceback, because they are bugs."""

    @functools.wraps(verb)
    def run_verb(*args: object, **given: object) -> None:
        try:
            verb(*args, **given)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output wants no more, as `head` does
            _forget_output()
            raise typer.Exit(FAILED) from None
        except OSError as error:
            if error.filename is None and error.errno not in FULL:
                raise
            fail(f"{error.filename}: {why(error)}" if error.filename else why(error), USER)
        except MemoryError:
            fail("There is not enough memory: use a smaller model, context or batch.", USER)
        except ParameterError:
            raise  # a verb names it as it was typed (command.py)
        except TokenmillError as error:
            fail(str(error), exit_code(error))

    return run_verb


def fail(text: str, code: int) -> NoReturn:
    """Print one red sentence, and end the process."""
    typer.secho(f"tokenmill: {text}", fg="red", err=True)
    raise typer.Exit(code) from None


def _forget_output() -> None:
    """Write nothing more, not even what the interpreter flushes at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: TokenmillError) -> int:
    """The exit code of a failure."""
    if isinstance(error, UserError):
        return USER
    return DEAD if isinstance(error, EngineDeadError) else FAILED
