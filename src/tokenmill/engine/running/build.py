"""Options become engines, one or several. Owns: wiring scheduler, executor, admission and text. Must not know: callers,
HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tokenmill.core.config import EngineConfig, ScheduleOptions
from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.core.execution import Executor
from tokenmill.core.request import Request
from tokenmill.device.memory import place
from tokenmill.engine.load.loading import (
    Facts,
    device_of,
    find_model,
    load_runner,
    read_config,
    read_generation,
)
from tokenmill.engine.load.memory import STEP_GUESSES
from tokenmill.engine.load.model_source import ModelSource
from tokenmill.engine.load.sharing import check_shared
from tokenmill.engine.options.balance_settings import read_balance
from tokenmill.engine.options.checks import check_companions, check_options
from tokenmill.engine.options.drafting import control_of, host_drafter, read_speculation, with_care
from tokenmill.engine.options.generation import banned, check_generation, left_in_config
from tokenmill.engine.running.replicas import Replicas
from tokenmill.engine.running.sleep_desk import SleepDesk
from tokenmill.engine.running.successors import Successors
from tokenmill.engine.steps.adapters import AdapterDesk
from tokenmill.engine.steps.admission import Admission, needs_head
from tokenmill.engine.steps.balance import Balance
from tokenmill.engine.steps.engine import Engine
from tokenmill.engine.steps.executor import InProcessExecutor
from tokenmill.engine.steps.text import eos_ids_of, give_text, load_tokenizer, unheeded_ends
from tokenmill.engine.steps.workers import start_ranks
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.cache_events import CacheEvents
from tokenmill.kvcache.snapshots import Snapshots
from tokenmill.scheduler.policy import make_policy
from tokenmill.scheduler.roster import Limits, OlderWays
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.structured.mask_pool import MaskPool
from tokenmill.text.tokenizer import Tokenizer

log = logging.getLogger("tokenmill.engine")
ANY = 1 << 30
"""The bound on host drafts in a step if nothing else bounds them."""


@dataclass(slots=True)
class Built:
    """An engine together with what its callers need."""

    engine: Engine
    facts: Facts
    config: EngineConfig
    tokenizer: Tokenizer | None
    generation: dict[str, Any]
    source: ModelSource
    adapters: AdapterDesk
    sleep: SleepDesk

    @property
    def context(self) -> int:
        """How many tokens the longest prompt and its output may have together."""
        return self.facts.max_model_len

    @property
    def prefix_block(self) -> int:
        """How many tokens a block of the prefix cache has; 0: there is no prefix cache."""
        return self.config.cache.block_size if self.config.cache.enable_prefix_caching else 0


def make_limits(options: ScheduleOptions, step_tokens: int) -> Limits:
    """The scheduler's limits as far as options and a step's tokens set them."""
    return Limits(
        max_rows=options.max_num_seqs,
        max_step_tokens=step_tokens,
        max_chunk=options.long_prefill_token_threshold,
        step_guesses=ANY,
        older=OlderWays(not options.enable_chunked_prefill, options.batching == "static"),
    )


def limits_of(config: EngineConfig, facts: Facts, max_drafts: int, cohorts: int) -> Limits:
    """The limits of an engine whose model is loaded. max_drafts: how many the host's drafter may make."""
    return replace(
        make_limits(config.schedule, facts.max_step_tokens),
        max_rows=facts.max_rows,
        max_drafts=max_drafts,
        max_guesses=facts.guesses,
        levels=facts.levels,
        step_guesses=min(STEP_GUESSES if facts.guesses else ANY, ANY if facts.trail is None else facts.trail),
        follows=facts.follows,
        catches_up=facts.catches_up,
        cohorts=cohorts,
        max_adapters=facts.adapter_slots,
    )


