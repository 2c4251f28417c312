"""How much K/V cache a device gets. Owns: measuring the largest step, the number of blocks, the context that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tokenmill.compute.forward import Kernels, KVFormat, ModelSpec
from tokenmill.compute.model import CausalLM
from tokenmill.core.config import CacheOptions, EngineConfig
from tokenmill.core.errors import UserError
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.device.memory import counts_memory, free_bytes, growth_bytes, holes_bytes, total_bytes
from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.pool import CacheLayout, KVPool, buy_blocks, sequence_bytes
from tokenmill.kvcache.states import StatePool, row_bytes
from tokenmill.runner.peak import peak_plan
from tokenmill.runner.runner import Runner

CPU_CACHE_BYTES = 2 << 30
SHORT_STEPS = (4, 8, 16, 32, 64, 256, 2300, 2400, 2812, 3000, 3324, 3580)
"""Sizes of steps that run once while loading on a GPU. Each has two rows, and half as many tokens plus one. At 1151,
1407, 1663 or 1791 tokens a product's tiles fill all multiprocessors, for hidden sizes from 2304 to 3840, and another
kernel makes it."""
PRUNED_ROWS = (16, 32)
"""Rows of further steps where 2:4 matrices are packed: their kernel for few rows is another one for each power of two,
and a head that is held so sees rows, not tokens."""
STATES_SHARE = 0.5
"""The share of the cache's memory that the states of rows may always take: rows need pages, too."""
USUAL_TOKENS = 1024
"""How many tokens' pages are left for each row where states take more than their share."""
SNAPSHOTS_SHARE = 0.1
"""The share of the cache's memory for states that are kept for later sequences with the same prefix."""
MOST_SNAPSHOTS = 4096
TRAIL_SHARE = 0.15
"""The share of the cache's memory for states behind drafts. It bounds how many drafts a step can try."""
STEP_GUESSES = 256
"""The most device drafts in one step: about as many tokens as a GPU computes while it reads the weights. Some drafts
are wrong, so more of them would take time from tokens that are certain."""
TRIED_SHARE = 0.6
"""The share of free memory that states may take in the largest step that is tried: it needs memory of its own."""
MANY_HOLES = 0.02
"""The share of the device's memory from which on what lies between weights is worth a word."""
WIDENED_SHARE = 0.25
"""The most of the memory for K/V that copies of packed weights in 16 bits may take."""
GRAPH_BYTES = 1 << 30
"""Memory left for recorded steps, which keep their temporary tensors, and for libraries, which take some at first
use."""


def kv_format(options: CacheOptions, dtype: torch.dtype) -> KVFormat:
    """How K/V are stored when the model computes in `dtype`."""
    named = {"auto": str(dtype).removeprefix("torch."), "fp8": "float8_e4m3fn", "int4-fp8k": "float8_e4m3fn"}
    values = "int4" if options.kv_cache_dtype == "int4-fp8k" else ""
    return KVFormat(named.get(options.kv_cache_dtype, options.kv_cache_dtype), options.kv_cache_group, values)


