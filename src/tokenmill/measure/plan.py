"""What a model will need and reach on a device, before it is loaded. Owns: the arithmetic of `tokenmill plan`.

Memory follows the engine's own rules (cache.gpu_memory_utilization, block pools, the room for a full step); times are
roofline times at the stated efficiency. Must not know: terminals.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.compute.forward import KVFormat
from tokenmill.compute.model import Checkpoint
from tokenmill.core.config import CacheOptions, EngineConfig, ScheduleOptions, all_options, override
from tokenmill.core.errors import NoWeightsError, UserError
from tokenmill.engine.load import loading, memory
from tokenmill.engine.load.model_source import ModelSource
from tokenmill.engine.options.balance_settings import read_balance
from tokenmill.kvcache.allocation import BlockTables
from tokenmill.kvcache.pool import CacheLayout, buy_blocks, make_layout
from tokenmill.measure.calibration import Speeds
from tokenmill.measure.counting import Sheet, count_model
from tokenmill.measure.devices import CONTEXT_BYTES, Device, Efficiency, products_in, speeds
from tokenmill.measure.kept_measurements import EXPERTS
from tokenmill.measure.roofline import Floor, Grant, step_cost
from tokenmill.measure.several_devices import (
    Spread,
    bubbles,
    check_spread,
    hop_seconds,
    in_all,
    spread_cost,
    stage_of,
    state_bytes,
    with_copies,
)
from tokenmill.measure.step_time import step_time
from tokenmill.models.registry import is_elsewhere
from tokenmill.quant.shape_checkpoint import ShapeCheckpoint

DEFAULT_CONTEXTS = (1024, 8192, 32768, 131072)
DEFAULT_OUTPUT = 256
BATCHES = (1, 8, 32, 128, 256)
USEFUL_TOKENS = 2048
_STEP_TOKENS = {"cpu": 2048, "gpu": 8192}
_INTEGER_BYTES = 1.5
"""Weights with fewer bytes than this are integers."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is planned: the device, the number of ranks, the shares of the ceilings, the load and the price."""

    device: Device
    ranks: int
    efficiency: Efficiency
    contexts: tuple[int, ...] = ()
    output: int = DEFAULT_OUTPUT
    price: float | None = None
    stages: int = 1
    whole_experts: bool = False
    engines: int = 1

    @property
    def spread(self) -> Spread:
        """How the model is divided over the devices."""
        return Spread(self.ranks, self.stages, self.whole_experts, self.engines)

    @property
    def own(self) -> Device:
        """The device as one rank has it. On a CPU a rank has a part of the memory."""
        return replace(self.device, memory_bytes=self.device.memory_bytes // self.spread.sharers(self.device.kind))


@dataclass(frozen=True, slots=True)
class Layouts:
    """A plan's memory, in bytes per rank."""

    cache: CacheLayout
    blocks: list[int]
    kv_bytes: int
    wanted: int
    free: int
    step_tokens: int


@dataclass(slots=True)
class Planner:
    """A model that was counted once, to be planned for any device of its kind."""

    config: EngineConfig
    sheet: Sheet
    dtype: str
    kind: str
    step_tokens: int
    notes: list[str] = field(default_factory=list)

    @property
    def kv_format(self) -> KVFormat:
        """How keys and values are stored."""
        return memory.kv_format(self.config.cache, loading.DTYPES[self.dtype])

    @property
    def compute_type(self) -> str:
        """The type whose speed limits the products: the type of the weights if activations are rounded to it."""
        body = self.sheet.body
        stored = self.kind == "cpu" and 0 < body.weight_bytes < _INTEGER_BYTES * body.flops / 2  # a file's own format
        return products_in(self.kind, self.dtype, self.config.model.quantization or ("int8" if stored else None))


def speed_types(config: EngineConfig) -> tuple[str, ...]:
    """The types whose speed a plan for this machine may need."""
    integers: tuple[str, ...] = (config.model.quantization,) if config.model.quantization in ("int8", "int4") else ()
    if config.model.model.endswith(".gguf"):
        integers = ("int8", "int4")
    wanted = config.model.dtype
    floats = ("float32", "bfloat16") if wanted == "auto" else (str(loading.DTYPES[wanted]).removeprefix("torch."),)
    return (*floats, *integers)


def types_of(planner: Planner) -> tuple[str, ...]:
    """The same for a model that was read: only the float types in which it computes, and experts if it has any."""
    integers = [dtype for dtype in speed_types(planner.config) if dtype in ("int8", "int4")]
    experts = [EXPERTS] if planner.sheet.body.mixtures else []
    stored = [kind for kind in (planner.compute_type,) if kind == "int8"]
    return tuple(dict.fromkeys((planner.dtype, *stored, *integers, *experts)))


def check_counted(config: EngineConfig, source: ModelSource | None = None) -> dict[str, Any]:
    """The config.json of a model whose steps can be counted. Others are refused."""
    raw = loading.read_config(config, source or loading.find_model(config))
    if is_elsewhere(raw, config.files.model_impl):
        raise UserError(
            f"Nothing is predicted for models that run through Transformers, as this one does (model_type "
            f"{raw.get('model_type')!r}): `tokenmill serve` runs it, `tokenmill bench` measures it."
        )
    return raw


def read_model(config: EngineConfig, kind: str, ranks: int = 1) -> Planner:
    """Count the model that the options name. Only the shapes in weight files are read."""
    notes: list[str] = []
    source = loading.find_model(config)
    raw = check_counted(config, source)
    dtype = loading.compute_dtype(config.model.dtype, raw, "cpu" if kind == "cpu" else "cuda", notes)
    step_tokens = config.schedule.max_num_batched_tokens or _STEP_TOKENS[kind]
    checkpoint: Checkpoint | None = None
    if config.model.load_format != "dummy":
        try:
            checkpoint = source.checkpoint(config.model.load_format, seed=0, device="cpu")
        except NoWeightsError:
            notes.append("there are no weight files: shapes come from the configuration alone")
            if raw.get("quantization_config"):
                raise UserError(
                    f"{config.model.model}: config.json says that weights are quantised, and there are no weight files "
                    "that show how. Give the whole folder, or an unquantised config.json with --quantization."
                ) from None
            checkpoint = ShapeCheckpoint(None, loading.compute_dtype("auto", raw, "cuda", []))
    try:
        sheet = count_model(
            raw,
            dtype=dtype,
            checkpoint=checkpoint,
            quantization=config.model.quantization,
            max_positions=config.model.max_model_len,
            ranks=ranks,
            step=(step_tokens, config.schedule.max_num_seqs),
            kind=kind,
            state_dtype=config.cache.mamba_ssm_cache_dtype.replace("auto", "float32"),
        )
    finally:
        if checkpoint is not None:
            checkpoint.close()
    return Planner(config, sheet, str(dtype).removeprefix("torch."), kind, step_tokens, notes + list(sheet.notes))


def plan(planner: Planner, setup: Setup) -> dict[str, Any]:
    """Everything that `tokenmill plan --json` prints."""
    sheet, device = planner.sheet, setup.own
    check_spread(sheet, setup.spread)
    held = replace(planner, sheet=stage_of(sheet, setup.stages))
    if (moving := read_balance(planner.config.parallel)) is not None:  # never with stages
        held = replace(planner, sheet=with_copies(sheet, setup.ranks, moving.num_redundant_experts))
    reach = speeds(device, speed_type(planner, device), setup.efficiency)
    divided = layouts(held, device, setup.spread.sharers(planner.kind))
    max_context = _max_context(divided)
    fits = _fits(planner.config, divided)
    asked, setup = setup, replace(setup, output=max(1, min(setup.output, max_context // 2)))
    contexts = _contexts(setup, max_context) if fits else []
    points = [
        point(planner, setup, reach, context, batch)
        for context in contexts
        for batch in _batches(held, divided, context, setup.output)
    ]
    price = device.usd_per_hour if setup.price is None else setup.price
    notes = [*planner.notes, *([device.note] if device.note else []), *_uncounted(planner.config, planner.kind)]
    notes += _shortened(asked, setup.output, contexts, max_context) if fits else []
    found: dict[str, Any] = {
        "model": planner.config.model.model,
        "device": device.name,
        "device_title": device.title,
        "ranks": setup.ranks,
        "stages": setup.stages,
        "devices": setup.spread.devices,
        "shared": setup.spread.sharers(planner.kind) > 1,
        "dtype": planner.dtype,
        "quantization": planner.config.model.quantization,
        "fits": fits,
        "memory": {
            "weights": held.sheet.held_bytes,
            "kv": divided.kv_bytes,
            "activations": _step_bytes(planner),
            "free": divided.free,
            "total": device.memory_bytes,
        },
        "max_context": max_context,
        "max_batch": max_batch(held, divided, contexts[0]) if contexts else 0,
        "points": points,
        "usd_per_hour": price,
        "price_date": device.price_date if setup.price is None else "",
        "flags": _flags(planner, divided, setup, max_context),
        "per_token": _per_token(planner),
        "traffic": _traffic(planner, setup),
        "ceilings": {
            "bytes_per_s": device.bytes_per_s,
            "flops_per_s": device.flops_in(speed_type(planner, device)),
            "source": device.source,
        },
        "efficiency": {
            "memory": setup.efficiency.memory,
            "compute": setup.efficiency.compute,
            "step_ms": round(1e3 * setup.efficiency.step_s, 4),
            "calibrated": setup.efficiency.calibrated,
            "short": setup.efficiency.calibrated and device.calibration is not None and device.calibration.short,
            "source": setup.efficiency.source,
        },
        "load": {"output_tokens": setup.output, "step_tokens": planner.step_tokens},
        "notes": notes,
    }
    found["in_all"] = whole = in_all(found, setup.spread, planner.kind)
    best = whole["output_tokens_per_s"]
    cost = round(1e6 * price * whole["devices"] / 3600 / best, 4) if price and best else None
    return {**found, "usd_per_million_tokens": cost}


def _uncounted(config: EngineConfig, kind: str) -> list[str]:
    """What the options ask for that is overruled, or that the figures do not contain."""
    found = memory.overruled(config.cache, measured=kind != "cpu")
    if config.speculate.speculative_config:
        found.append("speeds are those without drafts; a drafter's weights, keys and values come on top")
    if config.adapters.enable_lora:
        found.append("adapters are not counted: their places on the device come on top, and their products take time")
    packed = "int4" in (config.model.quantization or "") and kind != "cpu"
    if packed and "widened" not in (config.execute.disable or ""):
        found.append("copies of packed weights in 16 bits are not counted: a quarter of the K/V cache at most")
    return found


def _shortened(asked: Setup, output: int, contexts: Sequence[int], longest: int) -> list[str]:
    """What of the load is too long for the longest context, and so not looked at."""
    found = []
    if asked.output not in (output, DEFAULT_OUTPUT):
        found.append(f"--output-len {asked.output} is taken as {output}, half of the longest context")
    if long := sorted(set(asked.contexts) - set(contexts)):
        found.append(f"--context {', '.join(map(str, long))} is left out: {longest} tokens fit, with the answer")
    return found


def layouts(planner: Planner, device: Device, sharers: int = 1) -> Layouts:
    """How the engine would divide this device's memory. sharers: how many share a host's memory, of which the device
    has a part (see Setup.own)."""
    config, sheet = planner.config, planner.sheet
    cache = make_layout(sheet.spec.kv_specs, config.cache.block_size, planner.kv_format)
    wanted = min(config.model.max_model_len or sheet.spec.max_positions, sheet.spec.max_positions)
    taken = sheet.held_bytes + _step_bytes(planner) + _process_bytes(device)
    if config.cache.kv_cache_memory_bytes is not None:
        budget = config.cache.kv_cache_memory_bytes
    elif planner.kind == "cpu":
        budget = min(memory.CPU_CACHE_BYTES // sharers, max(0, device.memory_bytes - taken) // 2)
    else:
        budget = int(device.memory_bytes * config.cache.gpu_memory_utilization) - taken
    blocks = [0] * len(cache.page_bytes)
    beside = memory.pages_beside(cache, wanted, planner.step_tokens)
    rows, slots, _ = memory.count_states(config, sheet.spec, max(budget, 0), [], pages=beside)
    budget -= (rows + 1 + slots) * sum(spec.size_bytes for spec in sheet.spec.states)
    if budget > 0:
        try:
            blocks = buy_blocks(cache, budget, wanted, planner.step_tokens)
        except UserError:
            blocks = [0] * len(cache.page_bytes)
    most = config.schedule.max_num_seqs * (-(-wanted // cache.block_size) + 1) * len(cache.groups)
    exact = config.cache.num_gpu_blocks_override
    blocks = [min(count, most) if exact is None else exact for count in blocks]
    held = sum(n * page for n, page in zip(blocks, cache.page_bytes, strict=True))
    return Layouts(cache, blocks, held, wanted, device.memory_bytes - taken - held, planner.step_tokens)


def held_in_all(planner: Planner, device: Device, sharers: int = 1) -> int:
    """The most bytes that a rank in a process of its own will hold, when its whole K/V pool is in use."""
    cache = layouts(planner, device, sharers).kv_bytes
    return planner.sheet.held_bytes + _step_bytes(planner) + cache + _process_bytes(device)


def peak_in_all(planner: Planner, device: Device) -> int:
    """The peak that `bench throughput` should find. A GPU's allocator does not see the memory of the context."""
    return held_in_all(planner, device) - (_process_bytes(device) if planner.kind == "gpu" else 0)


def _process_bytes(device: Device) -> int:
    """Bytes that the process takes before it loads anything: measured, or a usual value."""
    known = 0 if device.calibration is None else device.calibration.process_bytes
    return known or CONTEXT_BYTES[device.kind]


def _step_bytes(planner: Planner) -> int:
    """The temporary bytes of a full step, and on a GPU the room that the engine leaves for recorded steps."""
    return planner.sheet.activation_bytes + (memory.GRAPH_BYTES if planner.kind == "gpu" else 0)


def _max_context(divided: Layouts) -> int:
    """The longest sequence that fits if it is the only one."""
    if not all(divided.blocks):
        return 0
    tables = BlockTables(
        list(divided.cache.groups), divided.blocks, divided.cache.block_size, step_tokens=divided.step_tokens
    )
    return min(divided.wanted, tables.max_length())


def _fits(config: EngineConfig, divided: Layouts) -> bool:
    least = 1 if _sized_by_hand(config) else min(divided.wanted, USEFUL_TOKENS)
    return divided.free >= 0 and _max_context(divided) >= least


def max_batch(planner: Planner, divided: Layouts, context: int) -> int:
    """How many sequences of `context` tokens the cache holds at once."""
    need = [0] * len(divided.blocks)
    size = divided.cache.block_size
    for group in divided.cache.groups:
        need[group.pool] += -(-min(context, group.window + size if group.window else context) // size) + 1
    rooms = [blocks // count for blocks, count in zip(divided.blocks, need, strict=True) if count]
    return min([planner.config.schedule.max_num_seqs, *rooms])


def point(planner: Planner, setup: Setup, reach: Speeds, context: int, batch: int) -> dict[str, Any]:
    """The figures of one load: `batch` users at a time, prompts of `context` tokens, answers of setup.output tokens.

    ttft_ms: one prompt on an idle engine; tpot_ms: a step in the middle of the answers; output_tokens_per_s: sustained,
    with each user's next prompt computed in between."""
    stages = setup.stages
    first, prompt_limit = prefill(planner, reach, context, setup.spread)
    chunks = -(-context // planner.step_tokens)
    step = [Grant(1, context + setup.output // 2)] * -(-batch // stages)
    each = _step(planner, setup.spread, reach, step)
    # With several stages, prompts follow each other through them.
    busy = batch * first / stages + setup.output * each.seconds
    prompts = batch * first / stages > setup.output * each.seconds
    found = {
        "batch": batch,
        "context": context,
        "ttft_ms": round(1e3 * first * (chunks + stages - 1) / (chunks * stages), 4),
        "tpot_ms": round(1e3 * each.seconds, 4),
        "output_tokens_per_s": round(batch * setup.output / busy, 4),
        "limit": f"{prompt_limit} in prompts" if prompts else each.limit,
    }
    return found if stages == 1 else {**found, "bubbles": bubbles(batch, chunks, stages)}


def _step(planner: Planner, spread: Spread, reach: Speeds, grants: Sequence[Grant]) -> Floor:
    """One step through all stages."""
    cost = spread_cost(step_cost(planner.sheet, grants, planner.kv_format), planner.sheet, spread)
    found = step_time(cost, reach)
    own = found.seconds * spread.sharers(planner.kind)
    return replace(found, seconds=own + hop_seconds(planner.sheet, spread, cost.counts.tokens, reach))


def prefill(planner: Planner, reach: Speeds, tokens: int, spread: Spread | None = None) -> tuple[float, str]:
    """Seconds for a prompt of this length in full steps, and what limits them."""
    total, longest, limit = 0.0, 0.0, ""
    for start in range(0, tokens, planner.step_tokens):
        grant = Grant(min(planner.step_tokens, tokens - start), start, start + planner.step_tokens >= tokens)
        step = _step(planner, spread or Spread(), reach, [grant])
        total += step.seconds
        if step.seconds > longest:
            longest, limit = step.seconds, step.limit
    return total, limit


def _traffic(planner: Planner, setup: Setup) -> dict[str, float]:
    """Bytes per token that a rank sends: sums of slices and experts, and states to the next stage."""
    sheet, spread = planner.sheet, setup.spread
    cost = spread_cost(step_cost(sheet, [Grant(1, 0)], planner.kv_format), sheet, spread)
    return {
        "sums": cost.reduced_bytes,
        "stages": state_bytes(sheet) / spread.ranks if spread.stages > 1 else 0.0,
        "link_bytes_per_s": setup.device.link_bytes_per_s,
    }


def rescued(planner: Planner, setup: Setup) -> str | None:
    """What would make the model fit: fewer bits, or more ranks."""
    for ranks in (setup.ranks, 2 * setup.ranks, 4 * setup.ranks, 8 * setup.ranks):
        for bits in (planner.config.model.quantization, "int8", "int4"):
            config = override(planner.config, "model", quantization=bits)
            try:
                found = read_model(config, planner.kind, ranks)
            except UserError:
                continue
            wider = replace(setup, ranks=ranks)
            divided = layouts(found, wider.own, wider.spread.sharers(planner.kind))
            if _fits(config, divided):
                parts = [f"--quantization {bits}"] if bits != planner.config.model.quantization else []
                return " ".join([*parts, f"--tp {ranks}"] if ranks > setup.ranks else parts) or None
    return None


def _contexts(setup: Setup, longest: int) -> list[int]:
    """The prompt lengths to look at. Each leaves room for its answer."""
    wanted: Sequence[int] = setup.contexts or DEFAULT_CONTEXTS
    fitting = sorted({context for context in wanted if context + setup.output <= longest})
    return fitting or [max(1, longest - setup.output)]


def _batches(planner: Planner, divided: Layouts, context: int, output: int) -> list[int]:
    most = max(1, max_batch(planner, divided, context + output))
    return sorted({batch for batch in BATCHES if batch < most} | {most})


def speed_type(planner: Planner, device: Device) -> str:
    """The type of products whose ceiling counts on this device."""
    return planner.compute_type if planner.compute_type in device.flops else planner.dtype


def _per_token(planner: Planner) -> dict[str, float]:
    """The counts for one token with a context of one token: the model alone."""
    cost = step_cost(planner.sheet, [Grant(1, 0)], planner.kv_format)
    layout = planner.sheet.spec.kv_specs
    return {
        "flops": cost.total_flops,
        "weight_bytes": sum(cost.weight_bytes.values()),
        "kv_bytes": sum(planner.kv_format.bytes_per_token(spec) for spec in layout),
    }


def _flags(planner: Planner, divided: Layouts, setup: Setup, max_context: int) -> list[str]:
    """The flags of `serve` for this plan, without those that have default values."""
    config, known = planner.config, all_options()
    flags = {
        "device": "cpu" if planner.kind == "cpu" else "cuda",
        "quantization": config.model.quantization,
        "dtype": config.model.dtype if config.model.dtype != "auto" else None,
        "tensor_parallel_size": setup.ranks if setup.ranks > 1 else None,
        "pipeline_parallel_size": setup.stages if setup.stages > 1 else None,
        "enable_expert_parallel": setup.whole_experts or None,
        "enable_eplb": config.parallel.enable_eplb or None,
        "eplb_config": config.parallel.eplb_config,
        "data_parallel_size": setup.engines if setup.engines > 1 else None,
        "max_model_len": max_context if 0 < max_context < planner.sheet.spec.max_positions else None,
    }
    given = {**vars(config.cache), **vars(config.schedule)}
    usual = {**vars(CacheOptions()), **vars(ScheduleOptions())}
    flags |= {name: value for name, value in given.items() if value != usual[name]}
    if planner.kind == "cpu" and max_context < divided.wanted and not _sized_by_hand(config):
        flags["kv_cache_memory_bytes"] = max(0, divided.free // 2) or None
    return [_flag(name, value) for name, value in flags.items() if value is not None and name in known]


def _flag(name: str, value: Any) -> str:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name}"
    return f"--{name} {shlex.quote(json.dumps(value)) if isinstance(value, dict) else value}"


def _sized_by_hand(config: EngineConfig) -> bool:
    """Did a person say how large the K/V cache is? Then it may hold as little as it does."""
    return config.cache.kv_cache_memory_bytes is not None or config.cache.num_gpu_blocks_override is not None
