"""Groups of 8 or 4 numbers as entries of a codebook. Owns: which books the GGUF types IQ1, IQ2 and IQ3 have, and the
search for scales, signs and entries.

    x ~ d * unit * (k + 1/2) * sign * (entry + shift)     d: of 256 numbers; k: of a group; entry: of a vector

For weights c the error of an entry g at scale s is c x^2 - 2 s (c x) g + s^2 c g^2: both products with all entries are
made once, and every scale that is tried only adds them up. Must not know: how blocks lie in bytes, files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from tokenmill.quant.gguf_fit import TINY, divided, scales

BLOCK = 256
_TRIALS = (1.08, 1.0, 0.92, 0.85, 0.78, 0.7, 0.62, 0.54, 0.46, 0.38)
"""Scales that are tried, as multiples of the one that maps the largest magnitude to the largest entry."""
_REFITS = 2
_SHARED = (1.0, 0.97, 0.94, 0.9, 1.03, 1.06)
_BESIDE = (0, -1, 1)
"""Steps of a group that are tried once the block's scale is known, relative to the nearest step."""
_ROOM = 1 << 19
"""The most vectors times entries that are compared at once, so that they stay in a cache."""


@dataclass(frozen=True, slots=True)
class Book:
    """entries [books, entries, n]; books differ by a shift. group: numbers that share a step; steps: how many steps
    there are; unit: their unit, as a part of the block's scale; span: vectors that share a book. signs: none (the
    entries have signs), any, or even: an even number of minus signs in each 8 numbers."""

    entries: Tensor
    group: int
    steps: int
    unit: float
    signs: Literal["none", "any", "even"]
    span: int = 1

    @property
    def width(self) -> int:
        """The numbers in a vector."""
        return self.entries.shape[2]


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks in terms of a book: scales [blocks, 1] exact in half precision, steps [blocks, groups], entries [blocks,
    vectors], books [blocks, vectors / span], and which numbers are negative [blocks, 256]."""

    scale: Tensor
    steps: Tensor
    entries: Tensor
    books: Tensor
    negative: Tensor


@cache
def book(name: str) -> Book:
    """The book of a GGUF type. The entries come from the format's own library."""
    from gguf import quants

    kind = getattr(quants, "IQ1_S" if name == "IQ1_M" else name)
    kind.init_grid()
    entries = torch.from_numpy(kind.grid.copy()).float().view(1, *kind.grid_shape)
    if name in ("IQ1_S", "IQ1_M"):
        shifted = torch.cat([entries + float(kind.delta), entries - float(kind.delta)])
        return Book(shifted, *((32, 8, 2.0, "none", 4) if name == "IQ1_S" else (16, 8, 2.0, "none", 1)))
    said: dict[str, tuple[int, int, float, Literal["any", "even"]]] = {
        "IQ2_XXS": (32, 16, 0.25, "even"),
        "IQ2_XS": (16, 16, 0.25, "even"),
        "IQ2_S": (16, 16, 0.25, "any"),
        "IQ3_XXS": (32, 16, 0.5, "even"),
        "IQ3_S": (32, 16, 2.0, "any"),
    }
    return Book(entries, *said[name])