def count_states(
    config: EngineConfig,
    spec: ModelSpec,
    budget: int,
    reasons: list[str],
    guesses: int = 0,
    pages: tuple[int, int] | None = None,
) -> tuple[int, int, int]:
    """How many rows, slots for kept states and places for states behind drafts fit into this many bytes of cache.
    guesses: the most drafts of a row. pages: the bytes of a usual sequence's pages and of the longest one's; states
    may take what is left beside these."""
    rows, each = config.schedule.max_num_seqs, row_bytes(spec.states) + own_cache_start(spec.extras)
    keeps = config.cache.enable_prefix_caching and "own_caches" not in spec.extras  # such caches belong to rows alone
    if not each:  # no states here; another stage may have some
        return rows, MOST_SNAPSHOTS, STEP_GUESSES
    fits = int(budget * STATES_SHARE) // each
    if pages is not None:
        usual, longest = pages
        left = budget - int(budget * (SNAPSHOTS_SHARE + (TRAIL_SHARE if guesses else 0.0)))
        fits = max(fits, min(left // (each + usual), (left - longest) // each))
    fits = max(1, fits - 1)
    if fits < rows:
        reasons.append(f"{fits} rows instead of {rows}: a row's states take {each / 2**20:.1f} MiB")
    slots = int(budget * SNAPSHOTS_SHARE) // each if keeps else 0
    rows = min(rows, fits)
    trail = max(guesses, min(rows * guesses, STEP_GUESSES, int(budget * TRAIL_SHARE) // each))
    return rows, min(slots, MOST_SNAPSHOTS), trail


def own_cache_start(extras: Mapping[str, Any]) -> int:
    """The bytes that a cache of Transformers' own has whatever its length."""
    return int(extras.get("own_cache_start", 0))


def pages_beside(
    layout: CacheLayout, wanted: int, step_tokens: int, extras: Mapping[str, Any] | None = None
) -> tuple[int, int]:
    """The bytes of a usual sequence's pages, and of the longest one's. extras: what the model says of itself."""
    each = (extras or {}).get("own_caches")
    if each is not None:
        return int(each * min(USUAL_TOKENS, wanted)), int(each * wanted)
    usual = sequence_bytes(layout, min(USUAL_TOKENS, wanted), step_tokens)
    return usual, sequence_bytes(layout, wanted, step_tokens)


def cache_bytes(config: EngineConfig, device: str, peak: int, reasons: list[str], shares: int = 1) -> int:
    """The bytes for pages, states and kept states. shares: how many ranks and engines share a host's memory."""
    budget = config.cache.kv_cache_memory_bytes
    reasons += overruled(config.cache, measured=counts_memory(device))
    reasons = reasons if config.cache.num_gpu_blocks_override is None else []
    if budget is None:
        free = free_bytes(device)
        if not counts_memory(device):
            budget = min(CPU_CACHE_BYTES, free // 2) // shares
            reasons.append(f"K/V cache of {budget >> 20} MiB: half of the free memory, at most 2 GiB")
        else:
            used = total_bytes(device) - free
            budget = int(total_bytes(device) * config.cache.gpu_memory_utilization) - used - peak - GRAPH_BYTES
            reasons.append(f"K/V cache of {budget >> 20} MiB: a full step was measured to need {peak >> 20} MiB")
            if (holes := holes_bytes(device)) > total_bytes(device) * MANY_HOLES:
                reasons.append(f"{holes >> 20} MiB of the device's memory lie between weights, where nothing fits")
    return budget


def keep_widened(config: EngineConfig, kernels: Kernels, dtype: torch.dtype, device: str, reasons: list[str]) -> None:
    """Keep weights of few bits in 16 bits, too, where a backend gains from that and the device has the memory."""
    keep = getattr(kernels, "keep_widened", None)
    if keep is None or not counts_memory(device):
        return
    room = int(total_bytes(device) * config.cache.gpu_memory_utilization) - total_bytes(device) + free_bytes(device)
    room = min(int(room * WIDENED_SHARE), room - GRAPH_BYTES - (config.cache.kv_cache_memory_bytes or 0))
    if taken := keep(dtype, room):
        reasons.append(
            f"packed weights are kept in 16 bits, too ({taken >> 20} MiB): steps of many rows read these; "
            "--disable widened leaves them out"
        )


def overruled(cache: CacheOptions, *, measured: bool) -> list[str]:
    """What is said of flags of memory beside one that counts more. A number of blocks counts before bytes, and bytes
    before a part of a GPU's memory (measured: the device has such memory)."""
    blocks, size = cache.num_gpu_blocks_override is not None, cache.kv_cache_memory_bytes is not None
    part = cache.gpu_memory_utilization != CacheOptions().gpu_memory_utilization
    first = "--num-gpu-blocks-override" if blocks else "--kv-cache-memory-bytes"
    notes = ["--num-gpu-blocks-override counts the pages of K/V, not --kv-cache-memory-bytes"] * (blocks and size)
    if part and (blocks or size):
        notes.append(f"{first} sizes the K/V cache, not --gpu-memory-utilization")
    elif part and not measured:
        notes.append("--gpu-memory-utilization is for GPUs: here --kv-cache-memory-bytes sizes the K/V cache")
    return notes


def count_blocks(
    config: EngineConfig,
    layout: CacheLayout,
    budget: int,
    max_len: int,
    step_tokens: int,
    extras: Mapping[str, Any] | None = None,
    reasons: list[str] | None = None,
) -> list[int]:
    """Blocks per pool. extras: what the model says of itself."""
    asked = config.cache.num_gpu_blocks_override
    most = config.schedule.max_num_seqs * (-(-max_len // layout.block_size) + 1) * len(layout.groups)
    if extras is not None and reasons is not None and "own_caches" in extras:
        asked = _count_own_caches(extras, budget, layout.block_size, (asked, most), reasons)
    if asked is not None:
        return [asked] * len(layout.page_bytes)
    blocks = buy_blocks(layout, budget, max_len, step_tokens)
    return [min(n, most) for n in blocks]


def _count_own_caches(
    extras: Mapping[str, Any], budget: int, block_size: int, wanted: tuple[int | None, int], reasons: list[str]
) -> int:
    """Blocks of a model whose sequences keep Transformers' own caches: pages count tokens, whose bytes are there.
    wanted: what the user fixed, and the most that is of use."""
    each = max(1.0, extras["own_caches"])
    fits = wanted[0] or max(1, min(int(budget / each) // block_size, wanted[1]))
    how = "computes every sequence anew for each token" if extras["anew"] else "keeps its own cache of each sequence"
    start = own_cache_start(extras)
    beside = f", and {start / 2**20:.1f} MiB a sequence" if start >= 1 << 16 else ""
    reasons.append(
        f"Transformers {how} ({extras['not_paged']}): one sequence after the other, and no shared prefixes; "
        f"{fits * block_size} tokens at once, {each / 1024:.1f} KiB each{beside}"
    )
    return fits


def peak_step_bytes(
    config: EngineConfig,
    made: tuple[CausalLM, Kernels, CacheLayout],
    device: str,
    max_len: int,
    step_tokens: int,
) -> int:
    """Run the largest possible step, and measure the memory that it takes besides weights and cache."""
    model, kernels, layout = made
    peak, most = 0, config.schedule.max_num_seqs
    if each := row_bytes(model.spec.states):
        most = min(most, max(2, int(free_bytes(device) * TRIED_SHARE) // each - 1))
    # The most rows, ordinary prompts, the longest chunk, and short ones: together they compile what mixed steps run.
    cuts = [(rows, step_tokens) for rows in sorted({min(n, most) for n in (most, 64, 2)})]
    short = [(min(2, most), n) for n in SHORT_STEPS if n < step_tokens]
    heads = PRUNED_ROWS if kernels.counters().get("pack_pruned") else ()
    every = [(*cut, False, False) for cut in (*cuts, *short, *((min(n, most), 2 * n) for n in heads))]
    every += [(*cut, True, False) for cut in cuts[-1:] if config.adapters.enable_lora]
    if any(0 < group.window < max_len for group in layout.groups):
        every += [(*cut, False, True) for cut in (*short[:1], *short[-1:], cuts[-1])]
    for rows, tokens, adapted, moved in every:
        grew, failure = _try_step(made, peak_plan(rows, tokens, max_len, layout), device, (adapted, moved))
        peak = max(peak, grew)
        if failure is not None:
            raise UserError(f"A full step of {step_tokens} tokens cannot be computed: {failure}")
    return peak


def _try_step(
    made: tuple[CausalLM, Kernels, CacheLayout],
    peak: tuple[StepPlan, list[int], int],
    device: str,
    how: tuple[bool, bool],
) -> tuple[int, str | None]:
    """The memory that this step takes, and why it failed. Its pages and states are gone before the next one's are made.
    how: does it run as with adapters, and as if windows had moved (Rows.pretends)?"""
    (model, kernels, layout), (plan, need, length) = made, peak
    specs, count, results = model.spec.states, len(plan.rows), list[StepResult]()
    states = StatePool(specs, count, 0, device, kernels.copy_rows_) if specs else None
    runner = Runner(model, kernels, KVPool(layout, need, device, states), count, length + 1)
    runner.rows.always_adapted |= how[0]
    runner.rows.pretends = how[1]
    return growth_bytes(device, partial(_note_result, runner, plan, results)), results[0].failure


def _note_result(runner: Runner, plan: StepPlan, results: list[StepResult]) -> None:
    results.append(runner.run_plan(plan))


def fitting_length(
    config: EngineConfig,
    groups: Sequence[GroupLayout],
    blocks: list[int],
    lengths: tuple[int, int],
    reasons: list[str],
) -> int:
    """The longest sequence that these blocks hold, at most `wanted`. lengths: wanted, and the most tokens of a step."""
    wanted, step_tokens = lengths
    fits = BlockTables(list(groups), blocks, config.cache.block_size, step_tokens=step_tokens).max_length()
    if wanted <= fits:
        return wanted
    if config.model.max_model_len is not None:
        flag = (
            "--kv-cache-memory-bytes" if config.cache.num_gpu_blocks_override is None else "--num-gpu-blocks-override"
        )
        raise UserError(
            f"--max-model-len {wanted} needs more K/V cache than there is (room for {fits} tokens): "
            f"lower it, or give more with {flag}.",
            param="max_model_len",
        )
    reasons.append(f"context of {fits} tokens instead of {wanted}: what the K/V cache holds")
    return fits
