"""Weights as other tools store them: each read against its numbers worked out by hand, or by the tool's own package.

Then what becomes of every form: settled, joined, taken apart, split over ranks; and files that lie.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cpu.models.parity import DictCheckpoint
from tests.cpu.quant import stored_forms_helpers
from tests.cpu.quant.stored_forms_helpers import (
    FORMS,
    IN,
    OUT,
    Made,
    awq_gemm,
    awq_gemv,
    bitnet,
    bitsandbytes,
    eight_asymmetric,
    four_bit_floats,
    gptq,
    hqq,
    mlx,
    mlx_floats,
    packed_integers,
    quanto,
    read,
    squeezed,
    tensors_config,
    torchao,
    torchao_float8,
    torchao_pairs,
    two_of_four,
    words_by_bit,
)
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.quant import bits as packed
from tokenmill.quant.at_load import settle_all
from tokenmill.quant.detect import _UNREAD, WeightRequest, check_any_stored, check_config, load_weight


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_without_gaps(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 75))
    words = packed.pack(codes, bits)
    assert torch.equal(words, words_by_bit(codes, bits))
    assert torch.equal(packed.unpack(words, bits, 75), codes.to(torch.uint8))


def off(found: Tensor, dense: Tensor) -> float:
    return float((found - dense).abs().max() / dense.abs().max())


@pytest.mark.parametrize("name", FORMS)
def test_read_and_multiplied(name: str) -> None:
    make, exact, settled_error = FORMS[name]
    tensors, dense, config = make()
    shape = (dense.shape[0], dense.shape[1])
    assert off(read(tensors, config, shape).dense(), dense) <= exact
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(1))
    for kernels in (make_kernels("cpu"), ReferenceKernels()):
        weight = read(tensors, config, shape).settle(kernels)
        assert off(weight.rows(torch.tensor([3, 1, 3])), dense[[3, 1, 3]]) <= settled_error * 2
        every = weight.dense()
        assert weight.changed or off(every, dense) <= 1e-3, "what does not keep the file's numbers says so"
        y = weight.matmul(x, SimpleNamespace(kernels=kernels))  # activations may be rounded to 8 bits
        assert off(y, x @ dense.T) < 0.02
        alone = weight.matmul(x[2:3], SimpleNamespace(kernels=kernels))
        assert torch.equal(alone[0], y[2])


@pytest.mark.parametrize("name", ["mxfp8", "squeezellm 4"])
def test_neighbours_that_are_rounded_at_once_say_so_too(name: str) -> None:
    tensors, dense, config = FORMS[name][0]()
    kernels = ReferenceKernels()
    kernels.rounds_at_once = 1 << 30
    made = settle_all([read(tensors, config, (dense.shape[0], dense.shape[1])) for _ in range(3)], kernels)
    lone = read(tensors, config, (dense.shape[0], dense.shape[1])).settle(kernels)
    for one in made:
        assert one.changed and one.changed == lone.changed
        assert torch.equal(one.dense(), lone.dense())


@pytest.mark.parametrize("name", FORMS)
def test_joined_taken_and_split(name: str) -> None:
    make, exact, _ = FORMS[name]
    tensors, dense, config = make()
    shape = (dense.shape[0], dense.shape[1])

    def again() -> Any:
        return read(tensors, config, shape)

    joined = again().concat([again()])
    assert off(joined.dense(), torch.cat([dense, dense])) <= exact
    assert off(again().split(0, 1, 2).dense(), dense.chunk(2)[1]) <= exact
    if not name.startswith("fp8 blocks"):
        order = torch.tensor([5, 2, 40])
        assert off(again().take(order).dense(), dense[order]) <= exact
        if not name.startswith("bitnet"):  # rows of one block cannot be cut in two
            parts = [again().split(1, part, 2) for part in range(2)]
            assert off(torch.cat([part.dense() for part in parts], 1), dense) <= exact
            kernels = ReferenceKernels()
            x, ctx = torch.randn(3, shape[1]), SimpleNamespace(kernels=kernels)
            halves = [p.settle(kernels).matmul(h, ctx) for p, h in zip(parts, x.chunk(2, 1), strict=True)]
            assert off(halves[0] + halves[1], x @ dense.T) < 0.02


def changed(make: Callable[[], Made], name: str, value: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, _, config = make()
    tensors = dict(tensors)
    tensors[name] = value(tensors[name]) if callable(value) else value
    return {n: tensor for n, tensor in tensors.items() if tensor is not None}, config


LIES: dict[str, tuple[Callable[[], Made], str, Any, str]] = {
    "group beyond": (lambda: gptq(4, ordered=True), "g_idx", lambda t: t + 1, "names group"),
    "group below": (lambda: gptq(4, ordered=True), "g_idx", lambda t: t - 1, "names group"),
    "uneven groups": (lambda: gptq(4), "g_idx", lambda t: t.clamp(max=2), "does not divide"),
    "order as floats": (lambda: gptq(4), "g_idx", lambda t: t.float(), "must hold integers"),
    "short words": (lambda: gptq(4), "qweight", lambda t: t[:-1], "does not fit"),
    "words as floats": (lambda: gptq(4), "qweight", lambda t: t.float(), "must hold int32"),
    "too few zeros": (lambda: gptq(4), "qzeros", lambda t: t[:, :-1], "is not"),
    "odd groups": (lambda: gptq(4), "scales", lambda t: t[:3], "does not fit"),
    "gemv scales": (awq_gemv, "scales", lambda t: t[:, :-8], "do not fit"),
    "packed shape": (lambda: packed_integers(4), "weight_shape", torch.tensor([9, 9]), "is not"),
    "packed words": (lambda: packed_integers(4), "weight_packed", lambda t: t.float(), "must be int32"),
    "packed scales": (lambda: packed_integers(4), "weight_scale", lambda t: t[:, :3], "says groups of"),
    "infinite scales": (lambda: packed_integers(4), "weight_scale", lambda t: t * 1e9, "beyond float16"),
    "packed zeros": (lambda: packed_integers(4, zero=True), "weight_zero_point", lambda t: t[:1], "does not fit"),
    "nvfp4 scale": (lambda: four_bit_floats("NVFP4A16"), "weight_global_scale", torch.zeros(1), "one positive"),
    "nvfp4 groups": (lambda: four_bit_floats("NVFP4A16"), "weight_scale", lambda t: t[:, :2], "does not fit"),
    "mxfp4 nan": (lambda: four_bit_floats("MXFP4A16"), "weight_scale", lambda t: t * 0 + 255, "not numbers"),
    "mxfp4 groups": (lambda: four_bit_floats("MXFP4A16"), "weight_scale", lambda t: t[:, :2], "does not fit"),
    "bitnet code": (lambda: bitnet(divide=True), "weight", lambda t: t * 0 + 255, "none of -1, 0 and 1"),
    "bitnet scale": (lambda: bitnet(divide=True), "weight_scale", torch.zeros(1), "other than 0"),
    "nf4 short": (lambda: bitsandbytes(nested=False), "weight", lambda t: t[:-1], "must hold"),
    "nf4 state": (lambda: bitsandbytes(nested=False), "weight.quant_state.bitsandbytes__nf4",
                  torch.tensor([1], dtype=torch.uint8), "not JSON"),
    "nf4 blocks": (lambda: bitsandbytes(nested=False), "weight.absmax", lambda t: t[:-1], "is not"),
    "hqq shape": (lambda: hqq(4), "shape", torch.tensor([1, 2]), "has shape"),
    "hqq axis": (lambda: hqq(4), "axis", torch.tensor(0), "across rows"),
    "hqq bits": (lambda: hqq(4), "nbits", torch.tensor(5), "cannot be read"),
    "hqq zeros": (lambda: hqq(4), "zero", lambda t: t[:-1], "has shape"),
    "quanto scales": (quanto, "weight._scale", lambda t: t[:-1], "do not fit"),
    "torchao codes": (lambda: torchao(4), "_weight_qdata", lambda t: t[:, :-1], "does not fit"),
    "torchao code type": (lambda: torchao(4), "_weight_qdata", lambda t: t.float(), "does not fit"),
    "torchao scales": (lambda: torchao(4), "_weight_scale", lambda t: t[:, :3], "does not fit|groups of 32"),
    "torchao scale type": (lambda: torchao(4), "_weight_scale", lambda t: t.int(), "must hold floats"),
    "torchao zeros of floats": (torchao_float8, "_weight_zero_point", torch.ones(OUT, 1), "which have none"),
    "torchao rows": (torchao_float8, "_weight_scale", lambda t: t[:-1], "does not fit"),
    "torchao infinite": (lambda: torchao(4), "_weight_scale", lambda t: t * 1e9, "beyond float16"),
    "torchao zeros": (lambda: torchao(4), "_weight_zero_point", lambda t: t[:-1], "does not fit"),
    "torchao zero type": (lambda: torchao(4), "_weight_zero_point", lambda t: t.float(), "does not fit"),
    "torchao pair scales": (torchao_pairs, "_weight_scale", lambda t: t[:, :-1], "do not"),
    "torchao pair zeros": (torchao_pairs, "_weight_zero_point", lambda t: t[:-1], "do not"),
    "torchao pair zero type": (torchao_pairs, "_weight_zero_point", lambda t: t.int(), "do not"),
    "torchao tiles": (torchao_pairs, "_weight_scale_and_zero", torch.zeros(1), "scale_and_zero"),
    "torchao act": (torchao_pairs, "_weight_act_pre_scale", torch.zeros(1), "act_pre_scale"),
    "mlx words": (lambda: mlx(4), "weight", lambda t: t.view(torch.int32), "must hold uint32"),
    "mlx columns": (lambda: mlx(4), "weight", lambda t: t[:, :-1], "do not fit"),
    "mlx bits": (lambda: mlx(4), "weight", lambda t: t[:, ::2], r"holds 2 bits in groups of 64 \(affine\): conf"),
    "mlx groups": (lambda: mlx(4), "scales", lambda t: t[:, ::2], "do not fit"),
    "mlx scale type": (lambda: mlx(4), "scales", lambda t: t.int(), "must hold floats"),
    "mlx without scales": (lambda: mlx(4), "scales", None, "no tensor 'w.scales'"),
    "mlx without offsets": (lambda: mlx(4), "biases", None, "no tensor 'w.biases'"),
    "mlx infinite": (lambda: mlx(4), "biases", lambda t: t * float("inf"), "infinities or NaN"),
    "mlx twice": (lambda: mlx(4), "qbiases", torch.ones(OUT, 4), "'w.qbiases' lies beside"),
    "mlx mode": (lambda: (*mlx_floats("mxfp4")[:2], mlx(4, 32)[2]), "none", None,
                 r"holds 4 bits in groups of 32 \(mxfp4\): config.json says 4 bits in groups of 32 \(affine\)"),
    "mlx float bits": (lambda: mlx_floats("mxfp4"), "weight", lambda t: t[:, ::2], r"holds 2 bits in .*\(floats\)"),
    "mlx float rows": (lambda: mlx_floats("mxfp4"), "scales", lambda t: t[:-1], "do not fit"),
    "mlx float scale type": (lambda: mlx_floats("nvfp4"), "scales", lambda t: t.view(torch.int8), "must hold floats"),
    "mlx float nan": (lambda: mlx_floats("nvfp4"), "scales", lambda t: t | 127, "not numbers"),
    "mlx power nan": (lambda: mlx_floats("mxfp8"), "scales", lambda t: t | 255, "not numbers"),
    "mlx powers": (lambda: mlx_floats("mxfp4"), "scales", lambda t: t * 0 + 254, "float32's range"),
    "mlx float powers": (lambda: mlx_floats("mxfp8"), "scales", lambda t: t * 0 + 254, "float32's range"),
    "mlx offsets of floats": (lambda: mlx_floats("mxfp4"), "biases", torch.ones(OUT, 8), "must hold floats"),
    "bytes of another form": (lambda: gptq(4), "scales", lambda t: t.to(torch.uint8), "must hold floats"),
    "table rows": (squeezed, "lookup_table", lambda t: t[:-1], "does not fit"),
    "table width": (squeezed, "lookup_table", lambda t: t[:, :9], "does not fit"),
    "table type": (squeezed, "lookup_table", lambda t: t.int(), "must hold floats"),
    "table words": (squeezed, "qweight", lambda t: t[:-1], "does not fit"),
    "table word type": (squeezed, "qweight", lambda t: t.float(), "does not fit"),
    "outlier rows": (squeezed, "rows", lambda t: t[:-1], "is not"),
    "outlier starts": (squeezed, "rows", lambda t: t.flip(0), "does not divide"),
    "outlier order": (squeezed, "rows", lambda t: torch.cat((t[:1], t[2:3], t[1:2], t[3:])), "does not divide"),
    "outlier columns": (squeezed, "cols", lambda t: t + IN, "not there"),
    "outliers below": (squeezed, "cols", lambda t: t - IN, "not there"),
    "outlier types": (squeezed, "cols", lambda t: t.float(), "wrong shape or type"),
    "outlier values": (squeezed, "vals", lambda t: t[:-1], "wrong shape or type"),
    "nvfp4 nan": (lambda: four_bit_floats("NVFP4A16"), "weight_scale",
                  lambda t: torch.full(t.shape, 127, dtype=torch.uint8).view(t.dtype), "not numbers"),
    "mask": (lambda: two_of_four(torch.float32), "bitmask", lambda t: t | 255, "places for"),
    "mask type": (lambda: two_of_four(torch.float32), "bitmask", lambda t: t.float(), "must be uint8"),
    "turned numbers": (lambda: two_of_four(torch.float32), "compressed", lambda t: t.view(-1, 8).T, "does not fit"),
    "turned scales": (lambda: packed_integers(4), "weight_scale", lambda t: t.T.contiguous(), "says groups of"),
    "turned words": (awq_gemm, "qweight", lambda t: t.view(OUT // 2, -1), "does not fit"),
    "turned hqq": (lambda: hqq(4), "W_q", lambda t: t.T.contiguous(), "does not lie in rows"),
    "turned quanto": (quanto, "weight._data._data", lambda t: t.T.contiguous(), "does not lie in rows"),
    "packed scale type": (lambda: packed_integers(4), "weight_scale", lambda t: t.int(), "must hold floats"),
    "hqq scale type": (lambda: hqq(4), "scale", lambda t: t.int(), "must hold floats"),
    "nf4 scale type": (lambda: bitsandbytes(nested=False), "weight.absmax", lambda t: t.int(), "must hold floats"),
    "fp8 scale type": (lambda: two_of_four(torch.float8_e4m3fn), "weight_scale", lambda t: t.int(), "must hold floats"),
    "fp8 without scales": (lambda: two_of_four(torch.float8_e4m3fn), "weight_scale", None, "no scales beside it"),
    "mxfp8 without scales": (lambda: four_bit_floats("MXFP8A16"), "weight_scale", None, "no scales beside it"),
    "zero type": (eight_asymmetric, "weight_zero_point", lambda t: t.to(torch.uint8), "which does not fit"),
    "torchao unsigned zeros": (lambda: torchao(4), "_weight_zero_point", lambda t: t.to(torch.uint8), "does not fit"),
    "hqq rows": (lambda: hqq(3), "W_q", lambda t: torch.cat([t, t]), "do not fit"),
    "nested scale type": (lambda: bitsandbytes(nested=True), "weight.absmax", lambda t: t.float(), "must be uint8"),
    "outliers without rows": (squeezed, "rows", None, "rows' is missing"),
    "one scale for groups": (lambda: packed_integers(4), "weight_scale", lambda t: t.reshape(-1)[:1], "says groups of"),
    "larger groups": (lambda: packed_integers(4), "weight_scale", lambda t: t[:, ::2].contiguous(), "says groups of"),
    "packed without zeros": (lambda: packed_integers(4, zero=True), "weight_zero_point", None, "point' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_files_that_lie(name: str) -> None:
    make, tensor, value, told = LIES[name]
    tensors, config = changed(make, tensor, value)
    with pytest.raises(ModelError, match=told):
        read(tensors, config)


def told_lies(tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """What a careless or malicious writer may have put in a tensor's place."""
    yield "nothing", None
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool):
        yield f"{dtype}", tensor.to(dtype)
    if not tensor.ndim:
        yield "vector", tensor.repeat(5)
        return
    doubled = torch.cat([tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor] * 2).view(tensor.dtype)
    yield from {
        "row less": tensor[:-1], "column less": tensor[..., :-1], "rows twice": doubled, "flat": tensor.reshape(-1),
        "deeper": tensor[None], "empty": tensor[:0], "column": tensor.reshape(-1, 1), "row": tensor.reshape(1, -1),
        "scalar": tensor.reshape(-1)[0], "turned": tensor.mT.contiguous() if tensor.ndim == 2 else tensor.repeat(2),
    }.items()  # fmt: skip
    if tensor.is_floating_point():
        for value in (float("nan"), float("inf"), -1.0, 0.0):
            yield f"{value}", torch.full(tensor.shape, value).to(tensor.dtype)
        return
    info = torch.iinfo(tensor.dtype)
    for number in (info.min, info.max, 0, 1):
        yield f"{number}", torch.full_like(tensor, number)


