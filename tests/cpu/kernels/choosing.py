"""Cases for operations that choose tokens: any masks, draws and logits; what the sampler gives for them."""

from __future__ import annotations

import math
import random

import torch
from hypothesis import strategies as st

from tokenmill.core.step import RowSampling
from tokenmill.sampling.edits import Lines, line_masks
from tokenmill.sampling.noise import exponentials, position_keys
from tokenmill.sampling.quick import choose_quickly
from tokenmill.sampling.sampler import Sampled, sample
from tokenmill.sampling.table import SamplingTable

ROWS = 6


def both(kernels, logits, rows, params, masks, lengths):
    """The sampler's answer and the backend's: the same lines."""
    table = SamplingTable(ROWS, logits.shape[1], "cpu")
    for row, one in params.items():
        table.set_row(row, one, 3)
    at = torch.tensor(rows), torch.tensor(lengths) - 1
    tokens = torch.zeros(ROWS, 64, dtype=torch.int32)
    wanted = sample(logits.float(), Lines(rows, at[0], at[1] + 1, tokens, masks, {}), table)
    found = choose_quickly(logits, rows, at, line_masks(rows, masks), table, kernels)
    wanted.collect()
    if found is None:
        return table, wanted, None, None
    found[0].collect()
    return table, wanted, *found


def near_tie(table, x: torch.Tensor, row: int, length: int) -> bool:
    """Rounding may decide: the interpreter's logarithms are not torch's."""
    if not table.bits[row] & 1:
        return False
    key = position_keys(table.stream[row : row + 1], torch.tensor([length - 3]))
    e = exponentials(key, table.bases)[0]
    scores = (x - x.max()) * table.inverse_temperature[row] - e.log()
    best = scores.topk(min(2, len(scores))).values
    return len(best) == 2 and float(best[0] - best[1]) < 1e-4


def check(table, logits, rows, masks, lengths, wanted: Sampled, found: Sampled, marked, *, exact=False) -> None:
    assert found.errors == wanted.errors
    assert torch.equal(found.bad, wanted.bad)
    packed = line_masks(rows, masks)
    for line, row in enumerate(rows):
        token = int(found.ids[line])
        assert 0 <= token < logits.shape[1] and int(marked[line]) == (~token if wanted.bad[line] else token)
        if wanted.bad[line]:
            continue
        x = logits[line].float().clone()
        if line in packed:
            allowed = [i for i in range(len(x)) if i >> 3 < len(packed[line]) and packed[line][i >> 3] >> (i & 7) & 1]
            keep = torch.zeros(len(x), dtype=torch.bool)
            keep[allowed] = True
            x[~keep] = -math.inf
        assert x[token] > -math.inf
        if exact or not near_tie(table, x, row, lengths[line]):
            assert token == int(wanted.ids[line])


@st.composite
def cases(draw):
    size = draw(st.sampled_from([1, 31, 32, 33, 300, 1025, 2600]) | st.integers(2, 1500))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    count = draw(st.integers(1, 4))
    rows = sorted(rng.choices(range(ROWS), k=count))  # a row with drafts has several lines
    kinds = draw(st.lists(st.sampled_from(["none", "some", "few", "empty", "all", "short", "long"]), min_size=ROWS,
                          max_size=ROWS))  # fmt: skip
    width = (size + 7) // 8
    makers = {
        "some": lambda: rng.randbytes(width), "empty": lambda: bytes(width), "all": lambda: b"\xff" * width,
        "few": lambda: (1 << rng.randrange(size)).to_bytes(width, "little"),
        "short": lambda: rng.randbytes(max(1, width // 2)), "long": lambda: rng.randbytes(width + 5),
    }  # fmt: skip
    masks = {}
    for row in set(rows):
        if kinds[row] != "none":
            lines = [makers[kinds[row]]() for _ in range(rows.count(row))]
            masks[row] = lines if len(lines) > 1 else lines[0]
    params = {
        row: RowSampling(temperature=rng.choice([0.0, 0.7, 1.5]), seed=rng.getrandbits(64)) for row in range(ROWS)
    }
    generator = torch.Generator().manual_seed(rng.getrandbits(30))
    logits = torch.randn(count, size, generator=generator) * 3
    if draw(st.booleans()):
        logits = logits.round()  # equal ones: the lowest id wins
    for line in range(count):
        spoilt = draw(st.sampled_from(["", "", "", "nan", "inf", "-inf", "all -inf"]))
        if spoilt:
            place = slice(None) if spoilt.startswith("all") else rng.randrange(size)
            logits[line, place] = float(spoilt.removeprefix("all "))
    return logits, rows, params, masks, [rng.randint(3, 60) for _ in rows]
