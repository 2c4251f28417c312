"""A twin of a tokenizer, for text inside another text. Owns: removing what a tokenizer adds or cuts off at the
beginning of a text, above all SentencePiece's space. Must not know: files, grammars, what the text is for.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

from tokenmill.text.build import START

_EDGES = ("Prepend", "Strip")


def inside_twin(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` itself, changed to encode every text as if it were in the middle of another one."""
    for part, empty in (("normalizer", normalizers.Sequence), ("pre_tokenizer", pre_tokenizers.Sequence)):
        step = getattr(tokenizer, part)
        if step is None:
            continue
        state = json.loads(step.__getstate__())
        changed = _without_edges(state)
        if changed != state:
            made = empty([])
            if changed is not None:
                made.__setstate__(json.dumps(changed).encode())
            setattr(tokenizer, part, made)
    return tokenizer


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
