"""K/V in 8 and 4 bits compose with the prefix cache, chunks, preemption, beams and drafts, and change little."""

from __future__ import annotations

import random
import statistics

import pytest
from tests.cpu.engine.engine_families_helpers import ALL, Family
from tests.cpu.engine.engine_same_bytes_helpers import stories
from tests.cpu.engine.engines import BACKENDS, check_nothing_left, exact, follow, greedy, open_llm, run
from tests.cpu.models.family_cases import ALL as LATER
from tests.thinned import WHOLE

from tokenmill import SamplingParams
from tokenmill.core.errors import UserError

FORMATS = {
    "int8": {"kv_dtype": "int8"},
    "int8 groups": {"kv_dtype": "int8", "kv_cache_group": 4},
    "fp8": {"kv_dtype": "fp8"},
    "int4": {"kv_dtype": "int4"},
    "int4 and fp8": {"kv_dtype": "int4-fp8k"},
}


EVERY = [(name, backend) for name in ("int8", "int8 groups", "fp8") for backend in BACKENDS]
"""And 4 bits, once each: native kernels read them where keys have them, too."""


@pytest.mark.parametrize(("name", "backend"), [*EVERY, ("int4", "auto"), ("int4 and fp8", "reference")])
def test_company_chunks_preemption_and_cached_prefixes_change_no_byte(name, backend, tiny):
    requests = stories(40 if WHOLE or backend != "reference" else 20, 8)  # the reference is slow
    with open_llm(tiny, kernels=backend, **FORMATS[name]) as llm:
        alone = {}
        for request in requests:
            alone |= follow(llm, [request], None)
            llm.reset_prefix_cache()
    rough = {"long_prefill_token_threshold": 7, "num_blocks": 18, "max_num_seqs": 12, "max_model_len": 256}
    with open_llm(tiny, kernels=backend, **rough, speculative_config={"method": "ngram"}, **FORMATS[name]) as llm:
        found = follow(llm, requests, random.Random(2))
        assert llm.engine.scheduler.counters.preemptions > 0
        check_nothing_left(llm.engine)
    for request in requests:
        assert exact(found[request.id]) == exact(alone[request.id]), request


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v2", "gpt-oss"])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4", "int4 and fp8"])
def test_probabilities_stay_close(name, family, tmp_path):
    if name == "int4 and fp8" and family == "deepseek-v2":
        pytest.skip("its values lie in its keys")
    made = Family(ALL[family], tmp_path)
    params = greedy(1, prompt_logprobs=0)
    found = []
    for options in ({}, FORMATS[name]):
        with made.open(**options) as llm:
            outputs = run(llm, made.prompts, params)
        found.append([next(iter(p.values())).logprob for out in outputs for p in out.prompt_logprobs[1:]])
    plain, small = found
    spread = statistics.pstdev(plain)
    usual = statistics.median(abs(a - b) for a, b in zip(plain, small, strict=True))
    assert 0 < usual < {"int8": 0.01, "fp8": 0.05, "int4": 0.15, "int4 and fp8": 0.1}[name] * spread


def test_beams_in_8_bits_equal_beams_alone(tiny):
    prompts = [[5, 6, 7] * 9, [9] * 30]
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=12, temperature=0.0)
    with open_llm(tiny, kv_dtype="int8") as llm:
        together = run(llm, prompts, params)
        llm.reset_prefix_cache()
        single = [run(llm, [prompt], params)[0] for prompt in prompts]
        check_nothing_left(llm.engine)
    assert [[o.token_ids for o in r.outputs] for r in together] == [[o.token_ids for o in r.outputs] for r in single]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_odd_number_of_bytes_lies_before_the_scales(backend, tmp_path):
    """One head of 14 numbers and blocks of odd length: 14 bytes of keys and 7 of values a token."""
    found = []
    for size in (1, 3, 16):
        family = Family(LATER["mistral-2"], tmp_path / str(size), 6)
        with family.open(kernels=backend, block_size=size, kv_dtype="int4-fp8k", max_num_seqs=8) as llm:
            found.append([exact(output) for output in run(llm, family.prompts, family.params)])
    assert found[0] == found[1] == found[2]


def test_a_group_without_8_bits_is_refused(tiny):
    with pytest.raises(UserError, match="kv-cache-group"):
        open_llm(tiny, kv_cache_group=4)
    with pytest.raises(UserError, match="does not divide"):
        open_llm(tiny, kv_dtype="int8", kv_cache_group=5)


def test_what_4_bits_cannot_hold_is_refused(tiny, tmp_path):
    with Family(ALL["deepseek-v2"], tmp_path).open(kv_dtype="int4") as llm:
        assert len(run(llm, [[1, 2, 3]], greedy(4))[0].outputs[0].token_ids) == 4
    with pytest.raises(UserError, match="values lie in its keys"):
        Family(ALL["deepseek-v2"], tmp_path).open(kv_dtype="int4-fp8k")


def test_more_fits_into_the_same_bytes(tiny):
    blocks = []
    for options in ({}, FORMATS["int8"], {"kv_dtype": "int4", "kv_cache_group": 8}):
        with open_llm(tiny, **options, kv_cache_memory_bytes=1 << 18, max_num_seqs=256) as llm:
            blocks.append(llm.built.facts.num_blocks[0])
            assert len(run(llm, [[1, 2, 3]], greedy(4))[0].outputs[0].token_ids) == 4
    assert blocks[1] > 3 * blocks[0] and blocks[2] > 1.15 * blocks[1]
