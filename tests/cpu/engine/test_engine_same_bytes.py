"""A request's bytes do not depend on its company, chunk sizes, cache state, preemption, depth or process."""

from __future__ import annotations

import os
import random

import pytest
from tests.cpu.engine.engine_same_bytes_helpers import stories
from tests.cpu.engine.engines import BACKENDS, check_nothing_left, exact, follow, open_llm

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
            assert ("cache" not in title) <= (counters.cached_tokens > 2 * len(requests)), title
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
