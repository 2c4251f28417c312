"""Blocks of codebooks and of three values: what is written is the nearest that can be read."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from tokenmill.quant.gguf_codebook_bytes import ENCODERS
from tokenmill.quant.gguf_codebooks import book, find

CODEBOOKS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def read(kind: str, raw: Tensor) -> Tensor:
    return torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[kind]))


def drawn(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=random)
    return x, torch.rand(columns, generator=random) + 0.1


@pytest.mark.parametrize("kind", CODEBOOKS)
def test_the_library_reads_what_was_found(kind: str) -> None:
    rows, counts = drawn(3, 512)
    blocks, c = rows.view(-1, 256), counts.expand(3, -1).reshape(-1, 256)
    own, found = book(kind), find(blocks, c / counts.mean(), book(kind))
    scale = found.scale * own.unit * (found.steps + 0.5)
    vectors, per = 256 // own.width, own.group // own.width
    books = found.books.long().repeat_interleave(own.span, 1)
    entries = own.entries[books, found.entries.long()].view(len(blocks), vectors, own.width)
    said = (entries * scale.repeat_interleave(per, 1)[..., None]).view(-1, 256)
    said = torch.where(found.negative, -said, said)
    torch.testing.assert_close(read(kind, ENCODERS[kind](rows, counts)), said.view(3, 512), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", CODEBOOKS)
def test_no_other_entry_is_nearer(kind: str) -> None:
    """At the scale of its group, with its signs."""
    rows, counts = drawn(2, 512)
    own = book(kind)
    blocks, c = rows.view(-1, 256), counts.expand(2, -1).reshape(-1, 256)
    found = find(blocks, c, own)
    scale = (found.scale * own.unit * (found.steps + 0.5)).repeat_interleave(own.group // own.width, 1)
    target = torch.where(found.negative, -blocks, blocks).view(len(blocks), -1, 1, own.width)
    weights = c.view(len(blocks), -1, 1, own.width)
    books = found.books.long().repeat_interleave(own.span, 1)
    every = torch.stack(
        [(weights * (target - scale[..., None, None] * part).square()).sum(-1) for part in own.entries]
    )  # [books, blocks, vectors, entries]
    taken = every.gather(-1, found.entries.long().expand(len(every), -1, -1)[..., None])[..., 0].gather(0, books[None])[
        0
    ]
    least = every.amin(-1).view(len(every), len(blocks), -1, own.span).sum(-1).amin(0)
    torch.testing.assert_close(taken.view(*least.shape, own.span).sum(-1), least, rtol=1e-4, atol=1e-6)
    if own.signs != "none":
        wrong = (found.negative != (blocks < 0)).view(-1, 8)
        even = found.negative.view(-1, 8).sum(1) % 2 == 0
        assert bool(even.all()) == (own.signs == "even")
        assert wrong.sum(1).max() == (own.signs == "even"), "one sign at most gives way"


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_three_values_come_back_exactly(kind: str) -> None:
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(-1, 2, (5, 768), generator=random) * 0.40625
    assert torch.equal(read(kind, ENCODERS[kind](rows)), rows)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e4])
def test_no_size_of_numbers_gives_nonsense(kind: str, size: float) -> None:
    rows, _ = drawn(2, 256)
    back = read(kind, ENCODERS[kind](rows * size))
    assert back.isfinite().all() and (back - rows * size).norm() <= 1.0001 * (rows * size).norm()
