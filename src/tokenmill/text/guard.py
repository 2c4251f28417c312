"""Keeps typed text and control tokens apart in a rendered chat. Owns: marking control tokens that people typed, before
a template sees them, and encoding the rendered text so that only the template's own become tokens. Must not know:
templates, HTTP.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.codec import Tokenizer

# A code point that is never text. It survives templates and is removed before encoding.
_MARK = "\ufdd0"


class ControlGuard:
    """One tokenizer's control tokens, as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.special_ids & tokenizer.control_ids
        tokens = {name for index in self._ids for name in (tokenizer.spelt[index], tokenizer.id_to_token(index))}
        names = sorted((token for token in tokens if token and len(token) > 1), key=len, reverse=True)
        acts = names and not tokenizer.split_special  # otherwise even a template's own are ordinary text
        self._find = re.compile(f"({'|'.join(map(re.escape, names))})") if acts else None
        self._takes = tokenizer.takes_spaces
        self._longest = max(map(len, names), default=0)
        begun = (_spelt(name[:end]) for name in names for end in range(1, len(name)))
        self._begun = frozenset(piece for piece in begun if not piece.isalnum())
        """The beginnings of control tokens. (A role may be letters that a token begins with, and templates compare
        roles.)"""

    def protect(self, value: Any) -> Any:
        """The JSON value with every control token in its strings broken by a mark, also one that goes on in another
        string, which the template may write right behind."""
        if self._find is None:
            return value
        if isinstance(value, str):
            value = value.replace(_MARK, "")
            # Again and again, because breaking one control token can leave another that overlapped it.
            while self._find.search(value):
                value = self._find.sub(lambda found: found[0][0] + _MARK + found[0][1:], value)
            shown = value.rstrip()  # white space at the ends stays there, because templates may trim it
            if any(piece in self._begun for piece in _ends(_spelt(shown[-self._longest :]))):
                value = shown + _MARK + value[len(shown) :]
            if self._tokenizer.respelt and _MARK not in value and self._acts(value):
                begun = value.lstrip()
                value = value[: len(value) - len(begun)] + _MARK + begun
            return value
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def _acts(self, text: str) -> bool:
        """Does a text become control tokens, however it spells them?"""
        return not self._ids.isdisjoint(self._tokenizer.encode(text, add_special_tokens=False))

    def clean(self, text: str) -> str:
        """The rendered text as a person should see it."""
        return text.replace(_MARK, "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered text: the template's control tokens are tokens, typed ones are ordinary text."""
        tokenizer = self._tokenizer
        if self._find is None or _MARK not in text:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = []
        nothing = (False, False)
        parts = ["", *self._find.split(text), ""]  # a token has every second place
        for before, part, token in zip(parts[:-1:2], parts[1::2], parts[2::2], strict=True):
            # A token's neighbours are encoded without it, so the white space that it takes goes here.
            part = part.lstrip() if self._takes.get(before, nothing)[1] else part
            part = part.rstrip() if self._takes.get(token, nothing)[0] else part
            if part:
                typed = _MARK in part
                shown = self.clean(part)
                if before:
                    ids += tokenizer.encode_later(shown, allow_special=not typed)
                else:
                    ids += tokenizer.encode(shown, add_special_tokens=False, allow_special=not typed)
            ids += tokenizer.encode(token, add_special_tokens=False) if token else []
        before, after = tokenizer.frame if add_special_tokens else ((), ())
        return [*before, *ids, *after]


def _spelt(text: str) -> str:
    """As tokenizers see it that know control tokens in several spellings."""
    return unicodedata.normalize("NFKC", text).casefold()


def _ends(text: str) -> Iterator[str]:
    return (text[at:] for at in range(len(text)))


def render_and_encode(
    template: ChatTemplate, guard: ControlGuard, messages: list[dict[str, Any]], **options: Any
) -> tuple[str, list[int]]:
    """(prompt text, prompt ids) of a chat in which no typed text can act as a control token."""
    checked = {name: guard.protect(value) for name, value in options.items()}
    text = template.render(guard.protect(messages), **checked)
    return guard.clean(text), guard.encode(text)
