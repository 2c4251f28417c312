"""Scarce K/V blocks and shared prefixes: nothing is lost, nothing is computed twice."""

from __future__ import annotations

import random

import pytest
from tests.cpu.engine.engines import BACKENDS, check_nothing_left, exact, greedy, run
from tests.cpu.engine.engines import open_usual as open_llm

from tokenmill.core.config import make_config
from tokenmill.core.request import Request
from tokenmill.engine.load.memory import cache_bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quarter_of_the_blocks_serves_all_requests(backend, tiny):
    rng = random.Random(3)
    prompts = [[rng.randrange(259) for _ in range(rng.randint(5, 70))] for _ in range(64)]
    params = [greedy(rng.randint(5, 40), logprobs=1) for _ in prompts]
    with open_llm(tiny, kernels=backend, max_num_seqs=64) as llm:
        wanted = run(llm, prompts, params)
    demand = sum(-(-(len(p) + s.max_tokens) // 16) for p, s in zip(prompts, params, strict=True))
    options = {"max_num_seqs": 64, "max_model_len": 128, "num_blocks": demand // 4}
    with open_llm(tiny, kernels=backend, **options) as llm:
        found = run(llm, prompts, params)
        assert llm.engine.scheduler.counters.preemptions > 0
        check_nothing_left(llm.engine)
    assert [exact(o) for o in found] == [exact(o) for o in wanted]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in found)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 300}, {"depth": 2}, {"executor": "process"}])
def test_a_system_prompt_that_arrives_64_times_is_computed_once(options, tiny):
    rng = random.Random(4)
    system = [rng.randrange(259) for _ in range(1000)]
    tails = [[rng.randrange(259) for _ in range(rng.randint(1, 20))] for _ in range(64)]
    options = {"max_num_seqs": 64, "max_model_len": 1200, "kv_cache_memory_bytes": 1 << 25, **options}
    with open_llm(tiny, **options) as llm:
        outputs = run(llm, [system + tail for tail in tails], greedy(4))
        counters = llm.engine.scheduler.counters
        assert counters.prompt_tokens <= 1000 + sum(len(t) + 16 for t in tails)
        assert counters.cached_tokens >= 63 * (1000 - 16)
        assert sum(o.num_cached_tokens >= 900 for o in outputs) >= 62
        check_nothing_left(llm.engine)
    if not options.get("executor"):
        with open_llm(tiny, **{**options, "enable_prefix_caching": False}) as llm:
            few = [0, 1, 63]
            assert [exact(o) for o in run(llm, [system + tails[i] for i in few], greedy(4))] == [
                exact(outputs[i]) for i in few
            ]


def test_windows_give_their_blocks_back(tmp_path):
    """A windowed model runs a text through a pool that could never hold all of it at once ... per sequence."""
    from tests.cpu.models.llama_helpers import CONFIGS
    from tests.cpu.models.parity import make

    make(CONFIGS["mistral-window"], tmp_path)
    prompts = [[(7 * i + j) % 131 for j in range(40)] for i in range(6)]
    with open_llm(tmp_path, skip_tokenizer_init=True, max_model_len=256) as llm:
        wanted = run(llm, prompts, greedy(200))
    with open_llm(tmp_path, skip_tokenizer_init=True, max_model_len=256, num_blocks=26) as llm:
        found = run(llm, prompts, greedy(200))  # six sequences of 15 blocks each, of which a window needs three
        assert llm.engine.scheduler.counters.preemptions == 0
        check_nothing_left(llm.engine)
    assert [exact(o) for o in found] == [exact(o) for o in wanted]


def test_salts_that_leave_nothing_cached_are_not_remembered(tiny):
    with open_llm(tiny) as llm:
        for i in range(50):
            for length in (5, 40):
                params = greedy(2)
                llm.engine.add(
                    Request(id=f"{i}-{length}", prompt_ids=[7] * length, params=params, salt=f"{i}-{length}")
                )
        while llm.engine.has_work:
            llm.engine.step()
        roots = llm.engine.scheduler.tables.cache.roots
        assert set(roots) == {f"0\x00{i}-40" for i in range(50)}
        llm.engine.scheduler.tables.cache.clear()
        check_nothing_left(llm.engine)


BLOCKS, SIZE, PART = "--num-gpu-blocks-override", "--kv-cache-memory-bytes", "--gpu-memory-utilization"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_cache_memory_bytes": 1 << 20}, []),
        ({"num_gpu_blocks_override": 30}, []),
        ({"num_gpu_blocks_override": 30, "kv_cache_memory_bytes": 1 << 20}, [(BLOCKS, SIZE)]),
        ({"num_gpu_blocks_override": 30, "gpu_memory_utilization": 0.5}, [(BLOCKS, PART)]),
        ({"kv_cache_memory_bytes": 1 << 20, "gpu_memory_utilization": 0.5}, [(SIZE, PART)]),
        ({"gpu_memory_utilization": 0.5}, [(PART, SIZE)]),
    ],
)
def test_of_flags_of_memory_the_most_exact_counts_and_the_others_are_told(options, told):
    reasons: list[str] = []
    cache_bytes(make_config({}, **options), "cpu", 0, reasons)
    found = [[word for word in reason.replace(":", "").split() if word.startswith("--")] for reason in reasons]
    assert [tuple(words) for words in found if words] == told
