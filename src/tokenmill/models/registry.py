"""Architecture names -> families. Owns: building a model from a config and a checkpoint. Never runs remote code.
Must not know: how a family is built, engines.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tokenmill.checkpoint.renamed import RenamedCheckpoint
from tokenmill.compute.forward import Kernels
from tokenmill.compute.model import CausalLM, Checkpoint, Group
from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.layers.build import Build, check_leftovers
from tokenmill.layers.rope import rope_settings
from tokenmill.models.common_keys import POSITION_NAMES
from tokenmill.models.config import ModelConfig
from tokenmill.models.config_fields import check_fields, complete
from tokenmill.models.family_of import BODY, architecture_of, can_elsewhere, has_other_task, is_ours, names_of, settled
from tokenmill.models.mtp_layers import Later
from tokenmill.models.positions import OWN_NAMES
from tokenmill.models.table import TABLE
from tokenmill.models.text_names import text_names
from tokenmill.models.text_part import TEXT_OF, outer_of, settle_tie, text_part
from tokenmill.parallel.group import SoloGroup
from tokenmill.quant.detect import check_any_stored, check_config

log = logging.getLogger("tokenmill.models")

_FAMILIES = {
    **dict.fromkeys(("AXK1ForCausalLM", "AXK2ForCausalLM"), "deepseek_v2"),
    "LongcatFlashForCausalLM": "longcat_flash",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "DeepseekV32ForCausalLM": "deepseek_v2",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon_h1",
    "Glm4MoeLiteForCausalLM": "deepseek_v2",
    "GlmMoeDsaForCausalLM": "deepseek_v2",
    "Mistral4ForCausalLM": "deepseek_v2",
    "SarvamMLAForCausalLM": "deepseek_v2",
    **dict.fromkeys(("MiniCPM3ForCausalLM", "YoutuForCausalLM"), "latent_dense"),
    **dict.fromkeys(("GPT2LMHeadModel", "OpenAIGPTLMHeadModel"), "gpt2"),
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "GptOssForCausalLM": "gpt_oss",
    "HYV4ForCausalLM": "hy_v4",
    "KimiLinearForCausalLM": "kimi_linear",
    "BailingHybridForCausalLM": "bailing_hybrid",
    "MiniMaxForCausalLM": "minimax",
    "Zamba2ForCausalLM": "zamba2",
    "OPTForCausalLM": "opt",
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), "qwen3_next"),
    **dict.fromkeys(TABLE, "family"),
}
"""Architecture -> the file that builds it: its own, or the builder of the table's rows."""

_DEFAULT_POSITIONS = 2048
_MAX_POSITIONS = 1 << 22
_STRETCHED = ("linear", "dynamic", "yarn")
"""Rope scalings whose factor may reach beyond the positions that a config states; others state what they reach."""

_HEADS = re.compile(r"(lm_head|embed_out|output_projection)\.")


def architectures() -> list[str]:
    """Every architecture name that can be built."""
    return sorted(_FAMILIES)


def file_of(architecture: str) -> str:
    """The file of this folder that builds it."""
    return _FAMILIES[architecture]


def build_model(
    config: dict[str, Any],
    ckpt: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    group: Group | None = None,
    max_positions: int | None = None,
    **more: Any,
) -> CausalLM:
    """Build the model that `config` (config.json) names, with its weights read from `ckpt` onto `device`.

    max_positions: the longest sequence of this run (default: what the config trained for); more: other fields of Build.
    """
    config = read(config)
    if unknown := check_keys(config):
        shown = ", ".join(repr(name) for name in unknown[:12]) + (" ..." if len(unknown) > 12 else "")
        log.warning("config.json: %s: not known here, and ignored; if one changes the model, answers suffer.", shown)
    b = Build(
        checkpoint=ckpt,
        dtype=dtype,
        device=torch.device(device),
        max_positions=_positions(_view(config), max_positions),
        group=group or SoloGroup(),
        kernels=kernels,
        **more,
    )
    return build_stage(config, b)


def build_elsewhere(
    config: dict[str, Any],
    ckpt: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    max_positions: int | None = None,
    **more: Any,
) -> CausalLM:
    """Build the same with Transformers' code around our attention (`models/foreign.py`)."""
    foreign = importlib.import_module("tokenmill.models.foreign")
    reach = _positions(ModelConfig(config), max_positions)
    b = Build(ckpt, dtype, torch.device(device), kernels, reach, **more)
    model: CausalLM = foreign.build_foreign(config, b)
    return model


def _positions(c: ModelConfig, wanted: int | None) -> int:
    # Only the first name counts: some files also have a training length under another name.
    trained = next((c.need(name, int) for name in POSITION_NAMES if c.has(name)), _DEFAULT_POSITIONS)
    return min(wanted or trained, _MAX_POSITIONS)


def context_of(config: Mapping[str, Any]) -> int:
    """The longest sequence that the model of this config.json is made for."""
    return _positions(ModelConfig(read(config)), None)


