"""Codes of a type, and scales of a number, that config.json does not promise are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.cpu.quant.stored_forms_helpers import (
    FORMS,
    IN,
    OUT,
    Made,
    eight_asymmetric,
    four_bit_floats,
    hqq,
    packed_integers,
    read,
    tensors_config,
    torchao_fine,
)
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.quant.detect import check_config

FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


def float8(count: str) -> dict[str, Tensor]:
    """256 rows of 384 columns: three blocks in a row, two rows of blocks."""
    scales = {"tensor": (1,), "channel": (256, 1), "block": (2, 3)}[count]
    data = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": torch.full(scales, 0.5)}


def said(strategy: str) -> dict[str, Any]:
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    return tensors_config("float-quantized", {**FLOAT, "strategy": strategy, **block})


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("count", ["tensor", "channel", "block"])
def test_float8_has_as_many_scales_as_it_says(strategy: str, count: str) -> None:
    if strategy == count:
        assert torch.equal(read(float8(count), said(strategy), (256, 384)).dense(), float8(count)["weight"].float() / 2)
        return
    with pytest.raises(ModelError, match=f"weight_scale' has shape .* one scale per {strategy}"):
        read(float8(count), said(strategy), (256, 384))
    several = copy.deepcopy(said(strategy))
    several["config_groups"]["group_1"] = said(count)["config_groups"]["group_0"]
    read(float8(count), several, (256, 384))


@pytest.mark.parametrize("count", ["tensor", "channel"])
def test_deepseeks_blocks(count: str) -> None:
    tensors = float8(count)
    tensors["weight_scale_inv"] = tensors.pop("weight_scale")
    with pytest.raises(ModelError, match=r"weight_scale_inv' has shape .* one scale per block"):
        read(tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}, (256, 384))
    read(tensors, {"quant_method": "fp8"}, (256, 384))


POWERS: dict[str, dict[str, Any]] = {
    "scale_fmt": {"quant_method": "fp8", "scale_fmt": "ue8m0"},
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "format": tensors_config("mxfp8-quantized", {**FLOAT, "strategy": "group", "group_size": 32}),
    "scale_dtype": tensors_config("float-quantized", {**FLOAT, "strategy": "group", "group_size": 32,
                                                      "scale_dtype": "torch.uint8"}),
}  # fmt: skip
"""Configs that say that scales are powers of two."""
OTHERS: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8"}, {"quant_method": "fp8", "scale_fmt": "float"}, {"quant_method": "fbgemm_fp8"},
    {"quant_method": "modelopt", "quant_algo": "FP8"},
    tensors_config("float-quantized", {**FLOAT, "strategy": "group", "group_size": 32}),
)  # fmt: skip


@pytest.mark.parametrize("which", POWERS)
def test_scales_of_bytes_are_powers_of_two_where_config_says_so(which: str) -> None:
    data, powers = torch.ones(64, 256).to(torch.float8_e4m3fn), torch.randint(120, 131, (64, 8), dtype=torch.uint8)
    wanted = torch.exp2(powers.float() - 127).repeat_interleave(32, 1)
    for scales in (powers, powers.view(torch.float8_e8m0fnu)):
        assert torch.equal(read({"weight": data, "weight_scale": scales}, POWERS[which], (64, 256)).dense(), wanted)


@pytest.mark.parametrize("config", OTHERS)
def test_scales_of_bytes_are_not_guessed(config: dict[str, Any]) -> None:
    """They may as well be whole numbers, or float8 that lost its type."""
    for scales in ((64, 8), (64, 1), (64,), (1, 2), (1,)):
        tensors = {"weight": torch.ones(64, 256).to(torch.float8_e4m3fn),
                   "weight_scale": torch.full(scales, 127, dtype=torch.uint8)}  # fmt: skip
        for said in (config, None):
            with pytest.raises(ModelError, match=r"weight_scale' holds bytes, and config\.json does not say"):
                read(tensors, said, (64, 256))


def test_other_ways_to_say_scales() -> None:
    for odd in ({"scale_fmt": "e5m3"}, {"scale_fmt": 1}, {"weight_block_size": [1, 128]}):
        with pytest.raises(ModelError, match="This checkpoint has fp8"):
            check_config({"quantization_config": {"quant_method": "fp8", **odd}})


@pytest.mark.parametrize("part", ["_weight_scale", "_weight_qdata", "_weight_per_tensor_scale"])
def test_fine_floats_of_torchao_that_do_not_fit(part: str) -> None:
    for name in ("MXFP4", "MXFP8", "NVFP4"):
        for swizzle in (False, True):
            tensors, dense, config = torchao_fine(name, swizzle=swizzle)
            shape = (OUT, IN)
            assert float((read(tensors, config, shape).dense() - dense).abs().max()) < 1e-2
            made = {"_weight_per_tensor_scale": torch.ones(2), **tensors}[part]
            odd = made.repeat(2) if made.ndim < 2 else made[:-1]
            with pytest.raises(ModelError, match=r"'w\._weight_"):
                read({**tensors, part: odd}, config, shape)


def test_schemes_without_a_strategy_promise_no_scales() -> None:
    """ModelOpt writes such."""
    groups = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}}
    read(float8("tensor"), {"quant_method": "modelopt", "quant_algo": "FP8", **groups}, (256, 384))


def test_codes_of_another_type() -> None:
    integers, _, eight = eight_asymmetric()
    packed, _, four = packed_integers(4)
    floats, _, fours = four_bit_floats("MXFP4A16")
    forms = {
        "integers": [(integers, eight), (packed, four)],
        "4 bit floats": [(floats, fours)],
        "8 bit floats": [
            ({n: t[:OUT, :IN] if t.ndim == 2 else t for n, t in float8("tensor").items()}, said("tensor"))
        ],
    }
    refused = 0
    for kind, files in forms.items():
        for tensors, own in files:
            read(tensors, own)
            for other, configs in forms.items():
                for _, config in configs if other != kind else ():
                    with pytest.raises(ModelError, match=f"'w' is stored as {kind}: config.json says {other}"):
                        read(tensors, config)
                    refused += 1
    assert refused == 10


@pytest.mark.parametrize("field", ["nbits", "axis", "shape"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_facts_in_small_floats(field: str, dtype: torch.dtype) -> None:
    """torch does not ask these types whether they are finite."""
    tensors, _, config = hqq(4)
    tensors[field] = torch.tensor(float("nan")).to(dtype)
    with pytest.raises(ModelError, match=f"w.{field}' is not a number"):
        read(tensors, config)


def _quanto_said(make: Any, said: str) -> Made:
    tensors, dense, config = make()
    return tensors, dense, {**config, "weights": said}


OTHERS: dict[str, tuple[Any, str, Any, str]] = {
    "numbers of 16 bits that are no floats": (FORMS["2:4"][0], "compressed", lambda t: t.to(torch.uint16), "floats"),
    "an order in floats": (
        lambda: packed_integers(4, ordered=True), "weight_g_idx", lambda t: t.float(), "must hold integers",
    ),
    "a whole number as the scale of BitNet": (
        FORMS["bitnet"][0], "weight_scale", lambda t: torch.full((1,), 3, dtype=torch.uint8), "must be a float",
    ),
    "bytes as scales of MLX's integers": (FORMS["mlx 4"][0], "scales", lambda t: t.to(torch.uint8), "must hold floats"),
    "one scale where each row has its own": (
        eight_asymmetric, "weight_scale", lambda t: t[:1], "config.json says one scale per channel",
    ),
    "one zero point where each row has its own": (
        eight_asymmetric, "weight_zero_point", lambda t: t[:1], "weight_zero_point' has shape",
    ),
    "groups of HQQ that it denies": (
        lambda: hqq(4), "group_size", lambda t: torch.tensor(2 * IN), "group_size' says groups of",
    ),
    "half of quanto's codes": (
        lambda: _quanto_said(FORMS["quanto 4"][0], "int4"), "weight._data._data", lambda t: t[: len(t) // 2],
        "which is not int4 for",
    ),
    "float8 where quanto says integers": (
        lambda: _quanto_said(FORMS["quanto 8"][0], "int8"), "weight._data", lambda t: t.view(torch.float8_e4m3fn),
        "stored as float8_e4m3fn: config.json says int8",
    ),
}  # fmt: skip
"""Made, the tensor that is changed, how, and what is said."""


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_that_would_be_read_as_something_else(name: str) -> None:
    make, part, change, told = OTHERS[name]
    tensors, dense, config = make()
    if "config_groups" in config and part.endswith(("scale", "point")):
        config = copy.deepcopy(config)
        config["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    read(tensors, config, tuple(dense.shape))
    with pytest.raises(ModelError, match=told):
        read({**tensors, part: change(tensors.get(part))}, config, tuple(dense.shape))


def test_scales_with_which_numbers_are_beyond_float32() -> None:
    """Groups that no kernel knows are unpacked as they are read."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    tensors = {"W_q": codes, "scale": torch.ones(16, 1), "zero": torch.zeros(16, 1), "nbits": torch.tensor(8)}
    read(tensors, {"quant_method": "hqq"}, (8, 32))
    with pytest.raises(ModelError, match="exceed float32's range"):
        read({**tensors, "scale": torch.full((16, 1), 1e37)}, {"quant_method": "hqq"}, (8, 32))


