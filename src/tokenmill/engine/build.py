"""Config becomes objects, only here. Owns: every choice that a flag makes, with its reason.

`load_runner` runs where the model lives (this process or a worker); `build_engine` wires the loop around it.
"""

from __future__ import annotations

import logging
import os
import pathlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch

from tokenmill.checkpoint.checked import CheckedCheckpoint
from tokenmill.core.config import CacheOptions, EngineConfig, ScheduleOptions, SpeculateOptions
from tokenmill.core.drafting import DeviceDrafter
from tokenmill.core.errors import ModelError, ParameterError, UserError
from tokenmill.core.execution import Executor
from tokenmill.core.forward import Kernels, KVFormat
from tokenmill.core.model import CausalLM
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.device.memory import describe, free_bytes, growth_bytes, pick_device, release, total_bytes
from tokenmill.engine.admission import Admission
from tokenmill.engine.engine import Engine
from tokenmill.engine.executor import InProcessExecutor
from tokenmill.engine.generation import banned, check_generation
from tokenmill.engine.source import ModelSource, find_source
from tokenmill.engine.workers import ProcessExecutor, start_worker
from tokenmill.kernels import OPTIONAL, ReferenceKernels, make_kernels
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.pool import CacheLayout, KVPool, buy_blocks, make_layout
from tokenmill.models.registry import build_model, check_keys, check_length
from tokenmill.runner.peak import peak_plan
from tokenmill.runner.runner import Runner
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.speculate.lookup import NgramLookup
from tokenmill.speculate.ngram import NgramDrafter
from tokenmill.speculate.none import NoDrafter
from tokenmill.structured.compile import Compiler
from tokenmill.structured.together import MaskPool
from tokenmill.structured.vocabulary import Vocabulary
from tokenmill.text.tokenizer import Tokenizer

log = logging.getLogger("tokenmill.engine")
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
IMPORTED_IN = os.getpid()
"""In a fork of this process the threads of torch's own operations do not exist, and it would wait for them forever."""
CPU_CACHE_BYTES = 2 << 30
MAX_DRAFTS = 16
STEP_GUESSES = 256
"""Drafts of the device in one step: about as many tokens as a GPU computes while it reads the weights. More of them,
of which some are wrong, would take the time of tokens that are certain."""
SHORT_STEPS = (4, 8, 16, 32, 64, 256, 2400, 3000)
"""Tokens of steps that run once while loading on a GPU: of two rows, half as many and one."""
GRAPH_BYTES = 1 << 30
"""Left for recorded steps, which keep their temporary tensors, and for what libraries take on first use."""


class Facts(msgspec.Struct):
    """What the engine must know of a loaded model; crosses from a worker."""

    vocab_size: int
    max_model_len: int
    max_step_tokens: int
    groups: list[tuple[int, int]]
    num_blocks: list[int]
    device: str
    dtype: str
    weight_bytes: int
    flops_per_token: float
    reasons: list[str]
    device_name: str = ""
    kv_block_bytes: float = 0.0
    family: str = ""
    quantization: str = ""


@dataclass(slots=True)
class Built:
    """An engine with what its callers need around it."""

    engine: Engine
    facts: Facts
    config: EngineConfig
    model_dir: pathlib.Path
    tokenizer: Tokenizer | None
    generation: dict[str, Any]


def make_limits(
    options: ScheduleOptions, step_tokens: int, max_drafts: int = 0, max_guesses: int = 0, *, chains: bool = True
) -> Limits:
    """What the scheduler may do; max_drafts, max_guesses: of the host's and of the device's drafter."""
    return Limits(
        max_rows=options.max_num_seqs,
        max_step_tokens=step_tokens,
        max_chunk=options.long_prefill_token_threshold,
        max_drafts=max_drafts,
        max_guesses=max_guesses,
        step_guesses=STEP_GUESSES,
        chains=chains,
        whole_prompts=not options.enable_chunked_prefill,
        whole_batches=options.batching == "static",
    )


def find_model(config: EngineConfig) -> ModelSource:
    """Where the model comes from."""
    return find_source(config.model.model, config.model.revision)


def read_config(config: EngineConfig, source: ModelSource) -> dict[str, Any]:
    """What config.json says, with --hf-overrides; refuses a length that the model does not reach."""
    raw = {**source.config(), **(config.model.hf_overrides or {})}
    check_length(raw, config.model.max_model_len)
    check_keys(raw)
    return raw


