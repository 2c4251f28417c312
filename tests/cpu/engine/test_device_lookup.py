"""Prompt lookup on a device proposes what the host's does."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tokenmill.compute.drafting import Drafting
from tokenmill.kernels import lookup
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.speculate.lookup import NgramLookup
from tokenmill.speculate.ngram import NgramDrafter

WIDTH, MOST = 80, 5


def rows_of(texts: list[list[int]]) -> SimpleNamespace:
    """Row 2 i holds text i, with rubbish behind it that must not be found."""
    tokens = torch.randint(0, 3, (2 * len(texts), WIDTH + MOST), dtype=torch.int32)
    length = torch.zeros(2 * len(texts), dtype=torch.int64)
    for i, text in enumerate(texts):
        tokens[2 * i, : len(text)] = torch.tensor(text)
        length[2 * i] = len(text)
    return SimpleNamespace(tokens=tokens, length=length)


def step(rows: SimpleNamespace, row_ids: torch.Tensor, longest: int) -> Drafting:
    """What the runner says after sampling."""
    none = torch.empty(0)
    return Drafting(rows, [], row_ids, MOST, longest, lambda: none, lambda: (none, none, none))


@pytest.mark.parametrize("longest, shortest", [(4, 2), (1, 1), (3, 3), (8, 1), (64, 2)])
@pytest.mark.parametrize("cells", [1, 200, 1 << 22])
def test_the_same_proposals(longest, shortest, cells, monkeypatch):
    monkeypatch.setattr(lookup, "CELLS", cells)
    rng = random.Random(longest * 10 + shortest)
    device, host = NgramLookup(ReferenceKernels(), MOST, longest, shortest), NgramDrafter(longest, shortest)
    found = 0
    for story in range(12):
        kinds = rng.choice([2, 3, 9])
        texts = [[rng.randrange(kinds) for _ in range(rng.randint(1, WIDTH))] for _ in range(6)]
        rows = rows_of(texts)
        before = rows.tokens.clone()
        device.propose(step(rows, torch.arange(0, 12, 2), max(map(len, texts))))
        for i, text in enumerate(texts):
            wanted = host.propose(SimpleNamespace(id=(story, i), tokens=text), MOST)
            drafts = rows.tokens[2 * i, len(text) : len(text) + MOST].tolist()
            assert drafts[: len(wanted)] == wanted
            # Behind the end of the text it goes on with what it has just proposed; without a match nothing is known.
            circle = wanted or text[-1:]
            assert drafts == [circle[j % len(circle)] for j in range(MOST)]
            assert rows.tokens[2 * i, : len(text)].tolist() == text
            assert torch.equal(rows.tokens[2 * i + 1], before[2 * i + 1])
            found += bool(wanted)
    assert found > 20


def test_text_in_a_circle_is_guessed_past_its_end():
    rows = rows_of([[9, 1, 2, 1, 2, 1]])
    NgramLookup(ReferenceKernels(), MOST).propose(step(rows, torch.tensor([0]), 6))
    assert rows.tokens[0, 6 : 6 + MOST].tolist() == [2, 1, 2, 1, 2]


def test_nothing_is_read_by_the_host():
    """Tensors without contents: whoever asks for a number raises."""
    rows = SimpleNamespace(
        tokens=torch.zeros(9, WIDTH, dtype=torch.int32, device="meta"),
        length=torch.zeros(9, dtype=torch.int64, device="meta"),
    )
    with pytest.raises(NotImplementedError):
        rows.length.tolist()
    NgramLookup(ReferenceKernels(), MOST).propose(step(rows, torch.zeros(3, dtype=torch.int64, device="meta"), 40))