class Strict(DictCheckpoint):
    """As files do, it says what is not there."""

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self.tensors:
            raise ModelError(f"The checkpoint has no tensor '{name}'.")
        return super().tensor(name, shape, dtype)


@pytest.mark.parametrize("name", FORMS)
def test_any_lie_about_any_tensor_is_read_or_refused_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permutations, groups, shapes and types: nothing breaks, and nothing is read beyond what is there."""
    monkeypatch.setattr(stored_forms_helpers, "DictCheckpoint", Strict)
    tensors, _, config = FORMS[name][0]()
    kernels = make_kernels("cpu")
    for part, tensor in tensors.items():
        for lie, value in told_lies(tensor):
            told = {**tensors, part: value} if value is not None else {n: t for n, t in tensors.items() if n != part}
            try:
                weight = read(told, config)
                assert weight.dense().shape == (OUT, IN), (part, lie)
                weight.settle(kernels)
            except ModelError as error:
                assert 10 < len(str(error)) < 400, (part, lie)


def values_of(config: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in it, with a key."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        yield config, key
        if isinstance(value, dict | list):
            yield from values_of(value)


ODD = (
    None,
    0,
    -1,
    2**40,
    1.5,
    float("inf"),
    True,
    "",
    "x",
    [],
    ["x"],
    [[1]],
    {},
    {"a": 5},
    {"group_0": {"weights": 5}},
)


@pytest.mark.parametrize(
    "more", [{"dynamic": {"a": {"bits": 4}}, "desc_act": False}, {"fmt": "e4m3"}, {"quant_config": {"a": {"axis": 1}}}],
    ids=["words", "floats", "hqq"],
)  # fmt: skip
def test_configs_of_any_type_are_read_or_refused(more: dict[str, Any]) -> None:
    for make, *_ in FORMS.values():
        config = {**make()[2], **more}
        for count, _ in enumerate(list(values_of(config))):
            for value in ODD:
                changed = copy.deepcopy(config)
                place, key = list(values_of(changed))[count]
                place[key] = value
                with contextlib.suppress(ModelError):
                    check_config({"quantization_config": changed})


ORDERED = {
    "gptq": (lambda: gptq(4, ordered=True), "g_idx", {"desc_act": True}),
    "packed": (lambda: packed_integers(4, ordered=True), "weight_g_idx", {"actorder": "group"}),
}


@pytest.mark.parametrize("name", ORDERED)
def test_an_order_that_the_config_promises(name: str) -> None:
    make, part, says = ORDERED[name]
    tensors, _, config = make()
    config = copy.deepcopy(config)
    weights = config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config
    weights |= says
    read(tensors, config)
    with pytest.raises(ModelError, match=f"{part}' is missing"):
        read({n: tensor for n, tensor in tensors.items() if n != part}, config)


@pytest.mark.parametrize("make", [lambda: gptq(4), awq_gemm], ids=["gptq", "awq"])
def test_groups_that_the_config_promises(make: Callable[[], Made]) -> None:
    tensors, dense, config = make()
    size = IN // tensors["scales"].shape[0]
    assert off(read(tensors, {**config, "group_size": size}).dense(), dense) <= 1e-6
    with pytest.raises(ModelError, match=f"says groups of {2 * size} columns"):
        read(tensors, {**config, "group_size": 2 * size})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "aqlm"}, "'aqlm', which is not supported"),
    "quark": ({"quant_method": "quark"}, "'quark', which is not supported"),
    "exl2": ({"quant_method": "exl2"}, "'exl2', which is not supported"),
    "squeezellm bits": ({"quant_method": "squeezellm", "wbits": 2}, "in 2 bits"),
    "gptq bits": ({"quant_method": "gptq", "bits": 1}, "in 1 bits"),
    "gptq form": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    "awq version": ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "gemv_fast"),
    "round": ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2x"}, "exllamav2x"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    "bitnet online": ({"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
                      "online"),
    "nf4 type": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "int4"),
    "rotations": (tensors_config("pack-quantized", {"num_bits": 4, "strategy": "group"}, transform_config={"a": 1}),
                  "rotations"),
    "sparsity": (tensors_config("dense", {"num_bits": 4, "strategy": "group"}, sparsity_config={"format": "x"}), "'x'"),
    "marlin": (tensors_config("marlin-24", {"num_bits": 4, "strategy": "group"}), "marlin-24"),
    "mxfp6": (tensors_config("mixed-precision", {"num_bits": 6, "type": "float", "strategy": "group"}), "6 bit float"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    config, told = REFUSED[name]
    with pytest.raises(ModelError, match=told):
        check_config({"quantization_config": config})


@pytest.mark.parametrize("form", ["auto_round:auto_gptq", "auto_round:auto_awq"])
def test_auto_round_files_are_the_others(form: str) -> None:
    tensors, dense, _ = gptq(4) if "gptq" in form else awq_gemm()
    config = {"quant_method": "auto-round", "bits": 4, "packing_format": form}
    assert off(read(tensors, config).dense(), dense) <= 1e-6


@pytest.mark.parametrize(
    ("name", "part", "value", "said"),
    [
        ("bitsandbytes 8", "weight_format", torch.zeros(0, dtype=torch.uint8), "is not 0"),
        ("bitsandbytes 8", "weight_format", torch.tensor([0, 1]), "is not 0"),
        ("hqq 4", "axis", torch.tensor(float("nan")), "axis' is not a number"),
        ("hqq 4", "nbits", torch.tensor([float("inf")]), "nbits' is not a number"),
    ],
)
def test_what_says_how_to_read_must_be_a_number(name: str, part: str, value: Tensor, said: str) -> None:
    tensors, _, config = FORMS[name][0]()
    with pytest.raises(ModelError, match=said):
        read({**tensors, part: value}, config)


@pytest.mark.parametrize("form", [4, "mxfp4", "nvfp4", None])
@pytest.mark.parametrize("keys", [64, 128])
def test_heads_of_mlx_lie_in_two_tensors(form: int | str | None, keys: int) -> None:
    """What latent attention absorbs: MLX turns the keys' part of each head before it rounds."""
    heads, values, latent, random = 3, OUT, IN, torch.Generator().manual_seed(4)
    made: dict[str, Tensor] = {}
    whole = []
    for part, size in (("embed_q", (latent, keys)), ("unembed_out", (values, latent))):
        sizes = {"bits": 4, "group_size": 64} if form == 4 else {"mode": form}
        wide = torch.randn(heads, *size, generator=random)
        if form is None:
            made[f"a.{part}.weight"] = wide
        else:
            codes = torch.randint(-(1 << 31), 1 << 31, (heads, size[0], size[1] // 8), generator=random).int()
            group = {4: 64, "mxfp4": 32, "nvfp4": 16}[form]
            scales = torch.rand(heads, size[0], size[1] // group, generator=random)
            scales = scales if form == 4 else (torch.randint(40, 99, scales.shape, generator=random)).byte()
            named = {"weight": codes.view(torch.uint32), "scales": scales} | ({"biases": -scales} if form == 4 else {})
            made |= {f"a.{part}.{name}": each for name, each in named.items()}
            how = {"quant_method": "mlx", "bits": 4, "group_size": 64, "a": sizes}
            wide = torch.stack([read({k: v[h] for k, v in named.items()}, how, size).dense() for h in range(heads)])
        whole.append(wide)
    dense = torch.cat((whole[0].transpose(1, 2), whole[1]), 1).flatten(0, 1)
    how = {"quant_method": "mlx", "bits": 4, "group_size": 64, "a": {} if form is None else sizes}

    def found(share: Any = None, shape: tuple[int, int] = (heads * (keys + values), latent)) -> Tensor:
        request = WeightRequest("a.kv_b_proj", shape, share=share)
        return load_weight(Strict(dict(made)), request, torch.float32, torch.device("cpu"), None, how).dense()

    assert torch.equal(found(), dense)
    assert torch.equal(found((0, 1, 3)), dense[keys + values : 2 * (keys + values)])
    with pytest.raises(ModelError, match=r"not fit|has shape"):
        found(shape=(heads * (keys + values) + 1, latent))
    with pytest.raises(ModelError, match=r"not fit|not \[|holds 2 bits"):
        found(shape=(heads * (2 * keys + values), latent))
    del made["a.unembed_out.weight"]
    with pytest.raises(ModelError, match="unembed_out"):
        found()


@pytest.mark.parametrize(("mine", "theirs"), [("gate_proj", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")])
@pytest.mark.parametrize("home", ["switch_mlp", "experts"])
def test_experts_of_mlx_lie_in_one_tensor(mine: str, theirs: str, home: str) -> None:
    if home == "experts":
        mine = theirs
    made = [mlx(4), mlx(4, offsets="biases")]
    made[1][0]["weight"] = made[1][0]["weight"].view(torch.int32).bitwise_not().view(torch.uint32)
    named = {f"m.{home}.{theirs}.{part}": torch.stack([one[0][part] for one in made]) for part in made[0][0]}
    ckpt, how = Strict(named), check_config({"quantization_config": made[0][2]})

    def found(name: str, shape: tuple[int, int] = (OUT, IN), share: Any = None) -> Tensor:
        request = WeightRequest(name, shape, share=share)
        return load_weight(ckpt, request, torch.float32, torch.device("cpu"), None, how).dense()

    for number, (tensors, _, config) in enumerate(made):
        alone = read(tensors, config).dense()
        assert torch.equal(found(f"m.experts.{number}.{mine}"), alone)
        assert torch.equal(found(f"m.experts.{number}.{mine}", share=(1, 1, 2)), alone[:, IN // 2 :])
        assert torch.equal(found(f"m.experts.{number}.{mine}", share=(0, 1, 2)), alone[OUT // 2 :])
    with pytest.raises(ModelError, match=r"has no expert 2\."):
        found(f"m.experts.2.{mine}")
    with pytest.raises(ModelError, match="do not fit"):
        found(f"m.experts.1.{mine}", (OUT, IN + 64))
    with pytest.raises(ModelError, match="has no tensor"):
        found("m.experts.1.other")


@pytest.mark.parametrize("form", _UNREAD)
def test_forms_that_are_not_read_are_told_by_their_tensors(form: str) -> None:
    """Whatever config.json says, or if it says nothing."""
    names = [f"model.layers.0.mlp.up_proj.{part}" for part in _UNREAD[form]]
    for how in ({}, {"quant_method": "gptq"}, {"quant_method": "compressed-tensors"}):
        with pytest.raises(ModelError, match=f"up_proj.* is quantised as {form}, which is not supported"):
            check_any_stored(how, names)
        check_any_stored(how, [*names[:1], "model.layers.0.mlp.down_proj.weight_packed"])
