"""Switches compose: whatever combination of them an engine is opened with, a request says what it says without them.

Each run draws a model, how it computes (types, quantisation, K/V format, kernels), every other option of the engine,
a way to drive it and some requests of all kinds. What computes otherwise may change bytes, so each such choice has its
own plain engine: one request at a time, no cache, no drafts, nothing recorded. Everything else must change nothing, not
even the last bit of a log-probability; or it is refused by a UserError that is known here.

A run is one number. TOKENMILL_SWITCH_RUNS=300 tries so many, from TOKENMILL_SWITCH_SEED on; a failure tells its number.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, follow
from tests.cpu.models.families_helpers import CASES
from tests.cpu.models.family_cases import ALL as LATER
from tests.cpu.models.parity import make

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.core.config import GROUPS, all_options
from tokenmill.core.errors import UserError
from tokenmill.core.request import Request, RequestOutput
from tokenmill.demo import demo_dir
from tokenmill.engine.interfaces.prompts import make_request

RUNS = int(os.environ.get("TOKENMILL_SWITCH_RUNS", "10"))
FIRST = int(os.environ.get("TOKENMILL_SWITCH_SEED", "1"))
LONGEST = 120
BATCHES = 5
"""Tests among which the runs are shared out, so that several processes can take part."""

MODELS = ("demo",) * 4 + ("moe", "gemma3", "gpt-oss", "deepseek-v2", "mixtral", "qwen3-next", "gemma3n-0")
COMPUTES: dict[str, tuple[Any, ...]] = {
    "dtype": ("auto", "auto", "float32", "bfloat16"),
    "quantization": (None, None, "int8", "int4", "fp8", "int4-g64", "w4a8", "int8,head=none"),
    "kv_cache_dtype": ("auto", "auto", "float32", "bfloat16", "fp8", "int8", "int4", "int4-fp8k"),
    "kv_cache_group": (0, 0, 0, 8),
    "kernels": ("auto", "auto", "auto", "reference"),
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CHANGES_NOTHING: dict[str, tuple[Any, ...]] = {
    "enable_prefix_caching": (True, True, False),
    "block_size": (16, 1, 4, 8, 32, 64, 256),
    "max_num_batched_tokens": (None, 9, 17, 64, 300),
    "long_prefill_token_threshold": (0, 0, 1, 7, 33),
    "enable_chunked_prefill": (True, True, False),
    "batching": ("continuous", "continuous", "static"),
    "scheduling_policy": ("fcfs", "priority"),
    "max_num_seqs": (256, 8, 5, 3),
    "executor": ("inprocess",) * 9 + ("process",),
    "pipeline_depth": (None, 1, 2, 3),
    "threads": (None, 1, 2, 3),
    "enforce_eager": (False, True),
    "deterministic": (False, True),
    "check_weights": (False, False, True),
    "pruned_weights": ("auto", "auto", "dense", "packed"),
    "enable_sleep_mode": (False, False, True),
    "check_structured": (0.0, 1.0),
    "speculative_config": (None, None, DRAFTS, {"method": "ngram"}, {**DRAFTS, "num_speculative_tokens": 16},
                           {"method": "suffix"}),
    "enable_lora": (False, False, True),
    "max_loras": (8, 1),
}  # fmt: skip
MEDUSA = {"method": "medusa", "model": str(demo_dir("medusa"))}
OF_THE_DEMO = ({"model": str(demo_dir("draft")), "num_speculative_tokens": 3},
               {**MEDUSA, "num_speculative_tokens": 3},
               {**MEDUSA, "num_speculative_tokens": 12, "speculative_token_tree": "best"})  # fmt: skip
"""Drafters that were made for one of the models."""
ELSEWHERE = {
    *("model", "tokenizer", "load_format", "revision", "hf_overrides", "seed", "served_model_name"),  # what, not how
    *("skip_tokenizer_init", "max_model_len", "num_gpu_blocks_override", "max_waiting"),  # each run sets them
    *("kv_cache_memory_bytes", "gpu_memory_utilization", "device", "disable"),  # how much, where; a GPU's
    *("mamba_ssm_cache_dtype",),  # a GPU's, and hybrids'
    *("compile_ahead", "kernel_search", "kernel_search_seconds"),  # a GPU's, too
    *("trust_remote_code", "disable_log_stats"),  # do nothing
    *("tokenizer_revision", "download_dir", "hf_token", "stored_as", "sleep_folder"),  # where files are
    *("generation_config", "override_generation_config"),  # defaults of requests
    *("model_impl", "lora_modules", "max_lora_rank", "max_cpu_loras"),  # what is loaded
    *("tensor_parallel_size", "data_parallel_size"),  # processes of their own (test_engine_ranks.py)
    *("pipeline_parallel_size", "enable_expert_parallel"),  # the same (test_engine_stages.py)
    *("enable_eplb", "eplb_config"),  # the same (test_engine_experts.py)
}
"""Options that are not drawn."""

REFUSALS = (
    "--kv-cache-group needs --kv-cache-dtype",
    "one engine of one rank",
    "multiplies matrices with their zeros",
)
"""How combinations that exclude each other are told."""


def test_every_option_is_drawn_or_said_not_to_be() -> None:
    assert set(all_options(GROUPS)) == {*COMPUTES, *CHANGES_NOTHING, *ELSEWHERE}


# ------------------------------------------------------------------ what is asked

TEXTS = (
    "Once upon a time there was a mill",
    "The capital of France is",
    "What is 12 + 30? What is 12 + 30? What is 12 + 30?",
    "The cat sat on the mat. The cat sat on the mat. The cat",
)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"prompt_logprobs": 2, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 4},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "n": 3, "seed": 8, "logprobs": 1},
    {"temperature": 1.0, "n": 1, "best_of": 3, "seed": 8},
    {"use_beam_search": True, "n": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0, 40: -100.0}, "min_tokens": 5, "ignore_eos": False},
    {"allowed_token_ids": list(range(5, 60)), "typical_p": 0.9, "temperature": 0.7, "seed": 3},
    {"stop_token_ids": list(range(30, 50))},
    {"truncate_prompt_tokens": 4},
    {"stop": ["e", " t"], "min_tokens": 4},
    {"bad_words": ["the", "mill"]},
    {"structured_outputs": {"choice": ["yes, of course", "no, never"]}, "logprobs": 1},
    {"structured_outputs": {"regex": "[0-9]{2}( [a-z]{3}){2}"}, "temperature": 0.9, "seed": 5, "n": 2},
    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}}}},
    {"temperature": 0.9, "mirostat": 2, "mirostat_tau": 3.0, "seed": 6, "n": 2, "logprobs": 1},
    {"temperature": 1.0, "dry_multiplier": 0.9, "dry_allowed_length": 1, "dry_penalty_last_n": 30, "seed": 2},
    {"temperature": 1.1, "xtc_probability": 0.6, "xtc_threshold": 0.02, "top_n_sigma": 1.5, "seed": 9},
    {"repetition_penalty": 1.3, "repeat_last_n": 5, "no_repeat_ngram_size": 3},
    {"logits_processors": [lambda said, x: x + (len(said) % 3 == 0) * 0.5 * (x == x[said[-1:] or [0]])]},
)
NEEDS_TEXT = {"stop", "bad_words", "structured_outputs"}


@cache
def pool(vocab: int, readable: bool) -> list[Request]:
    """All requests that a model of this vocabulary may get; some share a beginning."""
    rng = random.Random(vocab)
    prompts = [[rng.randrange(vocab) for _ in range(n)] for n in (1, 2, 17, 40, 70)]
    prompts += [prompts[3][:33] + [rng.randrange(vocab) for _ in range(n)] for n in (1, 30)]
    prompts += [(prompts[2][:6] * 9)[:50]]
    made = []
    for i, prompt in enumerate(prompts):
        for j, kind in enumerate(KINDS):
            if not readable and NEEDS_TEXT & set(kind):
                continue
            most = rng.choice((1, 2, 9, 24, 40))
            more = {"temperature": 0.0, "ignore_eos": rng.random() < 0.7, "max_tokens": max(most, 6), **kind}
            if "structured_outputs" in kind:
                more["max_tokens"] = 40
            made.append(make_request(f"{i}.{j}", None, prompt, SamplingParams(**more), priority=rng.randrange(3)))
    return made


# ------------------------------------------------------------------ models, and what they say when nothing is on


class Model:
    """A model folder and what it says, request by request, for each way to compute."""

    def __init__(self, name: str, folder: Path) -> None:
        self.readable = name in ("demo", "moe")
        if self.readable:
            self.folder = demo_dir("main" if name == "demo" else name)
        else:
            self.folder = folder
            make({**LATER, **CASES}[name].config, folder)
        self.said: dict[str, dict[str, Any]] = {}
        with LLM(**self.options({"kv_cache_memory_bytes": 1 << 22, "max_num_seqs": 1})) as llm:
            facts = llm.built.facts
        pools = [group[0] for group in facts.groups]
        self.groups = max(pools.count(p) for p in pools)
        self.requests = pool(facts.vocab_size, self.readable)

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"model": str(self.folder), "max_model_len": LONGEST, "skip_tokenizer_init": not self.readable, **given}

    def alone(self, computes: dict[str, Any], requests: list[Request]) -> list[Any]:
        """What each request says by itself in a plain engine that computes so."""
        known = self.said.setdefault(repr(computes), {})
        new = [request for request in requests if request.id not in known]
        if new:
            plain = {"enable_prefix_caching": False, "enforce_eager": True, "pipeline_depth": 1}
            with LLM(**self.options({**computes, **plain, "kv_cache_memory_bytes": 1 << 24, "max_num_seqs": 4})) as llm:
                for request in new:
                    known[request.id] = exact(follow(llm, [request], None)[request.id])
        return [known[request.id] for request in requests]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: Model(name, tmp_path_factory.mktemp(name)))


# ------------------------------------------------------------------ runs


def draw(rng: random.Random, table: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in table.items()}


def tight(options: dict[str, Any], groups: int, rng: random.Random) -> dict[str, Any]:
    """Room for one longest sequence and a little, so that sequences are preempted; or enough."""
    if rng.random() < 0.5:
        return {"kv_cache_memory_bytes": 1 << 25}
    return {"num_gpu_blocks_override": groups * (-(-LONGEST // options["block_size"]) + rng.choice((2, 5, 9)))}


async def streamed(llm: AsyncLLM, requests: list[Request], seed: int) -> dict[str, RequestOutput]:
    """All requests at once through AsyncLLM, among others that are left in the middle."""

    async def one(request: Request) -> RequestOutput:
        outputs = [output async for output in llm._follow(request)]
        return outputs[-1]

    async def leave(request: Request) -> None:
        steps = random.Random(request.id).randrange(4)
        async for _ in llm._follow(request):
            if steps == 0:
                return
            steps -= 1

    others = []
    for request in requests[::2]:
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        others.append(make_request(f"left.{request.id}", None, request.prompt_ids, params))
    found = await asyncio.gather(*(one(r) for r in requests), *(leave(r) for r in others))
    while await llm.service.call(lambda: llm.service.engine.has_work):  # what was left may still be in flight
        await asyncio.sleep(0)
    await llm.service.call(lambda: check_nothing_left(llm.service.engine))
    return {request.id: output for request, output in zip(requests, found, strict=False)}


def try_one(number: int, models: Any) -> str:
    """One run; -> what came of it, "" when all was well or a combination was refused in known words."""
    rng = random.Random(number)
    model = models(rng.choice(MODELS))
    computes, options = draw(rng, COMPUTES), draw(rng, CHANGES_NOTHING)
    if not options["enable_lora"]:
        del options["max_loras"]
    if not options["enable_chunked_prefill"]:
        del options["long_prefill_token_threshold"]
    if options["check_structured"] and not model.readable:
        del options["check_structured"]
    if model.folder == demo_dir("main") and rng.random() < 0.5:
        options["speculative_config"] = rng.choice(OF_THE_DEMO)
    if model.readable:  # plain torch is too slow for these
        computes |= {"kernels": "auto", "quantization": rng.choice((None, "int8", "int4"))}
    way = rng.choice(("at once", "arriving", "arriving", "streamed"))
    try:
        requests = rng.sample(model.requests, rng.randint(1, 12))
        if options["executor"] == "process":
            requests = [r for r in requests if not r.params.logits_processors]
        expected = model.alone(computes, requests)
        room = tight(options, model.groups, rng)
        given = model.options({**computes, **options, **room})
        if way == "streamed":
            streams = AsyncLLM(**given)
            try:
                found = asyncio.run(streamed(streams, requests, number))
            finally:
                streams.close()
        else:
            with LLM(**given) as llm:
                found = follow(llm, requests, rng if way == "arriving" else None)
                if options["enable_sleep_mode"]:  # what it says before counts as well
                    early = [r.id for r, want in zip(requests, expected, strict=True) if exact(found[r.id]) != want]
                    assert not early, f"other output of {early} before sleep: {given}"
                    llm.sleep(rng.choice((1, 2)))
                    llm.wake_up()
                    found = follow(llm, requests, None)
                check_nothing_left(llm.engine)
    except UserError as error:
        return "" if any(words in str(error) for words in REFUSALS) else f"refused: {error}"
    wrong = [r.id for r, want in zip(requests, expected, strict=True) if exact(found[r.id]) != want]
    return f"{way}, other output of {wrong}: {given}" if wrong else ""


@pytest.mark.parametrize("batch", range(BATCHES))
def test_switches_change_nothing(batch: int, models: Any) -> None:
    told = []
    for number in range(FIRST + batch, FIRST + RUNS, BATCHES):
        try:
            problem = try_one(number, models)
        except Exception as error:
            raise AssertionError(f"run {number} of the switches: {type(error).__name__}: {error}") from error
        if problem:
            told.append(f"run {number}: {problem}")
    assert not told, "\n".join(told)