def load_runner(config: EngineConfig, source: ModelSource | None = None) -> tuple[Runner, dict[str, Any]]:
    """Load the model and its cache onto the device; -> runner and Facts as plain data."""
    reasons: list[str] = []
    device = pick_device(config.execute.device)
    if os.getpid() != IMPORTED_IN:
        torch.set_num_threads(1)
    elif config.execute.threads:
        torch.set_num_threads(config.execute.threads)
    source = source or find_model(config)
    raw = read_config(config, source)
    dtype = compute_dtype(config.model.dtype, raw, device, reasons)
    kernels = _kernels(config, device)
    raw_checkpoint = source.checkpoint(config.model.load_format, seed=config.model.seed, device=device)
    checkpoint = CheckedCheckpoint(raw_checkpoint, thorough=config.execute.check_weights)
    try:
        model = build_model(
            raw,
            checkpoint,
            dtype=dtype,
            device=device,
            kernels=kernels,
            quantization=config.model.quantization,
            max_positions=config.model.max_model_len,
        )
        if damaged := checkpoint.damaged():
            more = f" (and {len(damaged) - 3} more)" if len(damaged) > 3 else ""
            said = f"the file is damaged: {', '.join(damaged[:3])}{more} holds NaN or infinity"
            if config.execute.check_weights:
                raise ModelError(f"{source.path}: {said} (--check-weights).")
            reasons.append(said)
    finally:
        checkpoint.close()
    if changed := model.spec.extras.get("changed"):
        reasons.append(f"{', '.join(changed)} weights are held as int8: no kernel reads them as stored")  # type: ignore[arg-type]
    layout = make_layout(model.spec.kv_specs, config.cache.block_size, kv_format(config.cache, dtype))
    step_tokens = config.schedule.max_num_batched_tokens or (2048 if device == "cpu" else 8192)
    wanted = min(config.model.max_model_len or model.spec.max_positions, model.spec.max_positions)
    if not config.schedule.enable_chunked_prefill:
        step_tokens = max(step_tokens, wanted)
    peak = 0
    if device.startswith("cuda"):
        peak = _peak_step_bytes(config, (model, kernels, layout), device, min(wanted, step_tokens), step_tokens)
    release(device)
    blocks = _num_blocks(config, layout, device, wanted, step_tokens, peak, reasons)
    max_len = _max_model_len(config, layout, blocks, wanted, reasons)
    pool = KVPool(layout, blocks, device)
    record = not config.execute.enforce_eager and (kernels.records or device.startswith("cuda"))
    drafter = _device_drafter(config, device)
    runner = Runner(model, kernels, pool, config.schedule.max_num_seqs, max_len, record=record, drafter=drafter)
    runner.warm()
    facts = Facts(
        vocab_size=model.spec.vocab_size,
        max_model_len=max_len,
        max_step_tokens=step_tokens,
        groups=[(g.pool, g.window) for g in layout.groups],
        num_blocks=blocks,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=int(model.spec.extras.get("weight_bytes", 0)),  # type: ignore[call-overload]
        flops_per_token=model.spec.flops_per_token,
        family=str(raw.get("model_type", "")),
        quantization=config.model.quantization or "",
        reasons=reasons,
        device_name=describe(device),
        kv_block_bytes=sum(part.nbytes for part in pool.storage) / max(1, sum(blocks)),
    )
    return runner, msgspec.to_builtins(facts)


def _kernels(config: EngineConfig, device: str) -> Kernels:
    execute = config.execute
    without = [part.strip() for part in (execute.disable or "").split(",") if part.strip()]
    if unknown := set(without) - set(OPTIONAL):
        raise ParameterError(
            f"--disable {', '.join(sorted(unknown))}: what can be left out is {', '.join(OPTIONAL)}.", param="disable"
        )
    if execute.kernels == "reference":
        if execute.deterministic and device != "cpu":
            raise ParameterError(
                "--deterministic on a GPU needs its own kernels: leave --kernels reference out.", param="deterministic"
            )
        return ReferenceKernels()
    return make_kernels(device, steady=execute.deterministic, without=without)