def read(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model, with its family as the only architecture. Reading the result again changes
    nothing."""
    return settled(text_part(config))


def is_elsewhere(config: Mapping[str, Any], impl: str) -> bool:
    """Does Transformers compute this model? impl: auto, tokenmill (or vllm, which also means our code),
    transformers."""
    found = settled(config)
    if impl == "auto" and (outer_of(found) is not None or is_ours(found)):
        return False
    if impl in ("tokenmill", "vllm") or has_other_task(found):
        return False
    can = can_elsewhere(found)
    if impl == "transformers" and not can:
        raise ModelError(
            f"--model-impl transformers: Transformers is not installed, or has no causal model of type "
            f"{found.get('model_type')!r}."
        )
    return can


def check_keys(config: dict[str, Any]) -> list[str]:
    """Refuse a config.json that asks for unsupported features; returns unknown keys."""
    config = read(config)
    return check_fields(config, architecture_of(config))


def check_length(config: dict[str, Any], wanted: int | None) -> None:
    """Refuse a --max-model-len beyond the positions of this config.json: answers would be noise there."""
    if wanted is None:
        return
    config = read(config)
    name = next((name for name in POSITION_NAMES if config.get(name) is not None), None)
    longest = _MAX_POSITIONS if name is None else min(_longest(config, name), _MAX_POSITIONS)
    if wanted <= longest:
        return
    if name is None or longest == _MAX_POSITIONS:
        raise ParameterError(
            f"--max-model-len {wanted} is more than {longest}, the longest context that any model is run with: lower "
            "it, or leave it out.",
            param="max_model_len",
        )
    overrides = f"'{{\"{name}\": {wanted}}}'"
    more = f" If it does reach farther, say so: --hf-overrides {overrides}." if wanted <= _MAX_POSITIONS else ""
    raise ParameterError(
        f"--max-model-len {wanted} is more than the {longest} tokens of this model's context: lower it, or leave it "
        f"out.{more}",
        param="max_model_len",
    )


def _longest(config: dict[str, Any], name: str) -> int:
    """The positions that a config states, or that its rope scaling stretches them to."""
    stated = ModelConfig(config).need(name, int, low=1)
    known = [one for one in names_of(config) if one in _FAMILIES]
    whole = complete(config, known[0] if known else "")
    rope = rope_settings(whole, head_dim=2, layer_type="full_attention", also=OWN_NAMES)
    if rope.kind not in _STRETCHED:
        return stated
    base = rope.original_positions if rope.kind == "yarn" else stated
    return max(stated, int(base * rope.value("factor", 1.0)))


def build_stage(config: dict[str, Any], b: Build) -> CausalLM:
    """Build the layers of `b.place`; the whole model must use every tensor of the checkpoint."""
    config = read(config)
    check_keys(config)
    config, b = _text_alone(config, b)
    c = _view(config)
    family = importlib.import_module(f"tokenmill.models.{_FAMILIES[c.architecture]}")
    b = replace(b, how=check_config(config))
    check_any_stored(b.how, b.checkpoint.names())
    b.book.headless = lacks_head(config, b.checkpoint)
    model: CausalLM = family.build(c, b)
    model.spec.extras["headless"] = b.book.headless
    if b.place.only is None:
        left = b.leftovers()
        model.spec.extras["kv_scales"] = b.kv_scales()
        if b.place.stages == 1:
            check_leftovers(left)
        model.spec.extras["left"] = left  # tensors that no stage uses are found when all stages have reported
    return model


def lacks_head(config: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """Is this a body without a head, by its name and its tensors?"""
    return BODY in config and not any(_HEADS.match(name) for name in checkpoint.names())


def build_later(config: dict[str, Any], b: Build) -> list[Later]:
    """The layers in a model's checkpoint that draft later tokens, each one token further."""
    config, b = _text_alone(read(config), b)
    c = _view(config)
    family = importlib.import_module(f"tokenmill.models.{_FAMILIES[c.architecture]}")
    if not hasattr(family, "build_later"):
        raise ModelError(f"{c.architecture}: layers that guess later tokens are not built for this family.")
    later: list[Later] = family.build_later(c, replace(b, how=check_config(config)))
    return later


def _text_alone(config: dict[str, Any], b: Build) -> tuple[dict[str, Any], Build]:
    checkpoint = text_alone(config, b.checkpoint, tell=b.place.only is None and b.place.is_first)
    return settle_tie(config, checkpoint.names()), replace(b, checkpoint=checkpoint)


def text_alone(config: dict[str, Any], checkpoint: Checkpoint, *, tell: bool = False) -> Checkpoint:
    """The tensors under the family's names, if this is the text part of a model that also sees or hears."""
    if TEXT_OF not in config or isinstance(checkpoint, RenamedCheckpoint):
        return checkpoint
    table, apart = text_names(checkpoint.names())
    if apart and tell:
        log.warning("Text only: %d tensors of what sees and hears are not loaded.", len(apart))
    return RenamedCheckpoint(checkpoint, table)


def _view(config: dict[str, Any]) -> ModelConfig:
    """A view of the config with the family's defaults."""
    architecture = architecture_of(config)
    return ModelConfig(complete(config, architecture), architecture=architecture)
