"""Ollama's Modelfiles. Owns: reading one (errors name the line), and writing one.

Must not know: what names, parameters and templates mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenmill.core.errors import UserError

MOST_CHARS = 4 << 20
QUOTES = '"""'
BLANKS = " \t\r\f\v"
_BLANK = re.compile(f"[{BLANKS}]+")
KNOWN = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "LICENSE", "MESSAGE")
ROLES = ("system", "user", "assistant")
REFUSED = {
    "RENDERER": "prompts are made by templates here: leave it out, or give TEMPLATE",
    "PARSER": "answers are read as the model's chat template says: leave it out (`serve --tool-call-parser` names one)",
    "REQUIRES": "it names a version of Ollama: leave it out",
    "DRAFT": "`serve --speculative-config` says what guesses ahead",
}


class ModelfileError(UserError):
    """A Modelfile has a mistake."""


@dataclass(slots=True)
class Modelfile:
    """The contents of a Modelfile."""

    base: str = ""
    parameters: list[tuple[str, str]] = field(default_factory=list)
    system: str | None = None
    template: str | None = None
    adapters: list[str] = field(default_factory=list)
    license: list[str] = field(default_factory=list)
    messages: list[tuple[str, str]] = field(default_factory=list)


def read_modelfile(text: str) -> Modelfile:
    """Read a Modelfile. A ModelfileError says what is wrong, and in which line."""
    if len(text) > MOST_CHARS:
        raise ModelfileError(f"the Modelfile has more than {MOST_CHARS} characters.")
    if "\0" in text:
        raise ModelfileError("the Modelfile holds a NUL character, so it is not text.")
    found = Modelfile()
    for number, word, value in _instructions(text.removeprefix("\ufeff")):
        _take(found, number, word, value)
    if not found.base:
        raise ModelfileError("the Modelfile has no FROM line: it names the model to start from.")
    return found


def write_modelfile(found: Modelfile) -> str:
    """Write a Modelfile with these contents. A ModelfileError names a text that no Modelfile can hold."""
    lines = [f"FROM {_quoted(found.base)}"] if found.base else []
    for word, text in (("TEMPLATE", found.template), ("SYSTEM", found.system)):
        if text is not None:
            lines.append(f"{word} {_quoted(text)}")
    lines += [f"PARAMETER {name} {_quoted(value)}" for name, value in found.parameters]
    lines += [f"ADAPTER {_quoted(path)}" for path in found.adapters]
    lines += [f"LICENSE {_quoted(text)}" for text in found.license]
    lines += [f"MESSAGE {role} {_quoted(text)}" for role, text in found.messages]
    return "\n".join(lines) + "\n"


def _take(found: Modelfile, number: int, word: str, value: str) -> None:
    if word == "FROM":
        _once(number, word, found.base)
        found.base = value
    elif word == "SYSTEM":
        _once(number, word, found.system)
        found.system = value
    elif word == "TEMPLATE":
        _once(number, word, found.template)
        found.template = value
    elif word == "ADAPTER":
        found.adapters.append(value)
    elif word == "LICENSE":
        found.license.append(value)
    elif word == "PARAMETER":
        name, text = _two(number, word, value, "a name and a value, like `PARAMETER temperature 0.7`")
        found.parameters.append((name.lower(), text))
    else:
        role, text = _two(number, word, value, "a role and a text, like `MESSAGE user Hello`")
        if role not in ROLES:
            raise _wrong(number, f"MESSAGE is of {', '.join(ROLES)}, not of {_shown(role)}")
        found.messages.append((role, text))
    if word in ("FROM", "ADAPTER") and not value.strip():
        raise _wrong(number, f"{word} names nothing")


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, instruction in capitals, value). The values of PARAMETER and MESSAGE begin with a name and a space."""
    lines = text.replace("\r\n", "\n").split("\n")
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at].strip(BLANKS)
        at += 1
        if not line or line.startswith("#"):
            continue
        word, rest = _split(line)
        word = word.upper()
        if word in REFUSED:
            raise _wrong(number, f"{word} cannot be used: {REFUSED[word]}")
        if word not in KNOWN:
            raise _wrong(number, f"{_shown(_split(line)[0])} is not an instruction; there are {', '.join(KNOWN)}")
        if not rest:
            raise _wrong(number, f"{word} needs a value")
        first = ""
        if word in ("PARAMETER", "MESSAGE"):
            first, rest = _split(rest)
            first += " "
        value, at = _value(lines, at, rest, number, word)
        yield number, word, first + value


def _value(lines: list[str], at: int, rest: str, number: int, word: str) -> tuple[str, int]:
    """The value that begins with `rest`, and the line after it. A value in quotes may span several lines."""
    quote = QUOTES if rest.startswith(QUOTES) else '"' if rest.startswith('"') else ""
    if not quote:
        return rest, at
    raw = lines[at - 1]
    start = len(raw.rstrip(BLANKS)) - len(rest) + len(quote)
    held = [raw[start:]]
    while not held[-1].rstrip(BLANKS).endswith(quote):
        if at == len(lines):
            raise _wrong(number, f"the text of {word} begins with {quote} and has no {quote} at its end")
        held.append(lines[at])
        at += 1
    held[-1] = held[-1].rstrip(BLANKS)[: -len(quote)]
    return "\n".join(held), at


def _split(text: str) -> tuple[str, str]:
    """The first word, and the text after it. What Unicode calls a blank besides these is a character like others."""
    word, *rest = _BLANK.split(text, 1)
    return word, rest[0] if rest else ""


def _two(number: int, word: str, value: str, wanted: str) -> tuple[str, str]:
    name, _, text = value.partition(" ")
    if not text:
        raise _wrong(number, f"{word} needs {wanted}")
    return name, text


def _once(number: int, word: str, before: str | None) -> None:
    if before:
        raise _wrong(number, f"{word} stands twice")


def _quoted(text: str) -> str:
    """The text as a value: unquoted if it then reads the same, otherwise in quotes."""
    if text and text == text.strip() and text[0] != '"' and "\n" not in text and "\r" not in text:
        return text
    if any(line.rstrip(BLANKS).endswith(QUOTES) for line in text.split("\n")) or "\r" in text:
        raise ModelfileError('no Modelfile can hold a text with """ at the end of a line, or a carriage return.')
    return f"{QUOTES}{text}{QUOTES}"


def _wrong(number: int, what: str) -> ModelfileError:
    return ModelfileError(f"Modelfile, line {number}: {what}.")


def _shown(word: str) -> str:
    return ascii(word) if len(word) <= 40 else ascii(word[:37]) + "..."
