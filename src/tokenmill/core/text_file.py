"""Text in a file that a person names. Owns: reading it within a bound, as one text or as several, and how failures are
worded. A pipe is read like a file, a device not at all: it may never end. Must not know: what the text means.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tokenmill.core.errors import ParameterError, shown, why

LONGEST = 1024
"""A longer path is cut in messages: somebody has put the text itself where its file belongs."""


def read_text_file(path: Path | str, flag: str, most: int, *, param: str | None = None) -> str:
    """The text, of at most `most` characters. flag: what named the file."""
    told = f"{flag} {_told(str(path))} cannot be read"
    try:
        with open(path, encoding="utf-8") as file:
            kind = os.fstat(file.fileno())
            if stat.S_ISBLK(kind.st_mode) or (stat.S_ISCHR(kind.st_mode) and not file.isatty()):
                raise ParameterError(f"{told}: it is a device.", param=param)
            return read_all(file, f"{flag} {path}", most, kind.st_size)
    except ParameterError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{told}: {why(error)}.", param=param) from error
    except ValueError as error:  # a NUL, or half of a pair of surrogates
        raise ParameterError(f"{told}: no file can have this name.", param=param) from error


def check_file(path: Path | None, flag: str) -> None:
    """Refuse, before any work, a file that cannot be read. Nothing is read: a pipe gives its text once."""
    if path is None:
        return
    told = f"{flag} {_told(str(path))} cannot be read"
    try:
        folder = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        raise ParameterError(f"{told}: {why(error)}.") from error
    except ValueError as error:  # a NUL, or half of a pair of surrogates
        raise ParameterError(f"{told}: no file can have this name.") from error
    if folder or not os.access(path, os.R_OK):
        raise ParameterError(f"{told}: {os.strerror(errno.EISDIR if folder else errno.EACCES)}.")


def read_texts(path: Path, flag: str, most: int) -> list[str]:
    """The texts of a file: one in plain text; in JSON lines, one under "text" or "prompt" in each."""
    text = read_text_file(path, flag, most)
    found = list(_of_json_lines(text, path, flag)) if path.suffix in (".jsonl", ".json") else [text]
    if not any(one.strip() for one in found):
        raise ParameterError(f"{flag} {path} holds no text.")
    return found


def _of_json_lines(text: str, path: Path, flag: str) -> Iterator[str]:
    for number, line in lines_of(text):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{flag} {path}, line {number}: not JSON ({error}).") from None
        value = entry.get("text", entry.get("prompt")) if isinstance(entry, dict) else entry
        if not isinstance(value, str):
            raise ParameterError(f'{flag} {path}, line {number}: needs a string under "text" or "prompt".')
        yield value


def _told(path: str) -> str:
    return path if path.isprintable() and len(path) <= LONGEST else shown(path)


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1 on. They end at line feeds alone: a string of JSON may hold
    what else Unicode calls a line's end."""
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def read_all(file: IO[str], name: str, most: int, size: int = 0) -> str:
    """What is left of an open file. size: its bytes, as far as they are known; a character has at most four."""
    text = file.read(most + 1) if size <= 4 * most else ""
    if len(text) > most or size > 4 * most:
        raise ParameterError(f"{name} is over the limit of {most:,} characters.")
    return text
