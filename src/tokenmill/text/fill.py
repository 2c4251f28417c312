"""Fill in the middle: prompts of code models that can write between two texts. Owns: the table of token names, and the
order of a prompt's parts.

A form fits a tokenizer that has its tokens. Must not know: models, requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenmill.text.codec import Tokenizer


@dataclass(frozen=True, slots=True)
class FillForm:
    """Names of the tokens before the prefix, the suffix and the answer. `suffix_first`: the suffix stands first;
    `ends`: tokens that end an answer besides the model's own."""

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()
    suffix_first: bool = False

    def held_by(self, tokenizer: Tokenizer) -> bool:
        """Does this tokenizer have the tokens?"""
        return all(tokenizer.token_to_id(name) is not None for name in self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The tokens that every prompt needs."""
        return (self.prefix, self.suffix, *(() if self.middle is None else (self.middle,)))


_PIPED = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>", "<|cursor|>")
_PLAIN = ("<fim_pad>", "<repo_name>", "<file_sep>", "<reponame>", "<filename>", "<|endoftext|>", "<|file_separator|>")
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
FORMS = (
    FillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", _PIPED),  # Qwen-Coder, CodeGemma, Granite 4
    FillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>", _PLAIN),  # StarCoder, Granite Code, Stable Code
    FillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    FillForm("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    FillForm("<PRE>", "<SUF>", "<MID>", ("<EOT>", "<EOM>")),
    FillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    FillForm("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
    FillForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ("<|user|>", "<|endoftext|>")),  # CodeGeeX
    FillForm("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
)

_MARKS = sorted({name for form in FORMS for name in (*form.names, *form.ends, *_FILES)}, key=len, reverse=True)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_SLICE = 1 << 16
"""Characters that are searched in one call, during which no other thread of the interpreter runs."""


def find_fill(tokenizer: Tokenizer | None) -> FillForm | None:
    """The form whose tokens the tokenizer has."""
    if tokenizer is None:
        return None
    return next((form for form in FORMS if form.held_by(tokenizer)), None)


def fill_ids(tokenizer: Tokenizer, form: FillForm, gap: tuple[str, str], begun: str = "") -> list[int]:
    """The prompt. The answer continues `begun` in the gap between prefix and suffix. Marks inside the texts stay
    text."""
    prefix, suffix = gap
    first = [_id(tokenizer, form.prefix), *_encode(tokenizer, prefix, inside=False)]
    second = [_id(tokenizer, form.suffix), *_encode(tokenizer, suffix, inside=True)]
    parts = [*second, *first] if form.suffix_first else [*first, *second]
    middle = [] if form.middle is None else [_id(tokenizer, form.middle)]
    return [*parts, *middle, *_encode(tokenizer, begun, inside=True)]


def snippet_ids(tokenizer: Tokenizer, files: Sequence[tuple[str, str]]) -> list[int]:
    """The part before the prompt: names and texts of other files, in the form in which the model saw projects."""
    mark = next((each for name in _FILES if (each := tokenizer.token_to_id(name)) is not None), None)
    found: list[int] = []
    for name, text in files:
        head = [] if mark is None else [mark]
        shown = f"{name}\n{text}\n" if mark is not None else f"\n\n--- snippet ---\n\n{text}\n"
        found += [*head, *_encode(tokenizer, shown, inside=True)]
    return found


def fill_ends(tokenizer: Tokenizer, form: FillForm) -> list[int]:
    """Ids that end an answer: it is complete, or another text would begin."""
    found = (tokenizer.token_to_id(name) for name in (*form.ends, *form.names))
    return list(dict.fromkeys(token for token in found if token is not None))


def _id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_to_id(name)
    assert found is not None
    return found


def _encode(tokenizer: Tokenizer, text: str, *, inside: bool) -> list[int]:
    """Ids of a text. A mark typed in it is cut in two, because not every tokenizer declares its marks as special."""
    found: list[int] = []
    for i, piece in enumerate(_cut(text)):
        if piece:
            later = inside or i > 0
            found += (
                tokenizer.encode_inside(piece)
                if later
                else tokenizer.encode(piece, add_special_tokens=False, allow_special=False)
            )
    return found


def _cut(text: str) -> Iterator[str]:
    """The text in pieces: a cut is after the first character of every mark."""
    begun = 0
    for start in range(0, len(text), _SLICE):
        stop = start + _SLICE
        while (found := _MARK.search(text, start, stop + len(_MARKS[0]) - 1)) and found.start() < stop:
            start = found.start() + 1
            yield text[begun:start]
            begun = start
    yield text[begun:]
