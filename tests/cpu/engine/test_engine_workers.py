"""The pipe to a worker: large messages in both directions at once."""

from __future__ import annotations

import threading

from engines import check_nothing_left, follow, open_llm

from tokenmill import SamplingParams
from tokenmill.engine.prompts import make_request


def test_large_plans_and_large_results_do_not_wait_for_each_other(tiny):
    """Results of a megabyte (prompt logprobs) meet plans of a megabyte (long prompts) in a pipe that holds less."""
    limit = 2000
    options = {"executor": "process", "max_model_len": 2048, "max_num_seqs": 150, "max_num_batched_tokens": 4000}
    with open_llm(tiny, kv_cache_memory_bytes=1 << 27, kernels="auto", **options) as llm:
        scored = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=20)
        plain = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        requests = [make_request(f"s{i}", None, [i + 1] * limit, scored, arrival=0.0) for i in range(2)]
        requests += [make_request(f"p{i}", None, [300] * limit, plain, arrival=1.0) for i in range(140)]
        found: dict = {}
        thread = threading.Thread(target=lambda: found.update(follow(llm, requests, None)), daemon=True)
        thread.start()
        thread.join(60)
        stuck = thread.is_alive()
        if stuck:
            llm.engine.executor.process.kill()
        assert not stuck, "engine and worker wait for each other"
        assert len(found["s1"].prompt_logprobs) == limit
        check_nothing_left(llm.engine)
