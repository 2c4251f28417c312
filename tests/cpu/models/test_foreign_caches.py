"""Families that keep Transformers' own caches: what sequences share, and when a cache may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.models.families_helpers import prompt
from tests.cpu.models.foreign_configs import tiny
from tests.cpu.models.parity import DictCheckpoint, chosen, make

from tokenmill import LLM, BeamSearchParams, SamplingParams
from tokenmill.compute.forward import ForwardContext, StepRows
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.foreign_caches import Held, _bytes
from tokenmill.models.registry import build_elsewhere

KINDS = {
    "diffllama": "keeps its own cache", "deepseek_v4": "keeps its own cache", "zamba": "keeps its own cache",
    "bart": "computes every sequence anew", "openai-gpt": "computes every sequence anew",
}  # fmt: skip
PROMPTS = [prompt(40), prompt(40) + prompt(3, 5), prompt(9, 2), prompt(60, 3), prompt(1, 4)]
TOKENS = 12
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7},
    "few rows": {"max_num_seqs": 2},
    "preemption": {"num_gpu_blocks_override": 8},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def served(folder: Path, **options: Any) -> LLM:
    return LLM(
        model=str(folder), skip_tokenizer_init=True, max_model_len=100, device="cpu", model_impl="transformers",
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_serving_gives_the_same(kind: str, tmp_path: Path) -> None:
    reference, _, _ = make(tiny(kind), tmp_path)
    expected = [chosen(reference, asked, TOKENS) for asked in PROMPTS]
    asked: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=TOKENS, ignore_eos=True)
    draws = []
    for name, options in WAYS.items():
        with served(tmp_path, **options) as llm:
            assert any(KINDS[kind] in reason for reason in llm.built.facts.reasons)
            for _ in range(2):
                found = llm.generate(asked, greedy, use_tqdm=False)
                assert [list(each.outputs[0].token_ids) for each in found] == expected, name
            draws.append([list(each.token_ids) for each in llm.generate(asked[:1], drawn, use_tqdm=False)[0].outputs])
            if name == "preemption":
                assert llm.engine.scheduler.counters.preemptions
    assert all(each == draws[0] for each in draws) and len(set(map(tuple, draws[0]))) > 1


def test_beams_go_on_from_copies(tmp_path: Path) -> None:
    """The best of one beam is the greedy answer, and beams do not write into one another's caches."""
    reference, _, _ = make(tiny("diffllama"), tmp_path)
    asked: list[Any] = [{"prompt_token_ids": PROMPTS[2]}]
    with served(tmp_path) as llm:
        one, three = (
            llm.beam_search(asked, BeamSearchParams(beam_width=width, max_tokens=TOKENS, ignore_eos=True))[0].sequences
            for width in (1, 3)
        )
        assert list(one[0].tokens)[-TOKENS:] == chosen(reference, PROMPTS[2], TOKENS)
        for beam in three:
            ids = list(beam.tokens)
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            scored = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].prompt_logprobs
            assert scored is not None
            total = sum(each[token].logprob for each, token in zip(scored, ids, strict=True) if each is not None)
            before = sum(
                each[token].logprob
                for each, token in zip(scored[: len(PROMPTS[2])], PROMPTS[2], strict=True)
                if each is not None
            )
            assert abs(total - before - beam.cum_logprob) < 1e-3


def step(rows: list[int], counts: list[int], at: list[int], states: torch.Tensor, left: Any = None) -> ForwardContext:
    borders = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(a, a + n) for a, n in zip(at, counts, strict=True)])
    owners = torch.tensor([row for row, n in zip(rows, counts, strict=True) for _ in range(n)])
    placed = StepRows(torch.tensor(rows), owners, [(states,)], left=None if left is None else torch.tensor(left))
    ends = torch.tensor([a + n for a, n in zip(at, counts, strict=True)], dtype=torch.int32)
    return ForwardContext(ReferenceKernels(), positions, borders, ends, max(counts), [], [], placed)


@torch.inference_mode()
def test_caches_are_copied_before_they_change_and_dropped_when_nobody_names_them(tmp_path: Path) -> None:
    _, said, tensors = make(tiny("diffllama"), tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kernels": ReferenceKernels()}
    model: Any = build_elsewhere(said, DictCheckpoint(tensors), **options)
    states, ids = torch.zeros(6, 4), torch.tensor(prompt(20))
    whole = model.forward(ids, step([0], [20], [0], states))
    model.forward(ids[:8], step([1], [8], [0], states))
    states[2] = states[1]  # a fork
    one = model.forward(ids[8:12], step([1], [4], [8], states))
    two = model.forward(ids[8:20], step([2], [12], [8], states))
    assert torch.allclose(one, whole[8:12], atol=1e-5) and torch.allclose(two, whole[8:], atol=1e-5)
    drafts = step([1], [3], [12], states, left=[3, 4, 1])  # the states behind drafts stay beside the row's
    model.forward(ids[12:15], drafts)
    states[1] = states[3]  # back to the first of them
    assert torch.allclose(model.forward(ids[13:20], step([1], [7], [13], states)), whole[13:], atol=1e-5)
    with pytest.raises(RuntimeError, match="has seen 20 tokens"):
        model.forward(ids[:1], step([2], [1], [5], states))
    states[:] = 0
    model.forward(ids[:2], step([0], [2], [0], states))
    assert len(model.caches) == 1


def test_rows_that_end_let_go_of_their_caches(tmp_path: Path) -> None:
    make(tiny("diffllama"), tmp_path)
    asked: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with served(tmp_path) as llm:
        llm.generate(asked, greedy, use_tqdm=False)
        llm.generate(asked[:1], greedy, use_tqdm=False)
        assert len(llm.engine.executor.runner.model.caches) <= 2 < len(asked)


@pytest.mark.parametrize(("kind", "starts"), [("zamba", True), ("diffllama", False)])
def test_what_a_cache_has_whatever_its_length_counts_for_rows(kind: str, starts: bool, tmp_path: Path) -> None:
    _, said, tensors = make(tiny(kind), tmp_path)
    model: Any = build_elsewhere(said, DictCheckpoint(tensors), dtype=torch.float32, device="cpu",
                                 kernels=ReferenceKernels())  # fmt: skip
    sizes = []
    with torch.inference_mode():
        for count in (20, 90):
            held = model.run(torch.tensor(prompt(count)), model.run(torch.tensor([1]), Held(None, 0))[1])[1]
            sizes.append(_bytes(held.cache))
    each, start = model.spec.extras["own_caches"], model.spec.extras["own_cache_start"]
    assert (start > 1000) == starts
    for count, size in zip((21, 91), sizes, strict=True):
        assert abs(each * count + start - size) < 0.05 * size
    with served(tmp_path, kv_cache_memory_bytes=1 << 20) as llm:
        rows = llm.built.facts.max_rows
        assert rows * start <= 1 << 20 and (rows < 256) == starts
