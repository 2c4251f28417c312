"""Models whose rows have states: what is kept of them serves others with the same beginning, and changes no byte."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cpu.engine.engines import exact, follow, greedy, ids, open_llm, run
from tests.cpu.models.families_helpers import CASES, prompt
from tests.cpu.models.parity import chosen, make

from tokenmill import LLM, SamplingParams
from tokenmill.compute.descriptors import StateSpec
from tokenmill.core.errors import UserError
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.engine.load import loading
from tokenmill.parallel.stages import Mesh


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("hybrid")
    model, _, _ = make(CASES["qwen3-next"].config, folder)
    return folder, model


def open_hybrid(folder: Path, **options: Any) -> LLM:
    return open_llm(folder, **{"skip_tokenizer_init": True, "max_model_len": 128, "block_size": 4, **options})


def test_says_what_transformers_says(hybrid: tuple[Path, Any]) -> None:
    folder, reference = hybrid
    tokens = prompt(30)
    with open_hybrid(folder) as llm:
        found = run(llm, [tokens], greedy(48))[0].outputs[0].token_ids
    assert found == chosen(reference, tokens, 48)


def test_states_may_be_kept_in_16_bits(hybrid: tuple[Path, Any]) -> None:
    prompts = [prompt(30), prompt(30)[:17], prompt(9)]
    found, memory = {}, {}
    for kept_as in ("auto", "float16", "bfloat16"):
        with open_hybrid(hybrid[0], kernels="reference", mamba_ssm_cache_dtype=kept_as) as llm:
            outs = run(llm, prompts * 2, SamplingParams(temperature=0, max_tokens=8, logprobs=1))
            found[kept_as] = [next(iter(step.values())).logprob for out in outs for step in out.outputs[0].logprobs]
            memory[kept_as] = sum(spec.size_bytes for spec in llm.engine.executor.runner.model.spec.states)
    assert memory["float16"] == memory["bfloat16"] < 0.75 * memory["auto"]  # convolutions keep theirs
    first = torch.tensor([found[name][::8] for name in ("auto", "float16", "bfloat16")])
    assert float((first[1] - first[0]).abs().max()) < 0.01 and float((first[2] - first[0]).abs().max()) < 0.1


def test_on_a_cpu_states_are_float32(hybrid: tuple[Path, Any]) -> None:
    with pytest.raises(UserError, match="--mamba-ssm-cache-dtype bfloat16: on a CPU states are float32"):
        open_hybrid(hybrid[0], kernels="auto", mamba_ssm_cache_dtype="bfloat16")
    for named in ("float16", "float32"):
        with pytest.raises(UserError, match=f"--mamba-ssm-cache-dtype {named}: no layer of this model has such states"):
            open_llm("demo", kernels="reference", mamba_ssm_cache_dtype=named)


def test_bytes_that_depend_on_cuts_are_not_deterministic(hybrid: tuple[Path, Any]) -> None:
    with pytest.raises(UserError, match="float16 rounds states where steps cut a prompt, which --deterministic"):
        open_hybrid(hybrid[0], kernels="reference", mamba_ssm_cache_dtype="float16", deterministic=True)


def test_a_stage_may_have_no_states() -> None:
    def stage(*kept: str) -> Any:
        states = [StateSpec((("bfloat16", (3, 8)), (each, (2, 4)))) for each in kept]
        return SimpleNamespace(spec=SimpleNamespace(states=states))

    for mine, others in ((1, 0), (0, 1)):
        mesh: Any = SimpleNamespace(agree=lambda values, others=others: [min(values[0], others)])
        loading._check_states("float16", stage(*["float16"] * (1 - mine)), mesh)
    with pytest.raises(UserError, match="no layer of this model has such states"):
        loading._check_states("float16", stage(), Mesh())


def test_steps_of_one_token_are_recorded(hybrid: tuple[Path, Any]) -> None:
    with open_hybrid(hybrid[0]) as llm:
        if not llm.engine.executor.runner.kernels.records:
            pytest.skip("no native module")
        run(llm, [prompt(9)], greedy(6))
        (steps,) = llm.engine.executor.runner.recorders
        assert steps.recordings.possible and steps.recordings.made


def counted(llm: LLM) -> tuple[int, int]:
    counters = llm.engine.scheduler.counters
    return counters.prompt_tokens, counters.cached_tokens


def test_a_shared_beginning_is_computed_twice_and_then_found(hybrid: tuple[Path, Any]) -> None:
    """The second request shows where prompts go different ways; from the third on, all of it is found."""
    folder, _ = hybrid
    stem = prompt(80, 3)
    prompts = [stem + prompt(6, 10 + i) for i in range(8)]
    with open_hybrid(folder, enable_prefix_caching=False) as plain:
        expected = ids(run(plain, prompts, greedy(8)))
    with open_hybrid(folder) as llm:
        for i, one in enumerate(prompts):
            assert ids(run(llm, [one], greedy(8))) == expected[i : i + 1]
        computed, cached = counted(llm)
        told = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        assert told["tokenmill:states_used"] == 6 and told["tokenmill:states_evicted"] == 0
        assert 0 < told["tokenmill:states_saved"] == told["tokenmill:kept_states"] < told["tokenmill:kept_state_slots"]
    assert cached == 6 * 80 and computed == 8 * 86 - cached


@pytest.mark.parametrize("budget", [2048, 100, 33], ids=["one step holds all", "one prompt fits", "prompts are cut"])
def test_prompts_that_arrive_together_compute_their_beginning_twice(hybrid: tuple[Path, Any], budget: int) -> None:
    """The second one shows where they part; those behind it wait for the state that it keeps there."""
    folder, _ = hybrid
    stem = prompt(80, 3)
    prompts = [stem + prompt(6, 10 + i) for i in range(12)]
    with open_hybrid(folder, enable_prefix_caching=False) as plain:
        expected = ids(run(plain, prompts, greedy(8)))
    with open_hybrid(folder, max_num_batched_tokens=budget, max_num_seqs=16) as llm:
        assert ids(run(llm, prompts, greedy(8))) == expected
        computed, cached = counted(llm)
        assert not llm.engine.scheduler.tables.snapshots.coming
    assert cached == 10 * 80 and computed == 12 * 86 - cached


def test_nobody_waits_for_a_row_that_has_left_or_may_come_later(hybrid: tuple[Path, Any]) -> None:
    folder, _ = hybrid
    stem = prompt(80, 3)
    with open_hybrid(folder, max_num_batched_tokens=40, max_num_seqs=16, scheduling_policy="priority") as llm:
        engine = llm.engine
        for i in range(6):  # the first one is behind all others, which must not wait for it
            engine.add(make_request(f"r{i}", None, stem + prompt(6, 10 + i), greedy(4), priority=9 if i == 0 else 1))
        ended, steps = set(), 0
        while engine.has_work:
            steps += 1
            if steps == 4:
                engine.abort("r1")
            ended |= {delta.request_id for delta in engine.step() if delta.finish}
        assert ended >= {"r0", "r2", "r3", "r4", "r5"} and steps < 100
        assert not engine.scheduler.tables.snapshots.coming


def test_a_chat_computes_what_is_new(hybrid: tuple[Path, Any]) -> None:
    folder, _ = hybrid
    rng, said = random.Random(1), prompt(20, 5)
    with open_hybrid(folder) as llm:
        for _ in range(12):
            before = counted(llm)[0]
            answer = run(llm, [said], greedy(4))[0].outputs[0].token_ids
            assert counted(llm)[0] - before <= 4 + 3 + 4 + 20 * (before == 0)  # a turn, and what fills no block
            said += [*answer, *(rng.randrange(67) for _ in range(3))]


KINDS = (
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, max_tokens=16, seed=3, n=3, logprobs=1),
    SamplingParams(use_beam_search=True, n=3, max_tokens=9, temperature=0.0),
    SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1),
)


@pytest.mark.parametrize("seed", range(2))
def test_company_preemption_and_kept_states_change_nothing(seed: int, hybrid: tuple[Path, Any]) -> None:
    folder, _ = hybrid
    rng = random.Random(seed)
    stems = [prompt(rng.randrange(5, 50), 20 + i) for i in range(2)]
    requests = []
    for i in range(10):
        tokens = rng.choice(stems) + prompt(rng.randrange(1, 9), 40 + i)
        requests.append(make_request(f"r{i}", None, tokens, rng.choice(KINDS)))
    expected = {}
    with open_hybrid(folder, enable_prefix_caching=False, max_num_seqs=4, enforce_eager=True) as plain:
        for request in requests:
            expected[request.id] = exact(follow(plain, [request], None)[request.id])
    tight = {"num_gpu_blocks_override": 40} if seed % 2 else {"kv_cache_memory_bytes": rng.choice([1 << 18, 1 << 22])}
    options = {"max_num_seqs": 3 + seed, "max_num_batched_tokens": rng.choice([9, 33, 300]), **tight}
    with open_hybrid(
        folder, pipeline_depth=1 + seed % 3, executor="process" if seed == 3 else "inprocess", **options
    ) as llm:
        found = follow(llm, requests, rng)
        assert not seed % 2 or llm.engine.scheduler.counters.preemptions
    assert {name: exact(output) for name, output in found.items()} == expected


def test_rows_follow_the_memory_of_states(hybrid: tuple[Path, Any]) -> None:
    folder, _ = hybrid
    with open_hybrid(folder, kv_cache_memory_bytes=1 << 17, max_num_seqs=256) as llm:
        rows = llm.engine.scheduler.limits.max_rows
        assert 1 <= rows < 64 and any("states take" in reason for reason in llm.built.facts.reasons)
        prompts = [prompt(9, i) for i in range(80)]
        assert len(run(llm, prompts, greedy(3))) == 80
