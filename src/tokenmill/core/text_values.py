"""Values as people write them in the environment, in files and as flags. Owns: what such a text means."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

AUTO = "auto"
"""What may be written for a whole number that is found out where none is given."""
_COUNT = re.compile(r"([+-]?\d+)|(\d+(?:\.\d+)?)([kKmMgGtT])(i?)(B?)")
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read_count(text: str) -> int | None:
    """Read 4096, 32k, 2M or 4GiB as vLLM does: k is 1,000 and K is 1,024; GB is decimal and GiB binary. None: not a
    number."""
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        return None
    whole, number, letter, binary, byte = found.groups()
    if whole:
        return int(whole)
    base = 1024 if binary or (letter.isupper() and not byte) else 1000
    return round(float(number) * base ** ("kmgt".index(letter.lower()) + 1))


def is_auto(value: Any, kind: Any) -> bool:
    """Is it the word that leaves a number to be found out, as it is where none is given?"""
    kinds = getattr(kind, "__args__", ())
    return bool(value == AUTO) and int in kinds and type(None) in kinds and str not in kinds


def read_written(text: str, kind: Any) -> tuple[Any, str]:
    """The value of an option of this type (None: the text is not such a value), and in words what the option
    expects."""
    plain = [k for k in getattr(kind, "__args__", (kind,)) if k is not type(None)]
    if bool in plain:
        return _SWITCHES.get(text.strip().lower()), "true or false"
    if int in plain:
        return AUTO if is_auto(text, kind) else read_count(text), "a whole number (32k and 2GiB stand for such)"
    if list[str] in plain:
        return _read_list(text), "one text, or a JSON list of texts"
    found: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        if float in plain:
            found = float(text)
        elif str in plain:
            found = text
        else:
            found = read_json(text)
    return found, "a number" if float in plain else "JSON in which no name stands twice"


def read_json(text: str) -> Any:
    """The value of a JSON text. ValueError: it is none, or an object of it has a name twice, with two values."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return found


def _read_list(text: str) -> list[str] | None:
    """A JSON list, or one text. A comma in a plain text may be meant to separate two, or to be part of one: None."""
    if not text.lstrip().startswith("["):
        return None if "," in text or not text.strip() else [text]
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if all(isinstance(each, str) for each in found):
            return list(found)
    return None
