"""What config.json says of matrices by name. Owns: names that other readers understand.

Readers compare them with the names of their own modules. Models that also see or hear have other names there than in
their files (language_model.model.layers.0 is model.language_model.layers.0 in Transformers), so what tells a matrix
apart is written as a pattern: the part of the model that it is in, or its place among the text part's layers. Must not
know: files, methods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set

MARK = "re:"
"""Begins a pattern, as compressed-tensors spells it."""
_IN_LAYER = re.compile(r"[^.]+\.\d+\..+$")


def told(names: Iterable[str], apart: Set[str]) -> list[str]:
    """The modules `names` as config.json lists them: as stored, and in models with parts besides the text's also as
    patterns. apart: the modules of those parts."""
    stored = sorted(set(names))
    if not apart:
        return stored
    return [*stored, *sorted({MARK + pattern_of(name, apart) for name in stored})]


def pattern_of(name: str, apart: Set[str]) -> str:
    """A pattern that matches the whole name of a module, whatever stands in front of what tells it apart."""
    if name in apart:
        words = name.split(".")
        at = 1 if words[0] == "model" and len(words) > 1 else 0
        return rf"(.*\.)?{re.escape(words[at])}(\..*)?$"
    found = _IN_LAYER.search(name)
    return rf"(.*\.)?{re.escape(found[0] if found else name.rpartition('.')[2])}$"


def as_patterns(names: Iterable[str]) -> list[str]:
    """The same for readers that take every entry as a pattern, the beginning of a name or its end."""
    return [name.removeprefix(MARK) for name in names]


def as_rules(names: Iterable[str]) -> dict[str, dict[str, object]]:
    """The same as GPTQModel's rules for what is left out. The head is not quantised anyway."""
    others = [name for name in names if name.removeprefix(MARK) not in ("lm_head", r"(.*\.)?lm_head$")]
    return {
        "-:" + (name.removeprefix(MARK) if name.startswith(MARK) else f"^{re.escape(name)}$"): {} for name in others
    }
