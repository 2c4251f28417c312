"""Loading a device drafter. Owns: the drafter's checkpoint, and whether it fits the target.

Must not know: caches, plans. `load_drafter` is called after the target is loaded, before the cache is planned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenmill.checkpoint.checked_tensors import CheckedCheckpoint
from tokenmill.checkpoint.hub import Hub
from tokenmill.checkpoint.torch_bin import TorchBinCheckpoint
from tokenmill.compute.drafting import DeviceDrafter
from tokenmill.compute.forward import Kernels, KVSpec, StateSpec
from tokenmill.compute.model import CausalLM, Checkpoint
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ModelError, ParameterError, UserError
from tokenmill.engine.load.model_source import ModelSource, find_source
from tokenmill.engine.options.drafting import OF_HOST, Speculation, looks_on_device
from tokenmill.kvcache.states import Copy, Make, StatePool, row_bytes
from tokenmill.layers.build import Build
from tokenmill.models.decoder import Decoder
from tokenmill.models.overriding import overridden
from tokenmill.models.registry import build_later, build_model
from tokenmill.quant.detect import check_config
from tokenmill.runner.drafts import NoDeviceDrafter
from tokenmill.speculate.draft_model import DraftModel
from tokenmill.speculate.draft_states import places_of
from tokenmill.speculate.eagle import EagleHead
from tokenmill.speculate.eagle_config import PADDING
from tokenmill.speculate.eagle_files import build_eagle
from tokenmill.speculate.later_steps import LaterSteps
from tokenmill.speculate.lookahead import Lookahead
from tokenmill.speculate.lookup import NgramLookup
from tokenmill.speculate.medusa import MedusaHeads
from tokenmill.speculate.medusa_files import build_heads
from tokenmill.speculate.mtp import LaterNet
from tokenmill.speculate.passes import Model
from tokenmill.speculate.windows import LookaheadWindows

_OF_MODELS = ("model.layers.", "transformer.h.")
"""Beginnings of names that tensors of whole models have, and those of heads have not."""
STATES_SHARE = 0.5
"""The share of the cache's memory that the states of a draft model may take."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that drafts are made for."""

    model: CausalLM
    source: ModelSource
    dtype: torch.dtype
    device: str
    kernels: Kernels
    record: bool


@dataclass(slots=True)
class LoadedDrafter:
    """A drafter with the specs of the K/V that it keeps, layer by layer, the specs of its states, and its weights'
    bytes. most: the most drafts of a row, the host's included. damage: what is wrong with its weights, if anything."""

    drafter: DeviceDrafter | None = None
    kv_specs: tuple[KVSpec, ...] = ()
    weight_bytes: int = 0
    most: int = 0
    states: tuple[StateSpec, ...] = ()
    damage: str = ""


def load_drafter(config: EngineConfig, found: Speculation | None, target: Target) -> LoadedDrafter:
    """Load the device drafter that --speculative-config asks for, if any."""
    if found is None:
        return LoadedDrafter()
    if found.eager is not None:
        if config.execute.enforce_eager and not found.eager:
            raise _refuse("enforce_eager: a drafter is not recorded where --enforce-eager keeps the model from it")
        target = replace(target, record=target.record and not found.eager)
    if target.model.spec.states and config.parallel.pipeline_parallel_size > 1:
        raise _refuse(
            "drafts for models with recurrent layers are not built for --pipeline-parallel-size above 1, as the first "
            "stages would have to go back to earlier states"
        )
    if found.tree is not None:
        check_trees(config, found, target)
    if not target.model.spec.ends[1]:  # only the last stage's ranks have a drafter
        on_device = found.method not in OF_HOST
        return LoadedDrafter(NoDeviceDrafter(found.most) if on_device else None, most=found.most)
    if found.method == "mtp":
        loaded = _later(config, found, target.source, target)
    elif found.method == "lookahead":
        loaded = LoadedDrafter(Lookahead(found.most) if found.windows is None else LookaheadWindows(found.windows))
    elif found.method in LOADERS:
        source = find_source(found.model or "", found.revision, Hub(config.files.download_dir, config.files.hf_token))
        try:
            loaded = LOADERS[found.method](config, found, source, target)
        except ModelError as error:  # of two folders, say which one is meant
            if str(source.path) in str(error):
                raise
            raise ModelError(f"{source.path}: {error}") from error
    elif looks_on_device(config, found, target.device):
        loaded = LoadedDrafter(NgramLookup(target.kernels, found.most, found.longest, found.shortest))
    else:
        loaded = LoadedDrafter()
    loaded.most = found.most
    return loaded