def build_engine(config: EngineConfig) -> Built:
    """Build everything between a request and its token deltas."""
    if config.parallel.data_parallel_size > 1:
        raise ParameterError(
            "data_parallel_size > 1 needs `serve`, LLM or AsyncLLM: this way in steps one engine.",
            param="data_parallel_size",
        )
    check_options(config)
    source = find_model(config)
    raw = read_config(config, source)  # reports errors in the config before the tokenizer is looked for
    speculation = read_speculation(config.speculate)
    check_shared(config, source, raw)
    drafter, most = host_drafter(speculation)
    tokenizer = load_tokenizer(config, source)
    for said in tokenizer.unheeded if tokenizer is not None else ():
        log.warning("%s", said)
    generation = read_generation(config, source)
    for said in check_generation(generation, f"{source.path}/generation_config.json"):
        log.warning("%s", said)
    if config.files.generation_config == "auto" and not source.generation():
        for said in left_in_config(source.config(), generation):
            log.warning("%s", said)
    executor, facts = _executor(config, source)
    tables = BlockTables(
        [GroupLayout(*g) for g in facts.groups],
        facts.num_blocks,
        config.cache.block_size,
        prefix_cache=config.cache.enable_prefix_caching,
        snapshots=None if facts.snapshots is None else Snapshots(facts.snapshots, config.cache.block_size),
        step_tokens=facts.max_step_tokens,
    )
    if config.engines > 1:  # each request's one is picked
        tables.cache.listener = CacheEvents()
    limits = limits_of(config, facts, most, cohorts=0 if executor.overlaps else executor.depth)
    tables.shares_followed, tables.draft_window = not limits.anew, facts.draft_window
    control = control_of(speculation, limits.step_guesses, on_device=bool(facts.guesses))
    drafter, policy = with_care(drafter, speculation, control), make_policy(config.schedule.scheduling_policy)
    scheduler = Scheduler(limits, tables, policy, drafter, control)
    never = banned(generation)
    if outside := [word for word in never if max(word) >= facts.vocab_size]:
        raise ModelError(
            f"{source.path}/generation_config.json: suppress_tokens or bad_words_ids name {outside[0]}, outside the "
            f"vocabulary of {facts.vocab_size}."
        )
    ends = eos_ids_of(source.config(), generation, tokenizer, config.model.hf_overrides)
    for said in unheeded_ends(source.config(), generation, facts.vocab_size, config.model.hf_overrides):
        log.warning("%s", said)
    admission = Admission(
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        max_rows=facts.max_rows,
        max_waiting=config.schedule.max_waiting,
        eos_ids=frozenset(i for i in ends if i < facts.vocab_size),
        in_process=runs_here(config),
        banned=never,
        vectors=source.vectors(),
    )
    masks = MaskPool()
    if tokenizer is not None:
        give_text(admission, tokenizer, config.execute.check_structured)
    adapters = AdapterDesk(executor, scheduler, config.adapters)
    engine = Engine(scheduler, executor, admission, masks.fill)
    balance = read_balance(config.parallel)
    if balance is not None:
        engine.balance = Balance(executor, balance, config.parallel.tensor_parallel_size)
    sleep = SleepDesk(engine)
    adapters.check_awake, sleep.settle = sleep.check, adapters.settle
    admission.check_engine = checks_of(adapters, sleep, headless=facts.headless)
    return Built(engine, facts, config, tokenizer, generation, source, adapters, sleep)


def checks_of(adapters: AdapterDesk, sleep: SleepDesk, *, headless: bool) -> Callable[[Request, bool], None]:
    """The check that refuses what an engine cannot accept now."""

    def check(request: Request, text: bool) -> None:
        needs_head(request, text and headless)
        sleep.check()
        adapters.check(request.adapter)

    return check


def build_llm(config: EngineConfig) -> Built:
    """Build the engine for a caller who steps it: one engine, or several with the interface of one."""
    check_companions(config)
    count = config.parallel.data_parallel_size
    if count == 1:
        return build_engine(config)
    if config.adapters.enable_lora:
        raise ParameterError("enable_lora with data_parallel_size > 1 needs `serve` or AsyncLLM.", param="enable_lora")
    each = replicas_of(config)
    built = build_all(each)

    def awake(one: Built) -> Built:
        """All sleep and wake as one."""
        one.engine.admission.check_engine = checks_of(one.adapters, sleep, headless=one.facts.headless)
        return one

    successors = Successors(lambda number: awake(build_engine(each[number])))
    engine = Replicas([one.engine for one in built], built[0].prefix_block, successors)
    sleep = SleepDesk(engine)
    for one in built:
        awake(one)
    return replace(built[0], engine=engine, config=config, sleep=sleep)  # type: ignore[arg-type]


def replicas_of(config: EngineConfig) -> list[EngineConfig]:
    """The configurations of --data-parallel-size engines, each in processes of its own; or of a single engine."""
    count = config.parallel.data_parallel_size
    return [config] if count == 1 else [_replica(config, number, count) for number in range(count)]


def build_all(each: list[EngineConfig]) -> list[Built]:
    """Build an engine for each of these configurations; all, or none."""
    if len(each) == 1:
        return [build_engine(each[0])]
    with ThreadPoolExecutor(len(each)) as pool:  # they load at the same time
        waiting = [pool.submit(build_engine, one) for one in each]
    failed = next((error for one in waiting if (error := one.exception()) is not None), None)
    if failed is not None:
        for one in waiting:
            if one.exception() is None:
                one.result().engine.close()
        raise failed
    return [one.result() for one in waiting]


def _replica(config: EngineConfig, number: int, count: int) -> EngineConfig:
    """The configuration of one of several engines."""
    alone = replace(config.parallel, data_parallel_size=1)
    execute = replace(config.execute, executor="process")
    return replace(config, parallel=alone, execute=execute, number=number, engines=count)


def _executor(config: EngineConfig, source: ModelSource) -> tuple[Executor, Facts]:
    if not runs_here(config):
        executor, plain = start_ranks(config)
        facts = msgspec.convert(plain, Facts)
        executor.depth = plans_in_flight(config, facts.device)
        return executor, facts
    here = place(device_of(config))
    with here():
        runner, plain = load_runner(config, source)
    facts = msgspec.convert(plain, Facts)
    depth = plans_in_flight(config, facts.device)
    return InProcessExecutor(runner, facts.num_blocks, depth, lazy=facts.device == "cpu", here=here), facts


def runs_here(config: EngineConfig) -> bool:
    """Does this process run the model itself? Several ranks have processes of their own."""
    return config.execute.executor == "inprocess" and config.parallel.ranks == 1


def plans_in_flight(config: EngineConfig, device: str) -> int:
    """Two, so that the host plans while the device computes; one if the host is the device. With stages, one more than
    there are stages, so that each of them has a step while the host plans."""
    alone, stages = device == "cpu" and runs_here(config), config.parallel.pipeline_parallel_size
    return config.execute.pipeline_depth or (1 if alone else 1 + stages)