def find(x: Tensor, c: Tensor, book: Book) -> Found:
    """Round x [blocks, 256] float32 to the book. c: the weight of each number's squared error."""
    parts = max(1, _ROOM // (book.entries.shape[0] * book.entries.shape[1] * (BLOCK // book.width)))
    made = [_find(*piece, book) for piece in zip(x.split(parts), c.split(parts), strict=True)]
    return Found(*(torch.cat([getattr(each, name) for each in made]) for name in Found.__slots__))


def _find(x: Tensor, c: Tensor, book: Book) -> Found:
    x, negative = _signed(x, c, book.signs)
    entries = book.entries.to(x.device)
    seen = _Products(x, c, entries, book.span, book.group // book.width)
    top = x.view(len(x), -1, book.group).abs().amax(-1) / entries.abs().max()
    own = _best([top * by for by in _TRIALS], seen)
    for _ in range(_REFITS):
        own = seen.nearest(own)[2]
    half = book.steps - 0.5
    counts = divided(seen.energy, own.square())  # the error of a scale weighs as much as the numbers that it multiplies
    counts = counts / counts.amax(-1, keepdim=True).clamp(min=TINY)
    d = scales(own, counts, lambda t: (t - 0.5).round().clamp_(0, book.steps - 1) + 0.5, half, _SHARED)
    d = (d.abs() / book.unit).clamp(max=65504.0).half().float()
    unit = d * book.unit
    nearest = (divided(own, unit) - 0.5).round()
    scale = _best([unit * ((nearest + by).clamp(0, book.steps - 1) + 0.5) for by in _BESIDE], seen)
    chosen, books, _ = seen.nearest(scale)
    steps = (divided(scale, unit) - 0.5).round().clamp(0, book.steps - 1)
    return Found(d, steps.to(torch.uint8), chosen.int(), books.to(torch.uint8), negative)


def _best(tried: list[Tensor], seen: _Products) -> Tensor:
    """For each group the scale [blocks, groups] with the least error."""
    errors = torch.stack([seen.errors(scale) for scale in tried])
    return torch.stack(tried).gather(0, errors.argmin(0, keepdim=True))[0]


def _signed(x: Tensor, c: Tensor, signs: str) -> tuple[Tensor, Tensor]:
    """The magnitudes to look up, and which numbers get a minus sign. If the signs must be even in each 8, the number
    whose wrong sign costs least gets the wrong one, and its magnitude is negative here."""
    if signs == "none":
        return x, torch.zeros_like(x, dtype=torch.bool)
    negative = x < 0
    if signs == "even":
        eights = negative.view(len(x), -1, 8)
        odd = eights.sum(-1, keepdim=True) % 2 == 1
        cheapest = (c * x * x).view_as(eights).argmin(-1, keepdim=True)
        flips = torch.zeros_like(eights).scatter(-1, cheapest, odd)
        negative = (eights ^ flips).view_as(negative)
    return torch.where(negative, -x, x), negative


class _Products:
    """The products of all vectors with every entry: -2 (c x) g and c g^2 [books, vectors, entries]."""

    def __init__(self, x: Tensor, c: Tensor, entries: Tensor, span: int, vectors: int) -> None:
        """vectors: how many a group has."""
        self.blocks, self.span, self.vectors = len(x), span, vectors
        width = entries.shape[2]
        weights, values = c.reshape(-1, width), (c * x).reshape(-1, width)
        self.first = torch.stack([values @ (-2.0 * part.T) for part in entries])
        self.second = torch.stack([weights @ part.square().T for part in entries])
        self.energy = self._grouped((c * x * x).reshape(-1, width).sum(-1))
        self.sums = torch.empty_like(self.first)

    def _at(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """For every entry: its error divided by the scale, without c x^2. Also the scales [1, vectors]."""
        s = scale.reshape(-1, 1).repeat_interleave(self.vectors, 0)[None]
        return torch.addcmul(self.first, self.second, s, out=self.sums), s[..., 0]

    def errors(self, scale: Tensor) -> Tensor:
        """scale [blocks, groups] -> the least possible error [blocks, groups], without c x^2."""
        sums, s = self._at(scale)
        least = (sums.amin(-1) * s).view(len(sums), -1, self.span).sum(-1).amin(0)
        return least.view(*scale.shape, -1).sum(-1)

    def nearest(self, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """scale [blocks, groups] -> the nearest entries [blocks, vectors], their books [blocks, vectors / span], and
        the scales [blocks, groups] that fit these best."""
        sums, s = self._at(scale)
        values, indices = sums.min(-1)
        books = (values * s).view(len(sums), -1, self.span).sum(-1).argmin(0)
        each, vectors = books.repeat_interleave(self.span), torch.arange(indices.shape[1], device=indices.device)
        entries = indices[each, vectors]
        first, second = (self._grouped(product[each, vectors, entries]) for product in (self.first, self.second))
        fitted = torch.where(second > TINY, -0.5 * first / second.clamp(min=TINY), scale).clamp(min=0.0)
        return entries.view(self.blocks, -1), books.view(self.blocks, -1), fitted

    def _grouped(self, vectors: Tensor) -> Tensor:
        return vectors.view(self.blocks, -1, self.vectors).sum(-1)
