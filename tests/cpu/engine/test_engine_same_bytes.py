"""A request's bytes do not depend on its company, chunk sizes, cache state, preemption, depth or process."""

from __future__ import annotations

import os
import random

import pytest
from engines import BACKENDS, check_nothing_left, exact, follow, open_llm

from tokenmill import SamplingParams
from tokenmill.engine.prompts import make_request

COUNT = 100 if os.environ.get("TOKENMILL_FAMILIES") else 50
ROUGH = {
    "chunks and preemption": {"long_prefill_token_threshold": 7, "num_blocks": 18, "max_num_seqs": 12},
    "small steps at depth 2": {"max_num_batched_tokens": 19, "depth": 2, "max_num_seqs": 5, "block_size": 8},
    "batches and prompts whole, blocks as long as sequences: no cache": {
        "batching": "static",
        "enable_chunked_prefill": False,
        "block_size": 256,
        "enable_prefix_caching": False,
    },
    "drafts of the device, chunks and preemption": {
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 1},
        "depth": 2,
        "long_prefill_token_threshold": 7,
        "num_blocks": 18,
        "max_num_seqs": 12,
    },
    "drafts, no cache": {"speculative_config": {"method": "ngram"}, "enable_prefix_caching": False},
}


def stories(count: int, seed: int) -> list:
    """Random prompts, many with a common beginning, with every kind of sampling."""
    rng = random.Random(seed)
    stems = [[rng.randrange(259) for _ in range(rng.randint(10, 60))] for _ in range(4)]
    requests = []
    for i in range(count):
        prompt = rng.choice(stems)[: rng.randint(1, 60)] + [rng.randrange(259) for _ in range(rng.randint(0, 30))]
        if rng.random() < 0.2:
            prompt = (prompt[:5] * 6)[:30]
        more: dict = {"logprobs": rng.choice([None, 0, 3]), "max_tokens": rng.randint(1, 24), "seed": rng.randrange(99)}
        if rng.random() < 0.4:
            more["temperature"] = 0.0
        else:
            more |= {"temperature": rng.choice([0.7, 1.0, 1.5]), "top_p": rng.choice([1.0, 0.8])}
            more |= {"top_k": rng.choice([0, 20]), "min_p": rng.choice([0.0, 0.02]), "n": rng.choice([1, 1, 1, 2])}
        if rng.random() < 0.2:
            more |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2}
        if rng.random() < 0.2:
            more["prompt_logprobs"] = 2
        if rng.random() < 0.2:
            more |= {"stop": ["e", " t"], "min_tokens": min(4, more["max_tokens"])}
        if rng.random() < 0.1:
            more |= {
                "structured_outputs": {"choice": ["yes, of course", "no", "yes, of mills"]},
                "prompt_logprobs": None,
            }
        params = SamplingParams(**more)
        requests.append(make_request(f"r{i}", None, prompt, params, arrival=float(i)))
    return requests


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_in_random_company_equal_the_same_alone(backend, tiny):
    requests = stories(COUNT if backend == BACKENDS[-1] else COUNT // 2, 5)  # the other one is slow
    with open_llm(tiny, kernels=backend) as llm:
        alone = {}
        for request in requests:
            alone |= follow(llm, [request], None)
            llm.reset_prefix_cache()
    for title, options in ROUGH.items():
        with open_llm(tiny, **{"kernels": backend, "max_model_len": 256, **options}) as llm:
            found = follow(llm, requests, random.Random(title))
            counters = llm.engine.scheduler.counters
            assert ("preemption" in title) <= (counters.preemptions > 0), title
            assert ("cache" not in title) <= (counters.cached_tokens > 4 * len(requests)), title
            assert ("drafts" in title) <= (counters.accepted > 0), title
            check_nothing_left(llm.engine)
        for request in requests:
            assert exact(found[request.id]) == exact(alone[request.id]), (title, request)


def test_requests_in_another_process_equal_the_same_alone(tiny):
    requests = stories(COUNT * 3 // 5, 6)
    with open_llm(tiny) as llm:
        alone = {}
        for request in requests:
            alone |= follow(llm, [request], None)
    options = {"executor": "process", "long_prefill_token_threshold": 11, "max_model_len": 256, "num_blocks": 20}
    with open_llm(tiny, **options) as llm:
        found = follow(llm, requests, random.Random(1))
        check_nothing_left(llm.engine)
    for request in requests:
        assert exact(found[request.id]) == exact(alone[request.id]), request