def check_trees(config: EngineConfig, found: Speculation, target: Target) -> None:
    """Refuse trees for models and options with which drafts can only be chains."""
    why = ""
    if target.model.spec.states:
        why = "for models with recurrent layers, whose states go from token to token"
    elif config.parallel.pipeline_parallel_size > 1:
        why = "for --pipeline-parallel-size above 1"
    elif not target.kernels.trees:
        why = f"on {target.device}"
    if why:
        asked = "speculative_token_tree" if found.windows is None else "lookahead_window"
        raise _refuse(f"{asked}: trees are not built {why}; without it drafts are chains")


def states_of_drafter(
    loaded: LoadedDrafter, rows: int, budget: int, device: str, copy: Copy, make: Make
) -> StatePool | None:
    """The states of a draft model's recurrent layers, for every row and the spare row, within a share of the cache's
    bytes."""
    if not loaded.states:
        return None
    count = (rows + 1) * places_of(loaded.most)
    need = count * row_bytes(loaded.states)
    if need > budget * STATES_SHARE:
        raise _refuse(
            f"the draft model's states behind guesses take {need >> 20} MiB of the cache's {budget >> 20} MiB: lower "
            "--max-num-seqs or num_speculative_tokens, or give more with --kv-cache-memory-bytes"
        )
    return StatePool(loaded.states, count - 1, 0, device, copy, make=make)


def _tensors(config: EngineConfig, source: ModelSource, target: Target, other: str = "") -> CheckedCheckpoint:
    """The folder's checkpoint, or the file of another name in which hubs store such weights."""
    file = source.path / other
    inner: Checkpoint
    if other and config.model.load_format != "dummy" and file.is_file() and not any(source.path.glob("*.safetensors")):
        inner = TorchBinCheckpoint(source.path, [file])
    else:
        inner = source.checkpoint(config.model.load_format, seed=config.model.seed + 1, device=target.device)
    return CheckedCheckpoint(inner, thorough=config.execute.check_weights)


def _build(
    checkpoint: Checkpoint, target: Target, positions: int, quantization: str | None, raw: dict[str, Any] | None = None
) -> Build:
    """The Build for a drafter's layers, which lie beside its target's. raw: the config.json of heads; it may say how
    their weights are stored."""
    return Build(
        checkpoint=checkpoint,
        dtype=target.dtype,
        device=torch.device(target.device),
        kernels=target.kernels,
        max_positions=positions,
        quantization=quantization,
        how=check_config(raw or {}),
    )


def _draft_model(config: EngineConfig, found: Speculation, source: ModelSource, target: Target) -> LoadedDrafter:
    raw = source.config()
    reach = min(config.model.max_model_len or target.model.spec.max_positions, target.model.spec.max_positions)
    checkpoint = _tensors(config, source, target)
    if heads := _heads_in(raw, checkpoint):
        checkpoint.close()
        raise _refuse(f'{source.path} holds no model but heads of one: say "method": {heads}')
    try:
        model = build_model(
            raw,
            checkpoint,
            dtype=target.dtype,
            device=target.device,
            kernels=target.kernels,
            quantization=found.quantization,
            max_positions=reach + found.most + 1,
        )
        damage = checkpoint.damage(str(source.path))
    finally:
        checkpoint.close()
    if model.spec.max_positions < reach + max(0, found.most - 2):  # a row that can still grow has two places left
        raise _refuse(
            f"{source.path}: its context of {model.spec.max_positions} tokens is too short for the model's {reach} "
            f"and {found.most} guesses: lower --max-model-len"
        )
    check_vocabulary(model.spec.vocab_size, source, target, dummy=config.model.load_format == "dummy")
    made = Model(model, target.model.spec.vocab_size)
    drafter = DraftModel(made, target.kernels, found.most, record=target.record)
    loaded = LoadedDrafter(drafter, model.spec.kv_specs, int(model.spec.extras.get("weight_bytes", 0)))  # type: ignore[call-overload]
    loaded.states, loaded.damage = model.spec.states, damage
    return loaded


def _medusa(config: EngineConfig, found: Speculation, source: ModelSource, target: Target) -> LoadedDrafter:
    raw, spec = source.config(), target.model.spec
    checkpoint = _tensors(config, source, target, "medusa_lm_head.pt")
    _check_kind(found, raw, source, checkpoint)
    try:
        b = _build(checkpoint, target, spec.max_positions, found.quantization, raw)
        heads = build_heads(raw, b, (spec.hidden_size, spec.vocab_size), str(source.path))
        damage = checkpoint.damage(str(source.path))
    finally:
        checkpoint.close()
    if found.tree is not None and found.tree.paths is not None and len(found.tree.paths[-1]) > len(heads):
        raise _refuse(
            f"speculative_token_tree has {len(found.tree.paths[-1])} levels; {source.path} has {len(heads)} heads"
        )
    drafter = MedusaHeads(heads, target.model, target.kernels, found.most, record=target.record, shape=found.tree)
    return LoadedDrafter(drafter, weight_bytes=b.book.weight_bytes, damage=damage)


