"""Loading a model where it will run: this process or a worker. Owns: `load_runner`, and the Facts that it returns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenmill.checkpoint.checked_tensors import CheckedCheckpoint
from tokenmill.checkpoint.folder import read_generation_config
from tokenmill.checkpoint.hub import Hub
from tokenmill.compute.forward import Kernels
from tokenmill.compute.model import CausalLM
from tokenmill.core.config import EngineConfig, cache_dir
from tokenmill.core.cores import usable_cores
from tokenmill.core.errors import ModelError, NoExpertsError, ParameterError
from tokenmill.device.memory import counts_memory, describe, devices_like, pick_device, records, release, use, uuid_of
from tokenmill.engine.load.compile_ahead import Compiling, compile_ahead
from tokenmill.engine.load.draft_loading import LoadedDrafter, Target, load_drafter, states_of_drafter
from tokenmill.engine.load.inplace import LayerMaker
from tokenmill.engine.load.kernel_search import warm
from tokenmill.engine.load.memory import (
    cache_bytes,
    count_blocks,
    count_states,
    fitting_length,
    keep_widened,
    kv_format,
    own_cache_start,
    pages_beside,
    peak_step_bytes,
)
from tokenmill.engine.load.model_source import GgufSource, ModelSource, find_source
from tokenmill.engine.load.placing import movers_of
from tokenmill.engine.load.sleeping import make_bed, sleeper_of
from tokenmill.engine.options.checks import left_out
from tokenmill.engine.options.drafting import read_speculation
from tokenmill.kernels import ReferenceKernels, has_kernels, make_kernels
from tokenmill.kvcache.pool import CacheLayout, KVPool
from tokenmill.kvcache.stages import StageReport, lay_out_stage
from tokenmill.kvcache.states import StatePool
from tokenmill.layers.build import check_leftovers
from tokenmill.lora.sites import Sites
from tokenmill.lora.store import LoraStore
from tokenmill.models.family_of import NOTE
from tokenmill.models.overriding import overridden
from tokenmill.models.registry import build_elsewhere, build_model, check_keys, check_length, is_elsewhere, read
from tokenmill.parallel.stages import Mesh
from tokenmill.quant.detect import check_stored
from tokenmill.runner.runner import Runner
from tokenmill.runner.stage import FromInbox

log = logging.getLogger("tokenmill.engine")
NO_ADAPTERS = "A model that Transformers computes takes neither adapters nor several devices."
DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
MOST_PADDED = 1024
"""The most tokens that short recorded steps are filled up to."""
MANY_BLOCKS = 1 << 40
"""The block count of a pool that a stage lacks: the other stages say how many blocks there are."""
IMPORTED_IN = os.getpid()
"""Tells whether this is a fork: in a fork the threads of torch's operations do not exist, and it would wait for them
forever."""


class Facts(msgspec.Struct):
    """What the engine must know about a loaded model; a worker sends it."""

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
    device_uuid: str = ""
    kv_block_bytes: float = 0.0
    family: str = ""
    quantization: str = ""
    max_rows: int = 0
    adapter_slots: int = 0
    adapter_bytes: int = 0
    guesses: int = 0
    """How many drafts a DeviceDrafter leaves behind a row."""
    levels: int = 0
    """How deep these drafts are, if they are trees."""
    follows: bool = False
    """Does the drafter keep something for every position?"""
    headless: bool = False
    """The model gives vectors and no text."""
    catches_up: str = "on"
    """How the drafter takes in what it has missed (compute/drafting.py)."""
    draft_window: int = 0
    """The smallest window of the drafter's layers; 0: none of them has one."""
    snapshots: int | None = None
    """How many slots there are for kept states; None: this model's rows have no states."""
    trail: int | None = None
    """If rows have states, how many drafts all rows together can try in a step; None: they have none."""


def find_model(config: EngineConfig) -> ModelSource:
    """Find where the model comes from."""
    return find_source(config.model.model, config.model.revision, hub_of(config))


def hub_of(config: EngineConfig) -> Hub:
    """The hub that files are downloaded from."""
    return Hub(config.files.download_dir, config.files.hf_token)


def read_generation(config: EngineConfig, source: ModelSource) -> dict[str, Any]:
    """The contents of generation_config.json (or of another folder's, or nothing), changed by
    --override-generation-config."""
    where = config.files.generation_config
    found = {} if where == "vllm" else source.generation() if where == "auto" else read_generation_config(Path(where))
    return {**found, **(config.files.override_generation_config or {})}


