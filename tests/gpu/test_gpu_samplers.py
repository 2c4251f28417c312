"""Samplers of llama.cpp's users on the device: draws follow their definition, and company changes nothing."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.sampling.sampler_cases import (
    CASES,
    DRAWS,
    EACH,
    assert_follows,
    draws,
    edited,
    logits_of,
    repeats,
    row,
    wanted_of,
)

from tokenmill import LLM, SamplingParams
from tokenmill.core.step import RowSampling


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_definition(name):
    from tests.cpu.sampling import plain_samplers as plain

    params, keep = CASES[name]
    x = logits_of()
    assert_follows(draws(params, x.cuda(), DRAWS), wanted_of(keep(plain.pairs(x[0].tolist()))))


OF_LOGITS = [name for name in EACH if name not in ("dry", "ngrams", "window", "greedy dry")]


@pytest.mark.parametrize("size", [40, 128_256])
@pytest.mark.parametrize("name", OF_LOGITS)
def test_draws_are_those_of_the_cpu(name, size):
    """Noise is a hash, so only a sum that is rounded otherwise at a border may choose another token."""
    params = EACH[name]
    x = torch.randn(1, size, generator=torch.Generator().manual_seed(6)) * 2.5
    count = 2000 if size == 40 else 60
    here, there = draws(params, x.cuda(), count), draws(params, x, count)
    assert sum(a != b for a, b in zip(here, there, strict=True)) <= count // 500


def test_dry_and_ngrams_follow_the_definition():
    params, x, histories, wanted = repeats()
    found = edited(params, x.cuda(), histories).cpu()
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=1e-5)


SAMPLERS = {
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "xtc": {"temperature": 0.4, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    "mirostat": {"mirostat": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.3},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.3},
    "top-n-sigma": {"top_n_sigma": 1.5},
    "dynamic temperature": {"dynatemp_range": 0.5, "dynatemp_exponent": 2.0},
    "eta and epsilon": {"eta_cutoff": 800.0, "epsilon_cutoff": 80.0},
    "n-grams": {"no_repeat_ngram_size": 2},
    "window": {"repeat_last_n": 5, "repetition_penalty": 1.8, "frequency_penalty": 0.5},
    "order": {"top_p": 0.7, "min_p": 0.02, "samplers": ["penalties", "top_k", "min_p", "top_p", "temperature"]},
}


def test_every_sampler_in_company_equals_itself_alone():
    prompts, params = [], []
    for i, fields in enumerate(SAMPLERS.values()):
        for more in ({}, {"n": 2, "logprobs": 2}, {"structured_outputs": {"regex": "(yes|no)( mill| flour){3,6}"}}):
            prompts.append(f"Tell me of mill {i} by the river.")
            params.append(SamplingParams(**{"temperature": 0.9, "seed": i, "max_tokens": 40, **fields, **more}))
    found = []
    for options in (
        {"max_num_seqs": 1, "enforce_eager": True},
        {"max_num_seqs": 24, "pipeline_depth": 2},
        {"max_num_seqs": 24, "speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    ):
        with LLM("demo", max_model_len=512, num_gpu_blocks_override=900, deterministic=True, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([[(o.token_ids, o.finish_reason) for o in out.outputs] for out in outputs])
    assert found[0] == found[1] == found[2]


def test_row_of_defaults_is_greedy():
    x = torch.randn(1, 999, device="cuda")
    assert set(draws(RowSampling(), x, 50)) == {int(x.argmax())}
    assert len(set(draws(row(), x, 500))) > 50
