"""What config.json and the tensors beside a matrix promise: kept, or refused by name; never read as something else.

Scales out of half precision's range, groups that end early, factors that no form multiplies by, versions that
config.json alone tells, and parts of matrices whose scales are filled up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from tests.cpu.models import parity
from tests.cpu.models.parity import DictCheckpoint
from tests.cpu.quant import stored_forms_helpers as forms
from tests.cpu.quant import stored_model
from tests.cpu.quant.stored_forms_helpers import FORMS, GROUP, IN, OUT, Made, read
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.quant import expected_tensors
from tokenmill.quant.detect import WeightRequest, check_config, load_weight

CPU = torch.device("cpu")
SCALES = {
    "gptq": (partial(forms.gptq, 4), "scales"),
    "gptq ordered": (lambda: forms.gptq(4, ordered=True), "scales"),
    "awq": (forms.awq_gemm, "scales"),
    "awq gemv": (forms.awq_gemv, "scales"),
    "packed": (partial(forms.packed_integers, 4), "weight_scale"),
    "packed zero": (lambda: forms.packed_integers(4, zero=True), "weight_scale"),
    "packed ordered": (lambda: forms.packed_integers(4, ordered=True), "weight_scale"),
    "int8": (forms.eight_asymmetric, "weight_scale"),
    "bitsandbytes 8": (forms.bitsandbytes_eight, "SCB"),
    "bitsandbytes 4": (lambda: forms.bitsandbytes(nested=False), "weight.absmax"),
    "hqq": (partial(forms.hqq, 4), "scale"),
    "quanto 8": (forms.quanto_eight, "weight._scale"),
    "torchao": (partial(forms.torchao, 4), "_weight_scale"),
    "bitnet": (lambda: forms.bitnet(divide=False), "weight_scale"),
}


def off(found: Tensor, dense: Tensor) -> float:
    return float((found - dense).abs().max() / dense.abs().max())


def scaled(name: str, factor: float) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    make, part = SCALES[name]
    tensors, dense, config = make()
    return {**tensors, part: tensors[part].float() * factor}, dense * factor, config


@pytest.mark.parametrize("factor", [1e-6, 1e-10, -1.0])
@pytest.mark.parametrize("name", SCALES)
def test_scales_below_half_precision_and_below_zero(name: str, factor: float) -> None:
    tensors, dense, config = scaled(name, factor)
    for kernels in (make_kernels("cpu"), ReferenceKernels()):
        weight = read(tensors, config)
        assert off(weight.dense(), dense) < 2e-3
        settled = weight.settle(kernels)
        assert off(settled.rows(torch.arange(OUT)), dense) < 2e-2
        x = torch.randn(3, IN, generator=torch.Generator().manual_seed(1))
        assert off(settled.matmul(x, SimpleNamespace(kernels=kernels)), x @ dense.T) < 0.03


@pytest.mark.parametrize("name", SCALES)
def test_scales_beyond_half_precision(name: str) -> None:
    """Held otherwise, or refused: never infinite."""
    tensors, dense, config = scaled(name, 1e9)
    try:
        settled = read(tensors, config).settle(ReferenceKernels())
    except ModelError as error:
        assert "beyond float16" in str(error)
    else:
        assert off(settled.rows(torch.arange(OUT)), dense) < 2e-2


def test_half_precision_is_left_where_single_scales_are_small() -> None:
    tensors, _, config = forms.packed_integers(4)
    tensors["weight_scale"][3] = 1e-9
    assert type(read(tensors, config)).__name__ == "GridWeight"


@pytest.mark.parametrize("name", [name for name in FORMS if not name.startswith("2:4")])
def test_a_factor_beside_a_form_that_has_none(name: str) -> None:
    tensors, _, config = FORMS[name][0]()
    shape = (256, 384) if name.startswith("fp8 blocks") else (OUT, IN)
    beside = 0
    for part in expected_tensors._FACTORS:
        if part in tensors:
            continue
        with_it = {**tensors, part: torch.full((1,), 2.0)}
        with pytest.raises(ModelError):  # by its name, or for what it makes the matrix look like
            read(with_it, config, shape)
        beside += 1
    assert beside > 10


@pytest.mark.parametrize(("columns", "group"), [(192, 128), (320, 128), (96, 64)])
def test_groups_that_end_early(columns: int, group: int) -> None:
    """compressed-tensors has none; GPTQ has (test_odd_groups.py)."""
    codes, scales = torch.randint(0, 16, (OUT, columns)), torch.rand(OUT, -(-columns // group)).half() + 0.5
    tensors = {"weight_packed": pack_to_int32((codes - 8).to(torch.int8), 4), "weight_scale": scales}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": True}
    with pytest.raises(ModelError, match=f"groups of {group} columns do not divide {columns}"):
        read(tensors, forms.tensors_config("pack-quantized", weights), (OUT, columns))


def test_schemes_of_several_groups_are_told_apart_by_what_is_there() -> None:
    tensors, dense, config = forms.packed_integers(4, zero=True)
    config = copy.deepcopy(config)
    eight = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj"], "weights": eight}
    assert off(read(tensors, config).dense(), dense) < 1e-6
    with pytest.raises(ModelError, match="zero_point' is missing"):
        read({n: t for n, t in tensors.items() if n != "weight_zero_point"}, config)
    five = copy.deepcopy(config)
    for scheme in five["config_groups"].values():
        scheme["weights"]["num_bits"] = 5
    with pytest.raises(ModelError, match=r"holds 4 bits a column: config\.json says 5"):
        read(tensors, five)


MIDDLE: dict[str, tuple[Callable[[], Made], dict[str, Any]]] = {
    "gptq": (partial(forms.gptq, 4), {"sym": True}),
    "gptq, taken for v2": (lambda: forms.gptq(4, middle=True), {"sym": True, "checkpoint_format": "gptq_v2"}),
    "gptq v2, taken for v1": (lambda: forms.gptq(4, middle=True, second=True),
                              {"sym": True, "checkpoint_format": "gptq"}),
    "awq": (forms.awq_gemm, {"zero_point": False}),
    "packed": (lambda: forms.packed_integers(4, zero=True), {"symmetric": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", MIDDLE)
def test_zero_points_where_config_says_that_there_are_none(name: str) -> None:
    make, says = MIDDLE[name]
    tensors, _, config = make()
    config = copy.deepcopy(config)
    place = config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config
    place |= says
    with pytest.raises(ModelError, match=r"zero points that are not in the middle|is not 0: config\.json says"):
        read(tensors, config)


def test_the_second_version_under_both_names() -> None:
    tensors, dense, _ = forms.gptq(4, second=True)
    for says in (
        {"checkpoint_format": "GPTQ_V2"},
        {"format": "gptq_v2"},
        {"checkpoint_format": None, "format": "gptq_v2"},
    ):
        assert off(read(tensors, {"quant_method": "gptq", "bits": 4, **says}).dense(), dense) < 1e-6


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_0_in_the_first_version(bits: int) -> None:
    """Tools take 1 from all codes of a word at once: 0 borrows from the next. (3 bits wrap one by one.)"""
    codes, zeros, scales = forms.numbers(bits)
    zeros[::3] = 0
    tensors, _, config = forms.gptq(bits)
    if bits == 3:
        tensors["qzeros"] = forms.words_by_bit((zeros - 1).T % 8, bits)
    else:
        ones = sum(1 << place for place in range(0, 32, bits))
        words = (forms.words_by_bit(zeros.T, bits).long() - ones) & 0xFFFFFFFF
        tensors["qzeros"] = torch.where(words >> 31 == 1, words - (1 << 32), words).to(torch.int32)
    assert off(read(tensors, config).dense(), forms.meant(codes, zeros, scales)) < 1e-6


REFUSED = {
    "marlin": {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
    "bitblas": {"quant_method": "gptq", "bits": 4, "use_bitblas_format": True},
    "rotation": {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"},
    "form": {"quant_method": "gptq", "bits": 4, "format": "marlin"},
    "no form": {"quant_method": "gptq", "bits": 4, "checkpoint_format": False},
    "axis": {"quant_method": "hqq", "quant_config": {"mlp.up_proj": {"weight_quant_params": {"axis": 0}}}},
    "view_as_float": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"view_as_float": True}}},
    "scale_quant_params": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {},
                                                                   "scale_quant_params": {"nbits": 8}}},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_change_the_numbers(name: str) -> None:
    with pytest.raises(ModelError, match="not supported"):
        check_config({"quantization_config": REFUSED[name]})


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq_without_its_settings(bits: int) -> None:
    tensors, dense, config = forms.hqq(bits)
    bare = {name: tensors[name] for name in ("W_q", "scale", "zero")}
    assert off(read(bare, config).dense(), dense) < 5e-3
    with pytest.raises(ModelError, match="groups across rows"):
        read({**bare, "scale": bare["scale"].T, "zero": bare["zero"].T}, config)
    other = torch.tensor(list(b"4bit_torch"), dtype=torch.uint8)
    with pytest.raises(ModelError, match="packing' is '4bit_torch'"):
        read({**tensors, "packing": other}, config)


def gemv(columns: int, group: int) -> Made:
    """AutoAWQ's version gemv: scales of a row fill whole words of zero points."""
    size = columns if group == -1 else group
    groups, several = columns // size, {64: 16, 32: 32}.get(size, 8)
    filled = -(-groups // several) * several
    codes, zeros = torch.randint(0, 16, (OUT, columns)), torch.randint(0, 16, (OUT, groups))
    scales = torch.rand(OUT, groups).half() + 0.5
    index = torch.arange(columns) // size
    more = (0, filled - groups)
    tensors = {"qweight": forms.words_by_bit(codes, 4), "scales": torch.nn.functional.pad(scales, more),
               "qzeros": forms.words_by_bit(torch.nn.functional.pad(zeros, more), 4)}  # fmt: skip
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMV"}
    return tensors, (codes - zeros[:, index]) * scales[:, index].float(), config


@pytest.mark.parametrize(("columns", "group"), [(256, 32), (256, 64), (256, 128), (256, -1), (1152, 64), (2048, 32)])
def test_gemv_whole_and_over_ranks(columns: int, group: int) -> None:
    tensors, dense, config = gemv(columns, group)
    shape = (OUT, columns)
    assert off(read(tensors, config, shape).dense(), dense) < 1e-6
    ckpt = DictCheckpoint({f"w.{name}": tensor for name, tensor in tensors.items()})
    how = check_config({"quantization_config": config})
    for dim in range(2):
        parts = [
            load_weight(ckpt, WeightRequest("w", shape, share=(dim, part, 2)), torch.float32, CPU, None, how)
            for part in range(2)
        ]
        assert off(torch.cat([part.dense() for part in parts], dim), dense) < 1e-6


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_zero_points_of_few_rows(rows: int) -> None:
    """Packed along rows, turned: a column of words has strides of its own."""
    codes, zeros = torch.randint(-8, 8, (rows, 128)), torch.randint(-8, 8, (rows, 2))
    tensors = {
        "weight_packed": pack_to_int32(codes.to(torch.int8), 4),
        "weight_scale": torch.ones(rows, 2),
        "weight_zero_point": pack_to_int32(zeros.to(torch.int8), 4, packed_dim=0),
    }
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    found = read(tensors, forms.tensors_config("pack-quantized", weights), (rows, 128)).dense()
    assert torch.equal(found, (codes - zeros.repeat_interleave(64, 1)).float())


CODES = {
    "a norm": "model.norm.weight",
    "a router": "model.layers.0.mlp.gate.weight",
    "the head": "lm_head.weight",
    "embeddings": "model.embed_tokens.weight",
    "experts in one tensor": "model.layers.0.mlp.experts.gate_up_proj",
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", CODES.values(), ids=CODES)
def test_codes_without_scales_are_no_numbers(name: str, dtype: torch.dtype) -> None:
    """Whatever is read as it is: matrices, norms, and experts that lie in one tensor."""
    config, tensors = stored_model.make("fp8 blocks", stored_model.MIXTURE)
    if name.endswith("gate_up_proj"):
        tensors = {each: tensor for each, tensor in tensors.items() if ".experts." not in each}
        tensors[name] = torch.ones(4, 1024, 512)
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.ones(4, 512, 512)
    parity.load(config, tensors)
    with pytest.raises(ModelError, match=f"'{name}' holds .*no scales beside it"):
        parity.load(config, {**tensors, name: tensors[name].to(dtype)})