def read_config(config: EngineConfig, source: ModelSource) -> dict[str, Any]:
    """The contents of config.json, changed by --hf-overrides; refuses a length that the model does not support."""
    raw = overridden(source.config(), config.model.hf_overrides or {})
    if config.files.stored_as is not None:
        check_stored(raw, config.files.stored_as, str(source.path), gguf=isinstance(source, GgufSource))
    if is_elsewhere(raw, config.files.model_impl):
        check_length(raw, config.model.max_model_len)
        return raw
    raw = read(raw)
    check_length(raw, config.model.max_model_len)
    check_keys(raw)
    return raw


def device_of(config: EngineConfig, rank: int = 0) -> str:
    """The device of one rank of an engine. Engines and their ranks take devices in order, from the named one on."""
    device = pick_device(config.execute.device)
    parallel = config.parallel
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    first = config.number * size + rank
    if device == "cpu" or (config.engines == 1 and size == 1):
        return device
    every = sorted(devices_like(device), key=lambda name: int(name.partition(":")[2]))
    base = every.index(device) if ":" in device else 0
    if size > 1 and base + config.engines * size > len(every):
        raise ParameterError(
            f"--tensor-parallel-size {parallel.tensor_parallel_size}"
            + (
                f" --pipeline-parallel-size {parallel.pipeline_parallel_size}"
                if size != parallel.tensor_parallel_size
                else ""
            )
            + (f" with {config.engines} engines" if config.engines > 1 else "")
            + f" needs {config.engines * size} devices from {every[base]} on; there are {len(every) - base}.",
            param="tensor_parallel_size",
        )
    return every[(base + first) % len(every)]


