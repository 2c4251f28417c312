"""What is learnt from. Owns: how large a file of texts or prompts may be, and cutting tokens into lines of equal
length. Must not know: models, training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.core import text_file
from tokenmill.core.errors import ParameterError

MOST = 4 << 30
"""Most characters."""
HELD_OUT = 20
"""Every so many lines one is kept for judging."""


def read_texts(path: Path, flag: str = "--data") -> list[str]:
    """The texts of a file. flag: what named it."""
    return text_file.read_texts(path, flag, MOST)


@dataclass(frozen=True, slots=True)
class Lines:
    """tokens [n, length], and which of them count in full: the model's own answers, or all of a text."""

    tokens: Tensor
    own: Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def at(self, picked: Tensor | slice) -> Lines:
        """Some of them."""
        return Lines(self.tokens[picked], self.own[picked])


def cut(
    pieces: list[list[int]],
    length: int,
    prompts: list[int] | None = None,
    flags: tuple[str, str] = ("--data", "--length"),
) -> tuple[Lines, Lines]:
    """Token lists, each of which begins with a prompt of so many tokens, -> lines to learn from, and lines to be judged
    by; what is left at the end goes. flags: what named the text and the lines' length."""
    flat = torch.tensor([token for piece in pieces for token in piece], dtype=torch.int64)
    own = [
        n >= start for piece, start in zip(pieces, prompts or [0] * len(pieces), strict=True) for n in range(len(piece))
    ]
    count = flat.shape[0] // length
    if count < 2:
        raise ParameterError(
            f"{flags[0]}: {flat.shape[0]} tokens are too few for lines of {length}: give more text, or a smaller "
            f"{flags[1]}."
        )
    lines = Lines(*(x[: count * length].view(count, length) for x in (flat, torch.tensor(own))))
    held = torch.arange(count) % min(HELD_OUT, count) == 0
    return lines.at(~held), lines.at(held)


def encode_all(texts: list[str], encode: Callable[[str], list[int]], end: list[int]) -> list[list[int]]:
    """Tokens of each text, its end included."""
    return [[*encode(text), *end] for text in texts]