def build_engine(config: EngineConfig) -> Built:
    """Everything between a request and its token deltas."""
    source = find_model(config)
    read_config(config, source)  # what is wrong with it is told before the tokenizer is looked for
    ngram = read_ngram(config.speculate)
    drafter, most = (NgramDrafter(ngram.longest, ngram.shortest), ngram.most) if ngram else (NoDrafter(), 0)
    tokenizer = _tokenizer(config, source)
    generation = source.generation()
    for said in check_generation(generation, f"{source.path}/generation_config.json"):
        log.warning("%s", said)
    executor, facts = _executor(config, source)
    on_device = _device_drafter(config, facts.device) is not None
    tables = BlockTables(
        [GroupLayout(*g) for g in facts.groups],
        facts.num_blocks,
        config.cache.block_size,
        prefix_cache=config.cache.enable_prefix_caching,
    )
    limits = make_limits(config.schedule, facts.max_step_tokens, most, most if on_device else 0, chains=executor.chains)
    scheduler = Scheduler(limits, tables, make_policy(config.schedule.scheduling_policy), drafter)
    never = banned(generation)
    if outside := [word for word in never if max(word) >= facts.vocab_size]:
        raise ModelError(
            f"{source.path}/generation_config.json: suppress_tokens or bad_words_ids name {outside[0]}, outside the "
            f"vocabulary of {facts.vocab_size}."
        )
    admission = Admission(
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        max_rows=config.schedule.max_num_seqs,
        max_waiting=config.schedule.max_waiting,
        eos_ids=_eos_ids(source.config(), generation, tokenizer),
        in_process=config.execute.executor == "inprocess",
        banned=never,
    )
    masks = MaskPool()
    if tokenizer is not None:
        _give_text(admission, tokenizer, config.execute.check_structured)
    return Built(Engine(scheduler, executor, admission, masks.fill), facts, config, source.path, tokenizer, generation)


def _executor(config: EngineConfig, source: ModelSource) -> tuple[Executor, Facts]:
    if config.execute.executor == "process":
        process, pipe, plain = start_worker(load_runner, config)
        facts = msgspec.convert(plain, Facts)
        return ProcessExecutor(process, pipe, facts.num_blocks, plans_in_flight(config, facts.device)), facts
    runner, plain = load_runner(config, source)
    facts = msgspec.convert(plain, Facts)
    depth = plans_in_flight(config, facts.device)
    return InProcessExecutor(runner, facts.num_blocks, depth, lazy=facts.device == "cpu"), facts


def plans_in_flight(config: EngineConfig, device: str) -> int:
    """Two, so that the host plans while the device computes; one where the host is the device."""
    alone = device == "cpu" and config.execute.executor == "inprocess"
    return config.execute.pipeline_depth or (1 if alone else 2)


def _tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer | None:
    if config.model.skip_tokenizer_init:
        return None
    if config.model.tokenizer is not None:
        return find_source(config.model.tokenizer).tokenizer()
    if config.model.load_format == "dummy":
        try:
            return source.tokenizer()
        except ModelError:
            return None  # a config alone: token ids in and out
    return source.tokenizer()


