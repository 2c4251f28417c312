"""Text for calibration. Owns: the package's own text, reading another one, and cutting it into sequences.

The package's text is a part of what the demonstration model's project wrote itself. Must not know: models.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.core.text_file import read_texts

MOST = 64 << 20
"""Most characters."""
LEAST_LENGTH, MOST_COUNTED = 8, 1 << 16
"""The fewest tokens of a sequence; the most tokens, and sequences."""


def read(path: Path | None, flag: str = "--calibration") -> str:
    """Read a text file, or JSON lines. None: the package's own text. flag: what named it."""
    if path is None:
        return resources.files("tokenmill.quantize").joinpath("calibration.txt").read_text(encoding="utf-8")
    return "\n\n".join(read_texts(path, flag, MOST))


def lead_and_rest(text: str, encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """The tokens with which every text begins (most often one or none), and those of this text. A sequence cut out of
    the text must begin with the former: without it, some models compute other numbers than they ever do in use."""
    ids, count = encode(text), 0
    for one, other in zip(encode(""), ids, strict=False):
        if one != other:
            break
        count += 1
    return ids[:count], ids[count:]


def check_ids(highest: int, vocab: int, model: str = "The model") -> None:
    """Refuse tokens that a model does not have; highest: the largest id. (A CPU would end with an error of torch, and a
    GPU be lost.)"""
    if highest >= vocab:
        raise ModelError(
            f"{model} has {vocab} embeddings, and its tokenizer gives id {highest}: they do not belong together."
        )


def check_counts(samples: int, length: int) -> None:
    """Refuse a number of sequences, or of their tokens, with which nothing can be measured."""
    if not (0 < samples <= MOST_COUNTED and LEAST_LENGTH <= length <= MOST_COUNTED):
        raise ParameterError(
            f"--samples takes 1 to {MOST_COUNTED} sequences, --length {LEAST_LENGTH} to {MOST_COUNTED} tokens."
        )


def fitting(length: int | None, usual: int, context: int) -> int:
    """The tokens of a sequence: as many as asked for, or `usual`, but no more than the model's context has."""
    check_counts(1, usual if length is None else length)
    if length is not None and length > context:
        raise ParameterError(f"--length {length} is more than the {context} tokens of this model's context.")
    return min(usual if length is None else length, context)


def sequences(text: str, encode: Callable[[str], list[int]], count: int, length: int) -> Tensor:
    """At most `count` sequences of `length` tokens [N, length], taken evenly from the whole text."""
    check_counts(count, length)
    lead, ids = lead_and_rest(text, encode)
    if len(ids) < 32:
        raise ParameterError(f"--calibration: the text has {len(ids)} tokens, and 32 are needed at least.")
    length = min(max(length - len(lead), 1), len(ids))
    most = len(ids) // length
    count = min(count, most)
    starts = [i * most // count * length for i in range(count)]
    return torch.tensor([lead + ids[start : start + length] for start in starts])
