"""Text for calibration. Owns: the package's own text, reading another one, and cutting it into sequences.

The package's text is a part of what the demonstration model's project wrote itself. Must not know: models.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.core.errors import ParameterError
from tokenmill.core.text_file import read_text_file

MOST = 64 << 20
"""Most characters."""


def read(path: Path | None, flag: str = "--calibration") -> str:
    """Read a text file. None: the package's own text. flag: what named it."""
    if path is None:
        return resources.files("tokenmill.quantize").joinpath("calibration.txt").read_text(encoding="utf-8")
    return read_text_file(path, flag, MOST)


def lead_and_rest(text: str, encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """The tokens with which every text begins (most often one or none), and those of this text. A sequence cut out of
    the text must begin with the former: without it, some models compute other numbers than they ever do in use."""
    ids, count = encode(text), 0
    for one, other in zip(encode(""), ids, strict=False):
        if one != other:
            break
        count += 1
    return ids[:count], ids[count:]


def sequences(text: str, encode: Callable[[str], list[int]], count: int, length: int) -> Tensor:
    """At most `count` sequences of `length` tokens [N, length], taken evenly from the whole text."""
    lead, ids = lead_and_rest(text, encode)
    if len(ids) < 32:
        raise ParameterError(f"The text to calibrate with has {len(ids)} tokens: give a longer one.")
    length = min(max(length - len(lead), 1), len(ids))
    most = len(ids) // length
    count = min(count, most)
    starts = [i * most // count * length for i in range(count)]
    return torch.tensor([lead + ids[start : start + length] for start in starts])
