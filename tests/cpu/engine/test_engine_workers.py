"""Engines in other processes: the pipe to a worker with large messages in both directions, and children after fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from tests.cpu.engine.engines import check_nothing_left, follow, open_llm

from tokenmill import SamplingParams
from tokenmill.engine.interfaces.prompts import make_request


@pytest.fixture(autouse=True)
def warm_starts():
    """These start as they do outside of tests."""


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


FORKED = """
import os, signal, sys, torch
from tokenmill import LLM, SamplingParams

def said():
    with LLM(model=sys.argv[1], kv_cache_memory_bytes=1 << 23, kernels="auto") as llm:
        asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        return llm.generate([{"prompt_token_ids": [1, 2, 3]}], asked, use_tqdm=False)[0].outputs[0].token_ids

torch.ones(1 << 20).sum()  # torch's threads exist from now on
wanted = said()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if torch.get_num_threads() > 1 and said() == wanted else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_opens_an_engine_of_its_own(tiny):
    """Torch would wait there for threads that only the parent has."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", FORKED, str(tiny)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LEFT = """
import sys, threading, time
from tokenmill import LLM, SamplingParams

llm = LLM(model=sys.argv[1], kv_cache_memory_bytes=1 << 25, kernels="auto")
asked = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
prompts = [{"prompt_token_ids": [i, 2, 3]} for i in range(16)]
threading.Thread(target=lambda: llm.generate(prompts, asked, use_tqdm=False), daemon=True).start()
while llm.engine.scheduler.counters.steps < 5:
    time.sleep(0.001)
"""


def test_a_daemon_thread_that_generates_does_not_spoil_the_exit(tiny):
    done = subprocess.run([sys.executable, "-c", LEFT, str(tiny)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