def _take_place(config: EngineConfig, mesh: Mesh, ahead: Compiling | None, reasons: list[str]) -> tuple[str, Compiling]:
    """The device of this rank, which this thread uses from now on, and the process that compiles kernels for it
    (`ahead`, or one started here, before the device is used). Engines and ranks on one CPU share its cores."""
    device = device_of(config, mesh.rank)
    compiling = ahead or compile_ahead(config, device)
    use(device)
    shares, threads, cores = mesh.size * config.engines, config.execute.threads, usable_cores()
    if threads and threads > cores:
        reasons.append(f"{threads} threads for {cores} cores: they wait for each other, and steps take longer")
    if os.getpid() != IMPORTED_IN:
        torch.set_num_threads(1)
    elif threads or shares > 1:
        torch.set_num_threads(max(1, (threads or torch.get_num_threads()) // shares))
    return device, compiling


def _recordable(kernels: Kernels, model: CausalLM, device: str) -> bool:
    """May steps be recorded? Native tapes cannot hold foreign code, because it may compute with numbers on the host."""
    return (kernels.records and not model.spec.extras.get("foreign")) or records(device)


def load_runner(
    config: EngineConfig, source: ModelSource | None = None, mesh: Mesh | None = None, ahead: Compiling | None = None
) -> tuple[Runner, dict[str, Any]]:
    """Load the model (or a rank's share) and its cache onto the device; returns the runner, and Facts as plain data."""
    reasons: list[str] = []
    mesh = mesh or Mesh()
    device, compiling = _take_place(config, mesh, ahead, reasons)
    source = source or find_model(config)
    raw = read_config(config, source)
    dtype = compute_dtype(config.model.dtype, raw, device, reasons)
    compiling.begin(raw)
    kernels = _kernels(config, device, reasons)
    raw_checkpoint = source.checkpoint(config.model.load_format, seed=config.model.seed, device=device)
    checkpoint = CheckedCheckpoint(raw_checkpoint, thorough=config.execute.check_weights)
    sites = adapter_sites(config, raw, dtype, device)
    bed = make_bed(config, device)
    try:
        model = _builder(config, raw, reasons)(
            raw,
            checkpoint,
            dtype=dtype,
            device=device,
            kernels=kernels,
            quantization=config.model.quantization,
            max_positions=config.model.max_model_len,
            group=mesh.group,
            place=mesh.place,
            adapters=sites,
        )
        check_stages(model, mesh)
        reasons += filter(None, [checkpoint.damage(str(source.path))])
    finally:
        checkpoint.close()
    _tell(config, model, kernels, mesh, reasons)
    record = not config.execute.enforce_eager and _recordable(kernels, model, device)
    target = Target(model, source, dtype, device, kernels, record)
    drafts = load_drafter(config, read_speculation(config.speculate), target)
    keep_widened(config, kernels, dtype, device, reasons)
    bed.take(model, drafts.drafter, kernels)
    specs = model.spec.kv_specs + drafts.kv_specs
    said = msgspec.to_builtins(StageReport(specs, bool(model.spec.extras.get("stand_in")) and not drafts.kv_specs))
    every = [msgspec.convert(each, StageReport) for each in mesh.by_stage(said)]
    pages = lay_out_stage(every, mesh.place.stage, config.cache.block_size, kv_format(config.cache, dtype))
    layout = pages.cache
    wanted = min(config.model.max_model_len or model.spec.max_positions, model.spec.max_positions)
    step_tokens = _step_tokens(config, device, wanted)
    most = 0 if mesh.place.is_first else max(step_tokens, MOST_PADDED) + config.schedule.max_num_seqs
    inbox = torch.zeros(most, model.spec.hidden_size, dtype=dtype, device=device)
    model = model if mesh.place.is_first else FromInbox(model, inbox)
    adapter_bytes = 0 if sites is None else sites.allocate()
    compiling.first()
    lengths = wanted, step_tokens
    budget = _budget(config, (model, kernels, layout), device, lengths, (mesh.size * config.engines, reasons))
    beside = pages_beside(layout, *lengths, model.spec.extras)
    counted = count_states(config, model.spec, budget, reasons, drafts.most, beside)
    rows, slots, trail = mesh.agree(list(counted))
    makes = device, kernels.copy_rows_
    states = StatePool(model.spec.states, rows, slots, *makes, trail, bed.zeros) if model.spec.states else None
    behind = states_of_drafter(drafts, rows, budget, *makes, bed.zeros)
    taken = sum((p.size_bytes for p in (states, behind) if p is not None), rows * own_cache_start(model.spec.extras))
    own = count_blocks(config, layout, budget - taken, wanted, step_tokens, model.spec.extras, reasons)
    blocks = mesh.agree(pages.everywhere(own, MANY_BLOCKS))
    stateful = mesh.agree([0 if model.spec.states else 1]) == [0]
    max_len = fitting_length(config, pages.groups, blocks, lengths, reasons)
    pool = KVPool(layout, pages.here(blocks), device, states, bed.zeros, behind)
    adapters = None if sites is None else LoraStore(sites, kernels, config.adapters.max_cpu_loras)
    runner = Runner(model, kernels, pool, rows, max_len, record=record, drafter=drafts.drafter, adapters=adapters)
    runner.link, runner.translate, runner.experts = mesh.link(inbox), pages.translate, movers_of(runner, mesh.group)
    runner.on_all = lambda so: bool(mesh.group.agree([so])[0])
    fresh_sites = partial(adapter_sites, config, {}, dtype, device)
    maker = LayerMaker(raw, config, dtype, device, kernels, fresh_sites, mesh.group, mesh.place)
    runner.sleeper = sleeper_of(runner, bed, maker, source)
    compiling.wait(reasons)
    warm(config.tuning, runner, reasons, mesh.share)
    facts = _facts(config, runner, device, (max_len, step_tokens), reasons, drafts)
    facts.groups, facts.num_blocks = [(g.pool, g.window) for g in pages.groups], blocks
    facts.dtype, facts.family = str(dtype).removeprefix("torch."), str(raw.get("model_type", ""))
    facts.adapter_slots, facts.adapter_bytes = 0 if sites is None else sites.slots, adapter_bytes
    facts.snapshots, facts.trail = (slots, trail) if stateful else (None, None)
    return runner, msgspec.to_builtins(facts)


def _budget(
    config: EngineConfig,
    made: tuple[CausalLM, Kernels, CacheLayout],
    device: str,
    lengths: tuple[int, int],
    told: tuple[int, list[str]],
) -> int:
    """The bytes for pages and states, once the largest step was tried. lengths: of the longest sequence and of the
    largest step; told: how many share the host's memory, and what is said of it."""
    wanted, step_tokens = lengths
    peak = 0
    if counts_memory(device):
        peak = peak_step_bytes(config, made, device, min(wanted, step_tokens), step_tokens)
    release(device)
    return cache_bytes(config, device, peak, told[1], shares=told[0])


def _step_tokens(config: EngineConfig, device: str, length: int) -> int:
    """The most tokens of a step, if sequences have at most this length."""
    tokens = config.schedule.max_num_batched_tokens or (2048 if device == "cpu" else 8192)
    return tokens if config.schedule.enable_chunked_prefill else max(tokens, length)


def check_stages(model: CausalLM, mesh: Mesh) -> None:
    """Refuse a checkpoint with tensors that no stage asked for, and expert options for a model without experts."""
    if mesh.place.whole_experts and not any(mesh.by_stage(model.spec.extras.get("mixtures", 0))):
        raise NoExpertsError()
    if mesh.place.stages > 1:
        left = [set(each) for each in mesh.share(model.spec.extras.get("left", []))]
        check_leftovers(sorted(set.intersection(*left)))


def _facts(
    config: EngineConfig,
    runner: Runner,
    device: str,
    lengths: tuple[int, int],
    reasons: list[str],
    drafts: LoadedDrafter,
) -> Facts:
    """The facts that the runner itself and its drafter know. lengths: of the longest sequence and of the largest
    step."""
    pool, spec, ranks = runner.pool, runner.model.spec, config.parallel.ranks
    return Facts(
        vocab_size=spec.vocab_size,
        max_model_len=lengths[0],
        max_step_tokens=lengths[1],
        groups=[(g.pool, g.window) for g in pool.layout.groups],
        num_blocks=pool.num_blocks,
        device=device,
        dtype="",
        weight_bytes=int(spec.extras.get("weight_bytes", 0)) + drafts.weight_bytes,  # type: ignore[call-overload]
        flops_per_token=spec.flops_per_token / config.parallel.tensor_parallel_size,
        quantization=config.model.quantization or "",
        max_rows=runner.rows.spare,
        guesses=runner.drafter.most,
        levels=runner.drafter.levels,
        follows=runner.drafter.follows,
        catches_up=runner.drafter.catches_up,
        draft_window=min((each.window for each in drafts.kv_specs if each.kind == "window"), default=0),
        headless=bool(spec.extras.get("headless")),
        reasons=reasons + [f"the drafter: {drafts.damage}"] * bool(drafts.damage),
        device_name=describe(device) if ranks == 1 else f"{ranks} x {describe(device)}",
        device_uuid=uuid_of(device),
        kv_block_bytes=sum(part.nbytes for part in pool.storage) / max(1, sum(pool.num_blocks)),
    )


def check_ranks(config: EngineConfig, raw: dict[str, Any]) -> None:
    """Refuse more ranks than there are parts, before a process is started. Ranks find out when they load if anything
    else cannot be shared among them."""
    text = raw.get("text_config")
    asked = (
        ("tensor_parallel_size", "num_attention_heads", config.parallel.tensor_parallel_size, "attention heads"),
        ("pipeline_parallel_size", "num_hidden_layers", config.parallel.pipeline_parallel_size, "layers"),
    )
    for name, key, ranks, what in asked:
        count = raw.get(key, text.get(key) if isinstance(text, dict) else None)
        if isinstance(count, int) and 0 < count < ranks:
            said = f"--{name.replace('_', '-')} {ranks}: this model has only {count} {what} to share out."
            raise ParameterError(said, param=name)


def adapter_sites(config: EngineConfig, raw: dict[str, Any], dtype: torch.dtype, device: str) -> Sites | None:
    """The sites of adapters in a model that is about to be built; None: it takes no adapters."""
    options, spread = config.adapters, config.parallel
    if not options.enable_lora:
        return None
    return Sites(
        options.max_loras,
        options.max_lora_rank,
        dtype,
        torch.device(device),
        raw,
        partial=spread.pipeline_parallel_size > 1 or spread.enable_expert_parallel,
    )


def _tell(config: EngineConfig, model: CausalLM, kernels: Kernels, mesh: Mesh, reasons: list[str]) -> None:
    """Report what was not built as asked for."""
    _check_states(config.cache.mamba_ssm_cache_dtype, model, mesh)
    if config.tuning.pruned_weights == "packed":
        _tell_pruned(kernels, reasons)
    extras: Mapping[str, Any] = model.spec.extras
    if changed := extras.get("changed"):
        reasons.append(f"{', '.join(changed)} weights are held as int8: no kernel reads them as stored")
    if extras.get("kv_scales"):
        reasons.append(
            "the checkpoint's scales of K/V are not used, nor its wish for 8 bits: K/V are kept as --kv-cache-dtype "
            "says, and fp8 there makes a scale per token and head"
        )
    if repeated := extras.get("repeated"):
        reasons.append(f"every rank computes all of {', '.join(repeated)}")


def _tell_pruned(kernels: Kernels, reasons: list[str]) -> None:
    """Report what `--pruned-weights packed` found."""
    found = kernels.counters().get("pack_pruned", {}).get("calls", 0)
    none = (
        "--pruned-weights packed has no effect: no matrix has zeros that are left out here (a GPU with sparse tensor "
        "cores: two of every four, in 16 bits or float8; a CPU: 30 % in 16 bits)"
    )
    reasons.append(f"{found} matrices are held without their zeros (experts on a GPU with them)" if found else none)


def _check_states(wanted: str, model: CausalLM, mesh: Mesh) -> None:
    """Refuse a type of states for a model that has none. (A stage may have none while another one has.)"""
    if wanted == "auto":
        return
    kept = [spec.parts[-1][0] for spec in model.spec.states if len(spec.parts) > 1]  # alone: of a convolution
    if mesh.agree([0 if wanted in kept else 1]) != [0]:
        raise ParameterError(
            f"--mamba-ssm-cache-dtype {wanted}: no layer of this model has such states: leave it out.",
            param="mamba_ssm_cache_dtype",
        )


def _builder(config: EngineConfig, raw: dict[str, Any], reasons: list[str]) -> Callable[..., CausalLM]:
    """The function that makes the model: our own, or Transformers' (which is reported)."""
    if not is_elsewhere(raw, config.files.model_impl):
        if NOTE in raw:
            reasons.append(str(raw[NOTE]))
        return build_model
    if config.parallel.ranks > 1 or config.adapters.enable_lora:
        raise ModelError(NO_ADAPTERS)
    reasons.append(f"Transformers computes {raw.get('model_type')}: slower than our own families")
    return lambda *given, group, place, adapters, **more: build_elsewhere(*given, **more)


def _kernels(config: EngineConfig, device: str, reasons: list[str]) -> Kernels:
    execute = config.execute
    if not has_kernels(device):
        reasons.append(f"plain torch computes on {device}: there are no kernels of our own for it, and it is slower")
    without, pruned = left_out(config), config.tuning.pruned_weights
    if without and device == "cpu":
        raise ParameterError(
            f"--disable {', '.join(without)}: only a GPU has these, and this engine runs on a CPU: leave it out.",
            param="disable",
        )
    if pruned == "packed" and (execute.kernels == "reference" or (execute.deterministic and device != "cpu")):
        with_it = "--kernels reference" if execute.kernels == "reference" else "--deterministic on a GPU"
        raise ParameterError(
            f"{with_it} multiplies matrices with their zeros: leave --pruned-weights out.", param="pruned_weights"
        )
    made: Kernels = ReferenceKernels()
    if execute.kernels != "reference":
        made = make_kernels(device, steady=execute.deterministic, without=without, cache=cache_dir(), pruned=pruned)
    elif execute.deterministic and device != "cpu":
        raise ParameterError(
            "--deterministic on a GPU needs its own kernels: leave --kernels reference out.", param="deterministic"
        )
    made.state_dtype = _state_dtype(config, device)
    return made


def _state_dtype(config: EngineConfig, device: str) -> str:
    """The type of recurrent states between steps."""
    wanted = config.cache.mamba_ssm_cache_dtype.replace("auto", "float32")
    if wanted == "float32":
        return wanted
    if device == "cpu" and config.execute.kernels != "reference":
        why = ": on a CPU states are float32: leave it out."
    elif config.execute.deterministic:
        why = " rounds states where steps cut a prompt, which --deterministic rules out: leave one of them out."
    else:
        return wanted
    raise ParameterError(f"--mamba-ssm-cache-dtype {wanted}{why}", param="mamba_ssm_cache_dtype")


def compute_dtype(wanted: str, raw: dict[str, Any], device: str, reasons: list[str]) -> torch.dtype:
    """The type to compute in: the one asked for, or else the config's. If it must be another, `reasons` says so."""
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else {}
    said = raw.get("dtype") or raw.get("torch_dtype") or (text or {}).get("dtype") or "float32"
    named = str(said if wanted == "auto" else wanted).removeprefix("torch.")
    dtype = DTYPES.get(named, torch.float32)
    if named not in DTYPES:
        reasons.append(f"computed in float32: nothing is computed in config.json's type {named!r}")
    if dtype == torch.float16 and device == "cpu":
        held = "; weights stay float16" if str(said).removeprefix("torch.") == "float16" else ""
        reasons.append(f"computed in float32: CPUs compute float16 slowly{held}")
        return torch.float32
    return dtype
