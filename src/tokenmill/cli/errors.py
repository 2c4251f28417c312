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

from tokenmill.core.errors import EngineDeadError, TokenmillError, UserError, why

USER, DEAD, FAILED, INTERRUPTED = 2, 3, 1, 130
NO_MEMORY = "There is not enough memory: use a smaller model, context or batch."
SCARCE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE)
"""Errors of writing and opening that name no file. EIO: the terminal is gone."""


def with_exit_codes(verb: Callable[..., None]) -> Callable[..., None]:
    """The same verb, but failures of files and memory become one red sentence and an exit code. Our own errors are told
    where flags are known (command.py). Other failures keep their traceback, because they are bugs."""

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
            if error.errno == errno.ENOMEM:
                fail(NO_MEMORY, USER)
            if error.filename is None and not is_scarce(error):
                raise
            fail(f"{error.filename}: {why(error)}" if error.filename else why(error), USER)
        except MemoryError:
            fail(NO_MEMORY, USER)
        except RuntimeError as error:
            if (lacking := _lacking(str(error))) is None:
                raise
            fail(lacking, USER)

    return run_verb


def fail(text: str, code: int) -> NoReturn:
    """Print one red sentence, and end the process."""
    typer.secho(f"tokenmill: {text}", fg="red", err=True)
    raise typer.Exit(code) from None


def _lacking(said: str) -> str | None:
    """A sentence for libraries' errors that speak of what the machine lacks."""
    if "DefaultCPUAllocator" in said or "out of memory" in said:
        return NO_MEMORY
    return "This machine starts no more threads for this user (ulimit -u)." if "start new thread" in said else None


def is_scarce(error: OSError) -> bool:
    """Is there no room for what is written, or no descriptor for what is opened?"""
    return error.filename is None and error.errno in SCARCE


def _forget_output() -> None:
    """Write nothing more, not even what the interpreter flushes at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: TokenmillError) -> int:
    """The exit code of a failure."""
    if isinstance(error, UserError):
        return USER
    return DEAD if isinstance(error, EngineDeadError) else FAILED
