"""What a person types. Owns: one message at a time from a terminal (several lines, if wanted) or from a pipe.

It uses prompt_toolkit if that is installed, otherwise the standard library. Must not know: conversations, engines.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator

from tokenmill.cli.interrupts import Interrupts
from tokenmill.core.errors import ParameterError, why

NO_TEXT = "The input is not text in the encoding that is set here, which should be UTF-8 (PYTHONUTF8=1 sets it)."
QUOTES = '"""'
FIRST, NEXT = "> ", "… "


def messages(interrupts: Interrupts) -> Iterator[str]:
    """Messages until the end of input. From a pipe each line is one. Ctrl-C abandons the message that is being
    typed."""
    if not at_terminal():
        yield from _lines()
        return
    ask = _asker()
    while True:
        try:
            with interrupts.allowed():
                message = read_message(ask)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
        except UnicodeDecodeError:
            print(NO_TEXT, file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)  # the shell's prompt starts on a new line
            return
        else:
            yield message


def _lines() -> Iterator[str]:
    try:
        for line in sys.stdin or ():
            yield line.rstrip("\r\n")
    except UnicodeDecodeError:
        raise ParameterError(NO_TEXT) from None
    except OSError as error:
        raise ParameterError(f"Standard input cannot be read: {why(error)}.") from error


def at_terminal() -> bool:
    """Does a person type? Standard input may also be closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_message(ask: Callable[[str], str]) -> str:
    """One message: a line, lines joined by a backslash at the end, or a block between lines of three quotes."""
    line = ask(FIRST)
    if line.strip() == QUOTES:
        lines: list[str] = []
        while (line := ask(NEXT)).strip() != QUOTES:
            lines.append(line)
        return "\n".join(lines)
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = ask(NEXT)
    return "\n".join([*lines, line])


def _asker() -> Callable[[str], str]:
    try:
        session = importlib.import_module("prompt_toolkit").PromptSession()
    except ImportError:
        with contextlib.suppress(ImportError):  # gives input() a history and line editing
            importlib.import_module("readline")
        return input
    ask: Callable[[str], str] = session.prompt
    return ask
