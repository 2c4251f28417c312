"""Files whose numbers are no numbers, or contradict what a form can say: each is refused by name, for every form, and
nothing but a ModelError ends a load. And groups whose numbers are all equal, which have an offset and no scale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from tests.cpu.quant import stored_forms_helpers as forms
from tests.cpu.quant.stored_forms_helpers import FORMS, IN, OUT, Made, read
from torch import Tensor

from tokenmill import LLM
from tokenmill.checkpoint.folder import read_config
from tokenmill.core.errors import ModelError
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.quant.convert import Recipe, convert
from tokenmill.quant.detect import check_config, check_stored
from tokenmill.quantize import stored_forms
from tokenmill.testing.tiny import make_tiny

BESIDE = ("input_scale", "output_scale")
"""About activations, which files' scales do not change."""
CODES = ("weight", "_weight_qdata", "compressed")
"""Numbers of float8 and more: they are many, and their NaN is found when it comes out of the model."""


def changed(stored: Tensor, value: float) -> Tensor:
    wide = stored.float().contiguous().clone()
    wide.view(-1)[wide.numel() // 2] = value
    return wide.to(stored.dtype)


def off(found: Tensor, dense: Tensor) -> float:
    return float((found - dense).abs().max() / dense.abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_factors_that_are_no_numbers(form: str) -> None:
    tensors, dense, config = FORMS[form][0]()
    tried = 0
    for part, stored in tensors.items():
        if part in CODES or part in BESIDE or not stored.dtype.is_floating_point:
            continue
        infinite = () if stored.element_size() == 1 else (float("inf"), float("-inf"))  # bytes have none
        for value in (float("nan"), *infinite):
            with pytest.raises(ModelError):
                read({**tensors, part: changed(stored, value)}, config, tuple(dense.shape))
            tried += 1
    assert tried or form.removeprefix("mlx ") in (
        "2:4",
        "mxfp4",
        "mxfp8",
        "nvfp4",
    )  # test_ends_of_scales.py


def damaged(stored: Tensor) -> dict[str, Tensor | None]:
    """What may be wrong with one tensor."""
    found: dict[str, Tensor | None] = {"missing": None, "empty": stored[:0] if stored.ndim else None}
    found["one more dimension"] = stored[None].clone()
    found["double"] = torch.cat((stored, stored)) if stored.ndim else None
    if stored.is_floating_point():
        found |= {"huge": changed(stored, 3e38), "zero": changed(stored, 0.0), "tiny": changed(stored, 1e-42)}
        found |= {"whole": stored.float().nan_to_num().to(torch.int32), "wide": stored.double() * 1e300}
    else:
        ends = torch.iinfo(stored.dtype)
        for end in (ends.min, ends.max):
            found[f"{end}"] = torch.full_like(stored, end)
        found["real"] = stored.float()
    return found


@pytest.mark.parametrize("form", [*FORMS][::3])
def test_no_damage_ends_otherwise(form: str) -> None:
    """Numbers, or an error that a person can read."""
    tensors, dense, config = FORMS[form][0]()
    for part, stored in tensors.items():
        for what, instead in damaged(stored).items():
            given = {name: tensor for name, tensor in tensors.items() if name != part}
            given |= {} if instead is None else {part: instead}
            try:
                weight = read(given, config, tuple(dense.shape)).settle(make_kernels("cpu"))
            except ModelError:
                continue
            finite = torch.isfinite(weight.rows(torch.arange(dense.shape[0])).float()).all()
            assert finite or part in CODES, (part, what)


def asymmetric(zero: int, dtype: torch.dtype, bits: int) -> Made:
    """compressed-tensors with zero points that are not packed."""
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (OUT, IN), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    tensors = {"weight_packed": pack_to_int32(codes, bits), "weight_scale": torch.ones(OUT, 1),
               "weight_zero_point": torch.full((OUT, 1), zero, dtype=dtype)}  # fmt: skip
    weights = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": False}
    return tensors, codes.float() - zero, forms.tensors_config("pack-quantized", weights)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_of_more_bits_than_codes(bits: int) -> None:
    """A cast would take 300 for 44."""
    half = 1 << (bits - 1)
    for zero in (-half, half - 1, 1):
        tensors, dense, config = asymmetric(zero, torch.int8, bits)
        assert off(read(tensors, config).dense(), dense) < 1e-6
    for zero in (300, half, -half - 1, -30_000):
        tensors, _, config = asymmetric(zero, torch.int16, bits)
        with pytest.raises(ModelError, match=f"no numbers of {bits} bits"):
            read(tensors, config)


def test_zero_points_of_torchao_beyond_all_codes() -> None:
    tensors, _, config = forms.torchao(4)
    for far in (1 << 16, -(1 << 40)):
        points = torch.full(tensors["_weight_zero_point"].shape, far, dtype=torch.int64)
        with pytest.raises(ModelError, match="zero points beyond"):
            read({**tensors, "_weight_zero_point": points}, config)


def quanto(scale: Tensor, shift: Tensor) -> Made:
    lines = OUT * IN // 128
    codes = torch.randint(0, 16, (lines, 128), generator=torch.Generator().manual_seed(7))
    low, high = codes.chunk(2)
    tensors = {"weight._data._data": (low | high << 4).to(torch.uint8), "weight._scale": scale, "weight._shift": shift}
    return tensors, (codes * scale - shift).view(OUT, IN), {"quant_method": "quanto"}


def pairs(scale: Tensor, shift: Tensor) -> Made:
    """torchao's, whose offsets are added."""
    tensors, _, config = forms.torchao_pairs()
    scale, shift = scale.view(OUT, -1), shift.view(OUT, -1)
    raw = tensors["_weight_qdata"].view(torch.uint8)
    codes = torch.stack((raw & 15, raw >> 4), -1).flatten(1).to(torch.int16)
    codes = torch.where(codes > 7, codes - 16, codes)
    wide = [each.repeat_interleave(IN // scale.shape[1], 1) for each in (scale, shift)]
    given = {"_weight_scale": scale.T.contiguous(), "_weight_zero_point": -shift.T.contiguous()}
    return {**tensors, **given}, codes * wide[0] - wide[1], config


@pytest.mark.parametrize("make", [quanto, pairs])
@pytest.mark.parametrize("step", [0.0, 1e-42, 1e-9, 1e-4, -1e-5])
def test_groups_of_equal_numbers(make: Any, step: float) -> None:
    """Some groups have an offset that is much larger than their steps, or no steps at all."""
    random = torch.Generator().manual_seed(3)
    count = OUT * IN // 128
    scale, shift = torch.rand(count, 1, generator=random) + 0.5, torch.rand(count, 1, generator=random) * 5
    scale[::3], shift[::3] = step, 3.0
    scale[5], shift[5] = 0.0, 0.0
    tensors, dense, config = make(scale, shift)
    for kernels in (make_kernels("cpu"), ReferenceKernels()):
        weight = read(tensors, config)
        assert off(weight.dense(), dense) < 2e-3
        assert off(weight.settle(kernels).rows(torch.arange(OUT)), dense) < 6e-3


UNSAID = {
    "gptq": (partial(forms.gptq, 4), "of 'gptq', and so not"),
    "gptq v2": (lambda: forms.gptq(4, second=True), "of 'gptq', and so not"),
    "bitnet": (lambda: forms.bitnet(divide=True), "of 'bitnet', and so not"),
    "bitnet multiplied": (lambda: forms.bitnet(divide=False), "of 'bitnet', and so not"),
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_config_alone_says_is_not_guessed(name: str) -> None:
    make, told = UNSAID[name]
    tensors, dense, config = make()
    assert off(read(tensors, config).dense(), dense) < 1e-6
    for other in (None, {"quant_method": "fp8"}, {"quant_method": "torchao"}, {"quant_method": "mxfp4"}):
        with pytest.raises(ModelError, match=told):
            read(tensors, other)


def test_what_tensors_tell_needs_no_config() -> None:
    for form in ("awq gemm", "packed 4", "nf4 nested", "bitsandbytes 8", "hqq 3", "quanto 4", "torchao pairs"):
        tensors, dense, _ = FORMS[form][0]()
        assert off(read(tensors).dense(), dense) < 2e-3


@pytest.mark.parametrize("size", [-1, 32, 128])
def test_groups_that_config_denies(size: int) -> None:
    tensors, _, config = forms.gptq(4)
    with pytest.raises(ModelError, match=r"config\.json says groups of"):
        read(tensors, {**config, "group_size": size})


def test_scales_of_columns_are_not_scales_of_rows() -> None:
    data, scales = torch.ones(256, 256).to(torch.float8_e4m3fn), torch.rand(1, 256)
    with pytest.raises(ModelError, match="neither per row"):
        read({"weight": data, "weight_scale": scales}, {"quant_method": "fp8"}, (256, 256))
    for shape in ((256,), (256, 1)):
        found = read({"weight": data, "weight_scale": scales.view(shape)}, {"quant_method": "fp8"}, (256, 256))
        assert torch.equal(found.dense(), scales.view(-1, 1).expand(256, 256))


def test_groups_of_another_method_that_are_no_objects() -> None:
    tensors, dense, config = forms.modelopt()
    for groups in ({"a": 1}, {"a": None}, [1], {"a": {"weights": 3}}):
        assert off(read(tensors, {**config, "config_groups": groups}).dense(), dense) < 1e-6


def test_what_older_tools_say_beside_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == {"model_type": "llama"}
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"}')
    found = check_config(read_config(tmp_path))
    assert (found["quant_method"], found["checkpoint_format"]) == ("gptq", "gptq_v2")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq", "bits": 4}}')
    assert check_config(read_config(tmp_path))["quant_method"] == "awq"


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_what_config_says_counts_wherever_it_lies(key: str, tmp_path: Path) -> None:
    said = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    for config in ({key: said}, {"text_config": {key: said}}, {key: said, "text_config": {"hidden_size": 8}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_config(tmp_path)
        check_stored(found, "compressed-tensors", "here", gguf=False)
        assert found == {**config, "quantization_config": said}
        with pytest.raises(ModelError, match="is already quantised"):
            convert(tmp_path, tmp_path / "new", Recipe(4))


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_files_of_mlx_do_not_say_so(key: str, tmp_path: Path) -> None:
    """Their settings do, wherever they lie. Modes other than affine, and other sizes, are refused."""

    def found(**said: object) -> Mapping[str, object]:
        (tmp_path / "config.json").write_text(json.dumps({key: said}))
        config = read_config(tmp_path)
        assert set(config) == {"quantization_config"}, "other keys would be told to be unknown"
        check_stored(config, "mlx", "here", gguf=False)
        return check_config(config)

    assert found(group_size=64, bits=4, lm_head={"group_size": 32, "bits": 6}, a=False)["quant_method"] == "mlx"
    for odd in ({"mode": "mxfp4"}, {"bits": 7}, {"group_size": 16}, {"bits": True}, {"a": {"bits": [4]}}):
        with pytest.raises(ModelError, match=r"quantised with 'mlx' as .* is not supported"):
            found(**{"group_size": 64, "bits": 4, **odd})
    assert check_config({"quantization": {"quant_algo": "FP8"}}) == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [stored_forms.bitmask, stored_forms.bitmask_of_pairs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_of_pruned_matrices_are_looked_at(value: float, make: Any, dtype: torch.dtype) -> None:
    tensors = make(torch.randn(8, 32), dtype).tensors
    read(dict(tensors), {}, (8, 32))
    with pytest.raises(ModelError, match=r"w\.compressed' holds infinities or NaN"):
        read({**tensors, "compressed": changed(tensors["compressed"], value)}, {}, (8, 32))


def test_plain_numbers_that_config_json_calls_quantised(tmp_path: Path) -> None:
    """They were read as they are, in silence. Whoever wants that says so; compressed-tensors has a plain form."""
    base = make_tiny(tmp_path / "model")
    config, small = json.loads((base / "config.json").read_text()), {"kv_cache_memory_bytes": 4 << 20}
    dense = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    for said in ({"quant_method": "awq", "bits": 4}, {"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}):
        (base / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
        with pytest.raises(ModelError, match=rf"quantised with '{said['quant_method']}', but no tensor is.*null"):
            LLM(str(base), **small)
    for more in ({"hf_overrides": {"quantization_config": None}}, {"load_format": "dummy"}):
        LLM(str(base), **small, **more).close()
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": dense}))
    LLM(str(base), **small).close()


@pytest.mark.parametrize("form", ["gptq 4", "awq gemm", "packed 4", "nvfp4", "mxfp4", "hqq 4", "quanto 4", "torchao 4"])
def test_a_matrix_that_is_stored_twice(form: str) -> None:
    tensors, dense, config = FORMS[form][0]()
    with pytest.raises(ModelError, match="is stored twice: as weight and as"):
        read({**tensors, "weight": dense}, config, tuple(dense.shape))


def test_older_spellings_of_compressed_tensors() -> None:
    data, scales = torch.ones(256, 256).to(torch.float8_e4m3fn), torch.rand(2, 2)
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}
    config = forms.tensors_config("float-quantized", weights)
    found = read({"weight": data, "weight_scale": scales}, config, (256, 256)).dense()
    assert torch.equal(found, scales.repeat_interleave(128, 0).repeat_interleave(128, 1))
    for odd in ("64x64", "128", None, [128], 128, {}):
        weights["block_structure"] = odd
        with pytest.raises(ModelError, match="has blocks of"):
            check_config({"quantization_config": forms.tensors_config("float-quantized", weights)})
    tensors, _, config = forms.packed_integers(4)
    config["config_groups"]["group_0"]["weights"]["actorder"] = True
    with pytest.raises(ModelError, match="weight_g_idx' is missing"):
        read(tensors, config)
