"""Texts that are nothing but one user-defined piece. Owns: their ids in tokenizers that put a mark before a text.

The library normalises such a piece like a text, so the step that puts the mark leaves it alone (`build.py`), and with
it the text that is equal to it. Must not know: files, requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import Tokenizer, normalizers

from tokenmill.text.build import EXCEPT

_OTHER = "\ue000"
"""A character that nobody uses, so that no piece and no replacement has it: a text with it is not one piece."""
Encode = Callable[[str], list[int]]


class LonePieces:
    """The ids of texts that are one piece, for one tokenizer; empty for all tokenizers but those of `build.py`."""

    def __init__(self, inner: Tokenizer) -> None:
        self._normalizer: normalizers.Normalizer | None = None
        self._ids: dict[str, int] = {}
        if inner.normalizer is None or not _has_exception(json.loads(inner.normalizer.__getstate__())):
            return
        self._normalizer = inner.normalizer
        added = inner.get_added_tokens_decoder().items()
        self._ids = {token.content: index for index, token in added if token.normalized}
        self._longest = 2 * max(map(len, self._ids), default=0)

    def find(self, text: str, encode: Encode) -> list[int] | None:
        """The ids of a text that is one piece; None for all others."""
        if not self._ids or self._normalizer is None or len(text.strip()) > self._longest:
            return None
        index = self._ids.get(self._normalizer.normalize_str(text))
        if index is None:
            return None
        rows = (encode(alone + _OTHER) for alone in (text, text.strip(" ")))  # spaces beside it may be trimmed
        return next((row[: row.index(index) + 1] for row in rows if index in row), None)


def _has_exception(state: dict[str, object]) -> bool:
    steps = state.get("normalizers", [state])
    assert isinstance(steps, list)
    return any(EXCEPT in str(step.get("pattern")) for step in steps)
