"""Files at which the tokenizers library panics. Owns: finding the cause before it does.

A panic is raised as an exception, and besides prints places in its sources on standard error, which nobody can read
and nothing here can stop. Must not know: folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from tokenmill.core.errors import ModelError, shown

_PREFIXED = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


def check_merges(data: bytes) -> None:
    """Raise ModelError if a tokenizer.json has merges whose second half is shorter than the prefix that is cut off
    it."""
    if _PREFIXED.search(data) is None:
        return
    try:
        model = json.loads(data)["model"]
        kind, prefix, merges = model.get("type", "BPE"), model["continuing_subword_prefix"], model["merges"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return  # the library tells of these
    if kind != "BPE" or not isinstance(merges, list) or not isinstance(prefix, str):
        return
    size = len(prefix.encode("utf-8", "surrogatepass"))
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(parts, list) and len(parts) == 2 and isinstance(parts[1], str) and not _has(parts[1], size):
            raise ModelError(
                f"continuing_subword_prefix {shown(prefix)} is longer than {shown(parts[1])}, which a merge joins"
            )


def _has(text: str, size: int) -> bool:
    """Does a character end behind this many bytes?"""
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw) >= size and (len(raw) == size or raw[size] & 0xC0 != 0x80)


def check_frame(tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ModelError if what is put around texts names a token without saying its number."""
    if tokenizer.post_processor is None:
        return
    for state in _templates(json.loads(tokenizer.post_processor.__getstate__())):
        known = state.get("special_tokens") or {}
        for piece in (*state.get("single", ()), *state.get("pair", ())):
            name = piece.get("SpecialToken", {}).get("id")
            if name is not None and name not in known:
                raise ModelError(
                    f"its post_processor names the token {shown(name)}, which is not among its special_tokens"
                )


def _templates(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict) and state.get("type") == "TemplateProcessing":
        yield state
    for inner in state.get("processors", ()) if isinstance(state, dict) else ():
        yield from _templates(inner)
