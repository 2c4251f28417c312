"""Masks and draws on the device: chosen as the sampler's many operations choose, and the same at every depth."""

from __future__ import annotations

import random

import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.core.step import RowSampling
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.sampling.edits import Lines, line_masks
from tokenmill.sampling.quick import choose_quickly
from tokenmill.sampling.sampler import sample
from tokenmill.sampling.table import SamplingTable

ROWS = 80


@pytest.mark.parametrize("count", [1, 5, 32, 70])
@pytest.mark.parametrize("size", [999, 32_003, 128_256])
def test_the_same_choices_bit_for_bit(count, size):
    """Scores may not even be rounded otherwise: a line takes either way, as its company has it."""
    rng, kernels = random.Random(torch.initial_seed()), TritonKernels()
    table = SamplingTable(ROWS, size, "cuda")
    for row in range(ROWS):
        table.set_row(row, RowSampling(temperature=rng.choice([0.0, 0.5, 1.0, 1.7]), seed=rng.getrandbits(64)), 3)
    rows = rng.sample(range(ROWS), count)
    width = (size + 7) // 8
    makers = (lambda: rng.randbytes(width), lambda: bytes(width), lambda: b"\xff" * width,
              lambda: (1 << rng.randrange(size)).to_bytes(width, "little"))  # fmt: skip
    masks = {row: rng.choice(makers)() for row in rows if rng.random() < 0.6}
    logits = torch.randn(count, size, device="cuda") * 4
    if count > 2:
        logits[1, 7], logits[2, size // 2] = float("nan"), float("inf")
    at = torch.tensor(rows, device="cuda"), torch.randint(3, 60, (count,), device="cuda")
    for _ in range(3):  # counters are left as they were found
        lines = Lines(rows, at[0], at[1] + 1, torch.zeros(ROWS, 64, dtype=torch.int32, device="cuda"), masks, {})
        wanted = sample(logits, lines, table)
        quick = choose_quickly(logits, rows, at, line_masks(rows, masks), table, kernels)
        assert quick is not None
        found, marked = quick
        wanted.collect()
        found.collect()
        assert found.errors == wanted.errors and torch.equal(found.bad, wanted.bad)
        good = ~wanted.bad
        assert torch.equal(found.ids[good], wanted.ids[good]) and torch.equal(marked[good], wanted.ids[good])
        assert torch.equal(marked[~good], ~found.ids[~good])


SCHEMA = {
    "type": "array", "minItems": 9,
    "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "rank": {"type": "integer"}},
              "required": ["name", "rank"], "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}])
def test_depth_changes_nothing(options):
    """Uploads of masks, rows' scratch and recorded steps of two plans in flight do not meet."""
    params = [
        SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=60, ignore_eos=True, logprobs=1 if i == 5 else None,
                       structured_outputs={"json": SCHEMA} if i % 2 else None)
        for i in range(12)
    ]  # fmt: skip
    prompts = [f"Say {i % 5}: " for i in range(12)]
    found = []
    for depth in (1, 2, 2):
        with LLM("demo", max_num_seqs=9, max_model_len=512, num_gpu_blocks_override=600, deterministic=True,
                 pipeline_depth=depth, **options) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs])
    assert found[0] == found[1] == found[2]
