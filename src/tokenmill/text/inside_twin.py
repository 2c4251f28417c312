"""Twins of a tokenizer, for text inside another text. Owns: removing what a tokenizer adds or cuts off at the beginning
of a text, above all SentencePiece's space. Must not know: files, grammars, what the text is for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from tokenmill.text.build import START
from tokenmill.text.plain_twin import twin_of

Changed = Callable[[dict[str, Any]], dict[str, Any] | None]
"""A step's description, changed; None: the step goes."""
_EDGES = ("Prepend", "Strip")


def inside_twin(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` itself, changed to encode every text as if it were in the middle of another one."""
    return _change(tokenizer, _without_edges)


def later_twin(tokenizer: Tokenizer) -> Tokenizer:
    """A twin that encodes every text as if it followed a control token; `tokenizer` itself where that is the same."""
    state = json.loads(tokenizer.pre_tokenizer.__getstate__()) if tokenizer.pre_tokenizer is not None else None
    return tokenizer if state == (state and _without_first(state)) else _change(twin_of(tokenizer), _without_first)


def _change(tokenizer: Tokenizer, change: Changed) -> Tokenizer:
    for part, empty in (("normalizer", normalizers.Sequence), ("pre_tokenizer", pre_tokenizers.Sequence)):
        step = getattr(tokenizer, part)
        if step is None:
            continue
        state = json.loads(step.__getstate__())
        changed = change(state)
        if changed != state:
            made = empty([])
            if changed is not None:
                made.__setstate__(json.dumps(changed).encode())
            setattr(tokenizer, part, made)
    return tokenizer


def _without_first(state: dict[str, Any]) -> dict[str, Any]:
    """The description of one step, without what it puts before the first text of several that tokens separate."""
    if state["type"] == "Metaspace" and state["prepend_scheme"] == "first":
        return {**state, "prepend_scheme": "never"}
    if state["type"] == "Sequence" and "pretokenizers" in state:
        return {**state, "pretokenizers": [_without_first(step) for step in state["pretokenizers"]]}
    return state


def _without_edges(state: dict[str, Any]) -> dict[str, Any] | None:
    """The description of one step, without what it does at the edges of a text; None: nothing is left."""
    kind = state["type"]
    if kind in _EDGES or (kind == "Replace" and state["pattern"].get("Regex", "").startswith((START, "^"))):
        return None
    if kind == "Metaspace":
        return {**state, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**state, "add_prefix_space": False}
    if kind == "Sequence":
        steps = "normalizers" if "normalizers" in state else "pretokenizers"
        return {**state, steps: [s for step in state[steps] if (s := _without_edges(step)) is not None]}
    return state