ODD = (None, True, -1, 0, 1 << 70, 1.5, float("nan"), "x", "x" * 5000, [], [None], {}, {"a": 1}, ["x" * 5000], [[[]]])
MORE = {"version": "gemm", "checkpoint_format": "gptq", "fmt": "e4m3", "weight_block_size": [128, 128], "dynamic": {},
        "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0, "linear_class": "autobitlinear",
        "extra_config": {}, "quantization_mode": "offline", "desc_act": False,
        "modules_to_not_convert": None, "ignore": []}  # fmt: skip


@pytest.mark.parametrize("method", sorted({FORMS[name][0]()[2]["quant_method"] for name in FORMS}))
def test_a_config_of_anything_is_taken_or_refused_in_a_sentence(method: str) -> None:
    """However long what it holds is."""

    def changed(value: Any) -> list[Any]:
        """The same with one part replaced, for every part and every odd value."""
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        found = list(ODD)
        for key, each in inside:
            for other in changed(each):
                copied = copy.copy(value)
                copied[key] = other
                found.append(copied)
        return found

    configs = {str(FORMS[name][0]()[2]): FORMS[name][0]()[2] for name in FORMS}
    one = next(config for config in configs.values() if config["quant_method"] == method)
    refused = 0
    for config in changed({**MORE, **one}):
        try:
            check_config({"quantization_config": config})
        except ModelError as error:
            assert len(str(error)) < 600 and "\n" not in str(error)
            refused += 1
    assert refused > 5