def _give_text(admission: Admission, tokenizer: Tokenizer, check: float) -> None:
    """What needs the vocabulary: bad words, and constraints (whose table is made when first asked for)."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, allow_special=False)

    def vocabulary() -> Vocabulary:
        size = min(admission.vocab_size, tokenizer.vocab_size)
        texts = [tokenizer.token_bytes(i) for i in range(size)]
        marks = {i for i in tokenizer.special_ids | tokenizer.control_ids if i < size}  # only grammars name them
        return Vocabulary.of(texts, marks, tuple(admission.eos_ids), tokenizer.encode_inside)

    admission.encode = encode
    admission.compiler = Compiler(vocabulary, check)


def compute_dtype(wanted: str, raw: dict[str, Any], device: str, reasons: list[str]) -> torch.dtype:
    """The type to compute in: what was asked for, else what the config says; `reasons` grows where that is changed."""
    if wanted != "auto":
        return DTYPES[wanted]
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else {}
    named = raw.get("dtype") or raw.get("torch_dtype") or (text or {}).get("dtype") or "float32"
    dtype = DTYPES.get(str(named).removeprefix("torch."), torch.float32)
    if dtype == torch.float16 and device == "cpu":
        reasons.append("float32 instead of float16: CPUs compute float16 slowly")
        return torch.float32
    return dtype


def kv_format(options: CacheOptions, dtype: torch.dtype) -> KVFormat:
    """How K/V are stored when the model computes in `dtype`."""
    named = {"auto": str(dtype).removeprefix("torch."), "fp8": "float8_e4m3fn"}
    found = KVFormat(named.get(options.kv_cache_dtype, options.kv_cache_dtype))
    if not options.kv_cache_group:
        return found
    if not found.scaled or options.kv_cache_group < 0:
        raise ParameterError("--kv-cache-group needs --kv-cache-dtype fp8 or int8.", param="kv_cache_group")
    return KVFormat(found.dtype, options.kv_cache_group)


def _num_blocks(
    config: EngineConfig,
    layout: CacheLayout,
    device: str,
    max_len: int,
    step_tokens: int,
    peak: int,
    reasons: list[str],
) -> list[int]:
    if config.cache.num_gpu_blocks_override is not None:
        return [config.cache.num_gpu_blocks_override] * len(layout.page_bytes)
    budget = config.cache.kv_cache_memory_bytes
    if budget is None:
        free = free_bytes(device)
        if device == "cpu":
            budget = min(CPU_CACHE_BYTES, free // 2)
            reasons.append(f"K/V cache of {budget >> 20} MiB: half of the free memory, at most 2 GiB")
        else:
            used = total_bytes(device) - free
            budget = int(total_bytes(device) * config.cache.gpu_memory_utilization) - used - peak - GRAPH_BYTES
            reasons.append(f"K/V cache of {budget >> 20} MiB: a full step was measured to need {peak >> 20} MiB")
    blocks = buy_blocks(layout, budget, max_len, step_tokens)
    most = config.schedule.max_num_seqs * (-(-max_len // layout.block_size) + 1) * len(layout.groups)
    return [min(n, most) for n in blocks]


def _peak_step_bytes(
    config: EngineConfig,
    made: tuple[CausalLM, Kernels, CacheLayout],
    device: str,
    max_len: int,
    step_tokens: int,
) -> int:
    """Run the largest step there can be, and see what it takes beside weights and cache."""
    model, kernels, layout = made
    peak, most = 0, config.schedule.max_num_seqs
    # The most rows, ordinary prompts, the longest chunk, and short ones: they run, and compile, what a mixed step runs.
    cuts = [(rows, step_tokens) for rows in sorted({min(n, most) for n in (most, 64, 2)})]
    for rows, tokens in cuts + [(min(2, most), n) for n in SHORT_STEPS if n < step_tokens]:
        plan, need, length = peak_plan(rows, tokens, max_len, layout)
        runner = Runner(model, kernels, KVPool(layout, need, device), len(plan.rows), length + 1)
        results: list[StepResult] = []
        peak = max(peak, growth_bytes(device, partial(_run, runner, plan, results)))
        if results[0].failure is not None:
            raise UserError(f"A full step of {step_tokens} tokens cannot be computed: {results[0].failure}")
    return peak


def _run(runner: Runner, plan: StepPlan, results: list[StepResult]) -> None:
    results.append(runner.run(plan))


def _max_model_len(
    config: EngineConfig, layout: CacheLayout, blocks: list[int], wanted: int, reasons: list[str]
) -> int:
    fits = BlockTables(list(layout.groups), blocks, layout.block_size).max_length()
    if wanted <= fits:
        return wanted
    if config.model.max_model_len is not None:
        raise UserError(
            f"--max-model-len {wanted} needs more K/V cache than there is (room for {fits} tokens): "
            "lower it, or give more with --kv-cache-memory-bytes.",
            param="max_model_len",
        )
    reasons.append(f"context of {fits} tokens instead of {wanted}: what the K/V cache holds")
    return fits


def _eos_ids(raw: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer | None) -> frozenset[int]:
    """End tokens: generation_config.json's, config.json's and the tokenizer's."""
    ids: set[int] = set(tokenizer.eos_ids) if tokenizer is not None else set()
    for source in (raw, raw.get("text_config") or {}, generation):
        value = source.get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        ids.update(i for i in found if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
    return frozenset(ids)


class Ngram(msgspec.Struct, frozen=True):
    """Prompt lookup as --speculative-config asks for it."""

    most: int
    longest: int
    shortest: int


def read_ngram(options: SpeculateOptions) -> Ngram | None:
    """What --speculative-config says; None: no drafts."""
    spec = options.speculative_config
    if not spec:
        return None
    known = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
    if not isinstance(spec, dict) or set(spec) - known:
        extra = ", ".join(sorted(set(spec) - known)) if isinstance(spec, dict) else "not an object"
        raise ParameterError(
            f"speculative_config: unknown entries ({extra}); known are {', '.join(sorted(known))}.",
            param="speculative_config",
        )
    if spec.get("method") != "ngram":
        raise ParameterError(
            f"speculative_config: method {spec.get('method')!r} is not available; use 'ngram'.",
            param="speculative_config",
        )
    count = spec.get("num_speculative_tokens", 4)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_DRAFTS:
        raise ParameterError(
            f"num_speculative_tokens must be an integer in [1, {MAX_DRAFTS}].", param="speculative_config"
        )
    return Ngram(count, spec.get("prompt_lookup_max", 4), spec.get("prompt_lookup_min", 2))


def _device_drafter(config: EngineConfig, device: str) -> DeviceDrafter | None:
    """Where a user asks for several plans in flight (`pipeline_depth`), drafts come from the device, as those of the
    host would have to wait for the commit. Else the host's index is quicker than a search by many small operations:
    on an H200 the demo model made 727 tokens/s with the search and 4,261 with the index. (What the host must have a
    say in, grammars for one, gets the host's drafts in both cases.)"""
    ngram = read_ngram(config.speculate)
    if ngram is None or (config.execute.pipeline_depth or 1) == 1 or device.startswith("cuda"):
        return None
    return NgramLookup(ngram.most, ngram.longest, ngram.shortest)