def _eagle(config: EngineConfig, found: Speculation, source: ModelSource, target: Target) -> LoadedDrafter:
    raw, model = source.config(), target.model
    if not isinstance(model, Decoder):
        raise _refuse(f"{found.method!r} is not available for this architecture")
    positions = model.spec.max_positions + found.most + 1
    checkpoint = _tensors(config, source, target)
    _check_kind(found, raw, source, checkpoint)
    try:
        b = _build(checkpoint, target, positions, found.quantization, raw)
        net = build_eagle(raw, b, model, third=found.method == "eagle3", where=str(source.path))
        damage = checkpoint.damage(str(source.path))
    finally:
        checkpoint.close()
    model.taps = tuple(dict.fromkeys(net.taps))
    specs = tuple(b.book.kv_specs)
    drafter = EagleHead(
        net, specs, model, target.kernels, found.most, target.dtype, record=target.record, trees=found.tree is not None
    )
    return LoadedDrafter(drafter, specs, b.book.weight_bytes, damage=damage)


def _later(config: EngineConfig, found: Speculation, source: ModelSource, target: Target) -> LoadedDrafter:
    """Load a drafter from the target's own checkpoint."""
    model = target.model
    if not isinstance(model, Decoder) or model.embedding is None:
        raise _refuse(f"{found.method!r} is not available for this architecture")
    positions = model.spec.max_positions + found.most + 1
    checkpoint = _tensors(config, source, target)
    b = _build(checkpoint, target, positions, config.model.quantization)
    try:
        raw = overridden(source.config(), config.model.hf_overrides or {})
        nets = [LaterNet(layer, model.embedding) for layer in build_later(raw, b)]
        damage = checkpoint.damage(str(source.path))
    finally:
        checkpoint.close()
    model.taps = nets[0].taps
    specs = tuple(b.book.kv_specs)
    given = specs, model, target.kernels, found.most, target.dtype
    drafter = EagleHead(nets[0], *given, record=target.record, trees=found.tree is not None)
    if len(nets) > 1:
        if found.tree is not None:
            raise _refuse(
                f"speculative_token_tree: {source.path} guesses with {len(nets)} layers, one behind the other, whose "
                "drafts are chains"
            )
        drafter = LaterSteps(nets, *given, record=target.record)
    return LoadedDrafter(drafter, specs, b.book.weight_bytes, damage=damage)


def _heads_in(raw: dict[str, Any], checkpoint: Checkpoint) -> str:
    """The method whose heads a folder contains, in quotes as people write it; "": the folder is a model."""
    said = " ".join(map(str, (raw.get("model_type"), raw.get("architectures")))).lower()
    names = set(checkpoint.names())
    if "medusa" in said:
        return '"medusa"'
    if "eagle3" in said or names & {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}:
        return '"eagle3"'
    return '"eagle"' if "eagle" in said or "fc.weight" in names else ""


def _check_kind(found: Speculation, raw: dict[str, Any], source: ModelSource, checkpoint: Checkpoint) -> None:
    """Refuse heads that another method is for, and whole models."""
    heads = _heads_in(raw, checkpoint)
    if not heads and any(name.startswith(_OF_MODELS) for name in checkpoint.names()):
        checkpoint.close()
        raise _refuse(f'{source.path} holds a model and no heads: leave out "method", and this model drafts')
    if heads and heads != f'"{found.method}"':
        checkpoint.close()
        raise _refuse(f'{source.path} holds heads of another kind: say "method": {heads}')


def check_vocabulary(size: int, source: ModelSource, target: Target, *, dummy: bool) -> None:
    """Refuse a drafter with another vocabulary: ids must mean the same, though one may have more unused ids."""
    wanted = target.model.spec.vocab_size
    ours, theirs = (None, None) if dummy else (_words(target.source), _words(source))
    if ours is None or theirs is None:
        if abs(size - wanted) > PADDING:
            raise _refuse(f"{source.path}: its vocabulary of {size} is not the model's, which has {wanted}")
        return
    both = zip(ours[: min(size, wanted)], theirs, strict=False)  # ids without a row are no words
    other = next((i for i, (one, two) in enumerate(both) if one != two), None)
    if other is not None:
        raise _refuse(
            f"{source.path}: its tokenizer is not the model's (they differ from id {other} on); a draft model "
            "must have the same one"
        )


def _words(source: ModelSource) -> list[str | None] | None:
    """The tokenizer's pieces by id; None: there is no tokenizer to read."""
    try:
        tokenizer = source.tokenizer()
    except (UserError, OSError):
        return None
    return [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]


def _refuse(why: str) -> ParameterError:
    return ParameterError(f"speculative_config: {why}.", param="speculative_config")


LOADERS = {"draft_model": _draft_model, "medusa": _medusa, "eagle": _eagle, "eagle3": _eagle}
