"""What a quantised checkpoint must hold before its numbers mean anything. Owns: refusing a weight without the scales,
zero points or order that config.json promises, and scales that are whole numbers: all of them would be read, and say
something else. Must not know: how a form's codes become numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError

_FACTORS = (
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "_weight_scale", "scales", "SCB"),
    *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "weight._scale"),
    *("weight._shift", "scale", "zero", "vals"),
)
_EXPONENTS = ("weight_scale", "weight_scale_inv")
"""May be powers of two, a byte each."""
_BY_GROUP = ("group", "dynamic")
"""compressed-tensors' words for columns whose groups are listed one by one."""


def check(ckpt: Checkpoint, name: str, how: Mapping[str, Any], columns: int) -> None:
    """Refuse what lies under `name` in few bits if something of it is missing, of the wrong type, or in other groups
    than config.json says, whose words are `how`."""
    for part in _FACTORS:
        if ckpt.has(f"{name}.{part}") and ckpt.shape(f"{name}.{part}") is not None:
            _check_factor(ckpt, name, part)
    for part, why in _promised(ckpt, name, how):
        if not ckpt.has(f"{name}.{part}"):
            raise ModelError(f"'{name}.{part}' is missing: {why}.")
    part, place, size = _groups(how)
    shape = ckpt.shape(f"{name}.{part}") if size and ckpt.has(f"{name}.{part}") else None
    if shape is not None and (len(shape) != 2 or shape[place] != -(-columns // size)):
        raise ModelError(f"'{name}.{part}' has shape {list(shape)}: config.json says groups of {size} columns.")


def _groups(how: Mapping[str, Any]) -> tuple[str, int, int]:
    """Which tensor holds scales, along which dimension, and how many columns share one, where all weights are alike;
    0: that is not said."""
    method, size = how.get("quant_method"), how.get("group_size")
    if method in ("gptq", "awq") and type(size) is int and size > 0 and not how.get("dynamic"):
        return ("scales", 0, 0 if how.get("version") == "gemv" else size)
    groups = how.get("config_groups")
    schemes = [scheme.get("weights") for scheme in groups.values()] if isinstance(groups, Mapping) else []
    said = {(each.get("strategy"), each.get("type", "int"), each.get("group_size")) for each in schemes
            if isinstance(each, Mapping)}  # fmt: skip
    if len(said) == 1:
        strategy, kind, size = said.pop()
        if strategy == "group" and kind == "int" and type(size) is int and size > 0:
            return "weight_scale", 1, size
    return "", 0, 0


def check_plain(stored: Tensor, name: str) -> None:
    """Refuse codes that would be taken for the numbers themselves."""
    if stored.is_floating_point() and stored.element_size() > 1:
        return
    what = str(stored.dtype).removeprefix("torch.")
    raise ModelError(f"'{name}' holds {what}, and there are no scales beside it: the checkpoint is not whole.")


def _check_factor(ckpt: Checkpoint, name: str, part: str) -> None:
    dtype = ckpt.tensor(f"{name}.{part}").dtype
    exponents = part in _EXPONENTS or (part == "weight.absmax" and ckpt.has(f"{name}.weight.nested_absmax"))
    if not dtype.is_floating_point and not (exponents and dtype == torch.uint8):
        raise ModelError(f"'{name}.{part}' must hold floats, not {str(dtype).removeprefix('torch.')}.")


def _promised(ckpt: Checkpoint, name: str, how: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Tensors that config.json says are there, and how it says so."""
    if how.get("desc_act") is True and ckpt.has(f"{name}.qweight"):
        scales = ckpt.shape(f"{name}.scales")
        if scales is not None and len(scales) == 2 and scales[0] > 1:
            return [("g_idx", "config.json says that columns are in an order of their own (desc_act)")]
    groups = how.get("config_groups")
    schemes = [scheme.get("weights") for scheme in groups.values()] if isinstance(groups, Mapping) else []
    if not schemes or any(not isinstance(each, Mapping) or each.get("type", "int") != "int" for each in schemes):
        return []
    found = []
    if all(each.get("symmetric") is False for each in schemes):
        found.append(("weight_zero_point", "config.json says that weights are not symmetric"))
    if all(each.get("actorder") in _BY_GROUP for each in schemes) and ckpt.has(f"{name}.weight_packed"):
        found.append(("weight_g_idx", "config.json says that columns are in an order of their own (actorder)"))
    return found
