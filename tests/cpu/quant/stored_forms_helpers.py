"""What test_stored_forms.py and other tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import preset_name_to_scheme
from tests.cpu.models.parity import DictCheckpoint
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.quant import sparse
from tokenmill.quant.detect import WeightRequest, check_config, load_weight

OUT, IN, GROUP = 64, 256, 64
CPU = torch.device("cpu")
Made = tuple[dict[str, Tensor], Tensor, dict[str, Any]]
"""Tensors below a name, the matrix that they mean, and what config.json says."""


def read(tensors: dict[str, Tensor], config: dict[str, Any] | None = None, shape: tuple[int, int] = (OUT, IN)) -> Any:
    class Strict(DictCheckpoint):
        def tensor(self, name: str, shape: Any = None, dtype: Any = None) -> Tensor:
            if not self.has(name):
                raise ModelError(f"The checkpoint has no tensor '{name}'.")
            found = super().tensor(name, shape, dtype)
            if shape is not None and tuple(found.shape) != tuple(shape):
                raise ModelError(f"{name}: {tuple(found.shape)} is not {shape}")
            return found

    how = check_config({"quantization_config": config}) if config else {}
    named = {f"w.{name}": tensor for name, tensor in tensors.items()}
    return load_weight(Strict(named), WeightRequest("w", shape), torch.float32, CPU, None, how)


def numbers(bits: int, groups: int = IN // GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and scales [out, groups]."""
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (OUT, IN), generator=random)
    zeros = torch.randint(1, (1 << bits) - 1, (OUT, groups), generator=random)
    return codes, zeros, (torch.rand(OUT, groups, generator=random) + 0.5).half()


def meant(codes: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None = None) -> Tensor:
    index = torch.arange(IN) // (IN // scales.shape[1]) if index is None else index
    return (codes - zeros[:, index]).float() * scales[:, index].float()


def words_by_bit(codes: Tensor, bits: int) -> Tensor:
    """codes [n, m] -> int32 words, bit by bit."""
    rows = []
    for row in codes.tolist():
        stream = sum(code << i * bits for i, code in enumerate(row))
        rows.append([(stream >> 32 * i) & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def gptq(bits: int, *, second: bool = False, ordered: bool = False, middle: bool = False) -> Made:
    codes, zeros, scales = numbers(bits)
    zeros = torch.full_like(zeros, 1 << (bits - 1)) if middle else zeros
    index = torch.arange(IN) // GROUP
    if ordered:
        index = index[torch.randperm(IN, generator=torch.Generator().manual_seed(9))]
    tensors = {
        "qweight": words_by_bit(codes, bits).T.contiguous(),
        "qzeros": words_by_bit((zeros - (0 if second else 1)).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": index.to(torch.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2" if second else "gptq"}
    return tensors, meant(codes, zeros, scales, index), config


def awq_gemm() -> Made:
    codes, zeros, scales = numbers(4)

    def together(columns: Tensor) -> Tensor:
        parts = columns.view(columns.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words_by_bit(parts.flatten(1), 4)

    tensors = {"qweight": together(codes.T), "qzeros": together(zeros.T), "scales": scales.T.contiguous()}
    return tensors, meant(codes, zeros, scales), {"quant_method": "awq", "bits": 4, "version": "gemm"}


def awq_gemv() -> Made:
    codes, zeros, scales = numbers(4)
    filled = torch.nn.functional.pad(zeros, (0, 16 - zeros.shape[1])), torch.nn.functional.pad(scales, (0, 12))
    tensors = {"qweight": words_by_bit(codes, 4), "qzeros": words_by_bit(filled[0], 4), "scales": filled[1]}
    return tensors, meant(codes, zeros, scales), {"quant_method": "awq", "bits": 4, "version": "gemv"}


def packed_integers(bits: int, *, zero: bool = False, ordered: bool = False) -> Made:
    codes, zeros, scales = numbers(bits)
    half = 1 << (bits - 1)
    zeros = zeros if zero else torch.full_like(zeros, half)
    index = (torch.arange(IN) // GROUP).flip(0) if ordered else torch.arange(IN) // GROUP
    tensors = {
        "weight_packed": pack_to_int32((codes - half).to(torch.int8), bits),
        "weight_scale": scales.float(),
        "weight_shape": torch.tensor([OUT, IN]),
    }
    if zero:
        tensors["weight_zero_point"] = pack_to_int32((zeros - half).to(torch.int8), bits, packed_dim=0)
    if ordered:
        tensors["weight_g_idx"] = index.to(torch.int32)
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": not zero}
    return tensors, meant(codes, zeros, scales, index), tensors_config("pack-quantized", weights)


def tensors_config(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


def eight_asymmetric() -> Made:
    codes, zeros, scales = numbers(8, 1)
    tensors = {
        "weight": (codes - 128).to(torch.int8),
        "weight_scale": scales.float(),
        "weight_zero_point": (zeros - 128).to(torch.int8),
    }
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    return tensors, meant(codes, zeros, scales), tensors_config("int-quantized", weights)


def four_bit_floats(name: str) -> Made:
    """As the package compresses them, and widens them again."""
    compressor: Any = {"NVFP4A16": NVFP4PackedCompressor, "MXFP4A16": MXFP4PackedCompressor,
                       "MXFP8A16": MXFP8QuantizationCompressor}[name]  # fmt: skip
    scheme = preset_name_to_scheme(name, ["Linear"])
    group = 16 if name == "NVFP4A16" else 32
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3))
    top = weight.view(OUT, -1, group).abs().amax(-1)
    state = {"weight": weight}
    if name == "NVFP4A16":
        whole = torch.tensor([512.0])  # the package widens to bfloat16: a power of two loses nothing
        state |= {"weight_scale": (top * whole / 6.0).to(torch.float8_e4m3fn).float(), "weight_global_scale": whole}
    else:
        largest = {"MXFP4A16": 6.0, "MXFP8A16": 448.0}[name]
        state["weight_scale"] = torch.exp2((top / largest).log2().ceil())
    tensors = compressor.compress(state, scheme)
    dense = compressor.decompress(dict(tensors), scheme)["weight"].float()
    form = {"N": "nvfp4-pack-quantized", "M": "mxfp4-pack-quantized"}[name[0]]
    form = "mxfp8-quantized" if name == "MXFP8A16" else form
    weights = {"num_bits": 8 if "8" in name[:5] else 4, "type": "float", "strategy": "group", "group_size": group}
    return tensors, dense, tensors_config(form, weights)


def modelopt() -> Made:
    tensors, dense, _ = four_bit_floats("NVFP4A16")
    tensors = {
        "weight": tensors["weight_packed"],
        "weight_scale": tensors["weight_scale"],
        "weight_scale_2": 1.0 / tensors["weight_global_scale"][0],
        "input_scale": torch.tensor(0.5),
    }
    return tensors, dense, {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def bitnet(*, divide: bool) -> Made:
    from transformers.integrations.bitnet import pack_weights

    values = torch.randint(-1, 2, (OUT, IN), generator=torch.Generator().manual_seed(4))
    tensors = {"weight": pack_weights(values.clone()), "weight_scale": torch.tensor([0.25])}
    config = {"quant_method": "bitnet", "linear_class": "bitlinear" if divide else "autobitlinear"}
    return tensors, values.float() * (4.0 if divide else 0.25), config


NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip


def bitsandbytes(*, nested: bool) -> Made:
    random = torch.Generator().manual_seed(5)
    codes, count = torch.randint(0, 16, (OUT, IN), generator=random), OUT * IN // 64
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [OUT, IN]}
    scales = torch.rand(count, generator=random) + 0.1
    tensors: dict[str, Tensor] = {}
    if nested:
        entries = torch.randint(0, 256, (count,), generator=random)
        table, wide = torch.linspace(-1, 1, 256), torch.tensor([0.3])
        tensors = {"weight.nested_quant_map": table, "weight.nested_absmax": wide}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.6}
        scales = table[entries] * 0.3 + 0.6
    tensors |= {
        "weight": (codes.view(-1, 2)[:, :1] << 4 | codes.view(-1, 2)[:, 1:]).to(torch.uint8),
        "weight.absmax": entries.to(torch.uint8) if nested else scales,
        "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    dense = torch.tensor(NF4)[codes].view(-1, 64) * scales[:, None]
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return tensors, dense.view(OUT, IN), config


def bitsandbytes_eight() -> Made:
    q = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8)
    largest = torch.rand(OUT) + 0.5
    tensors = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, q.float() * largest[:, None] / 127.0, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def hqq(bits: int) -> Made:
    random = torch.Generator().manual_seed(6)
    lines = OUT * IN // GROUP
    codes = torch.randint(0, 1 << bits, (lines, GROUP), generator=random)
    scale, zero = torch.rand(lines, 1, generator=random) + 0.5, torch.rand(lines, 1, generator=random) * 3
    count = 10 if bits == 3 else 8 // bits
    filled = torch.nn.functional.pad(codes, (0, 0, 0, -lines % count))
    raw = sum(part << bits * (count - 1 - i) for i, part in enumerate(filled.chunk(count)))
    assert isinstance(raw, Tensor)
    tensors = {"W_q": raw.to(torch.int32 if bits == 3 else torch.uint8), "scale": scale, "zero": zero,
               "nbits": torch.tensor(bits), "axis": torch.tensor(1), "shape": torch.tensor([OUT, IN])}  # fmt: skip
    return tensors, ((codes - zero) * scale).view(OUT, IN), {"quant_method": "hqq"}


def quanto() -> Made:
    random = torch.Generator().manual_seed(7)
    lines = OUT * IN // 128
    codes = torch.randint(0, 16, (lines, 128), generator=random)
    scale, shift = torch.rand(lines, 1, generator=random) + 0.5, torch.rand(lines, 1, generator=random) * 5
    low, high = codes.chunk(2)
    tensors = {"weight._data._data": (low | high << 4).to(torch.uint8), "weight._scale": scale, "weight._shift": shift}
    return tensors, (codes * scale - shift).view(OUT, IN), {"quant_method": "quanto"}


def quanto_eight() -> Made:
    q, scale = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8), torch.rand(OUT, 1) + 0.5
    tensors = {"weight._data": q, "weight._scale": scale, "input_scale": torch.ones(()), "output_scale": torch.ones(())}
    return tensors, q.float() * scale, {"quant_method": "quanto"}


def torchao(bits: int, *, zero: bool = True, whole: bool = False) -> Made:
    """Int8Tensor and IntxUnpackedToInt8Tensor of torchao 0.18: codes as they are, whatever their width."""
    codes, zeros, scales = numbers(bits, 1 if whole else IN // GROUP)
    half = 1 << (bits - 1)
    zeros = zeros if zero else torch.full_like(zeros, half)
    tensors = {
        "_weight_qdata": (codes - half).to(torch.int8),
        "_weight_scale": scales.float(),
        "_weight_zero_point": (zeros - half).to(torch.int8),
    }
    return tensors, meant(codes, zeros, scales), {"quant_method": "torchao", "quant_type": {"default": {}}}


def torchao_pairs() -> Made:
    """Int4Tensor: two codes a byte, and a number that is added."""
    codes, _, scales = numbers(4)
    points = torch.randn(scales.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    low, high = codes[:, 0::2] - 8 & 15, codes[:, 1::2] - 8 & 15
    tensors = {"_weight_qdata": (low | high << 4).to(torch.uint8).view(torch.int8), "_weight_scale": scales.T.clone(),
               "_weight_zero_point": points.T.clone()}  # fmt: skip
    wide = [t.float().repeat_interleave(GROUP, 1) for t in (scales, points)]
    return tensors, (codes - 8) * wide[0] + wide[1], {"quant_method": "torchao"}


def torchao_float8() -> Made:
    random = torch.Generator().manual_seed(3)
    data, scale = torch.randn(OUT, IN, generator=random).to(torch.float8_e4m3fn), torch.rand(OUT, 1) + 0.5
    return {"_weight_qdata": data, "_weight_scale": scale}, data.float() * scale, {"quant_method": "torchao"}


def swizzled(scales: Tensor) -> Tensor:
    """As torchao writes scales for tensor cores: blocks of 128 rows and 4 groups, whose rows r, r + 32, r + 64 and
    r + 96 lie side by side."""
    rows, groups = scales.shape
    tall, wide = -(-rows // 128), -(-groups // 4)
    flat = torch.zeros(tall * wide * 512, dtype=torch.uint8)
    for r in range(rows):
        for g in range(groups):
            block = r // 128 * wide + g // 4
            flat[block * 512 + r % 32 * 16 + r % 128 // 32 * 4 + g % 4] = scales.view(torch.uint8)[r, g]
    return flat.view(32 * tall, 16 * wide).view(scales.dtype)


def torchao_fine(name: str, *, swizzle: bool = False) -> Made:
    """MXTensor and NVFP4Tensor: the numbers of compressed-tensors."""
    tensors, dense, _ = four_bit_floats(f"{name}A16")
    scales = tensors["weight_scale"]
    scales = scales if name == "NVFP4" else scales.view(torch.float8_e8m0fnu)
    made = {"_weight_qdata": tensors["weight" if name == "MXFP8" else "weight_packed"],
            "_weight_scale": swizzled(scales) if swizzle else scales}  # fmt: skip
    if name == "NVFP4":
        made["_weight_per_tensor_scale"] = 1.0 / tensors["weight_global_scale"][0]
    return made, dense, {"quant_method": "torchao"}


def squeezed(bits: int = 4, *, sparse: bool = True) -> Made:
    random = torch.Generator().manual_seed(9)
    codes, table = torch.randint(0, 1 << bits, (OUT, IN), generator=random), torch.randn(OUT, 1 << bits).half()
    dense = table.float().gather(1, codes)
    tensors = {"qweight": words_by_bit(codes, bits).T.contiguous(), "lookup_table": table}
    if sparse:
        added = torch.randn(OUT, IN) * (torch.rand(OUT, IN, generator=random) < 0.01)
        row, column = added.nonzero(as_tuple=True)
        starts = torch.cat((torch.zeros(1), torch.bincount(row, minlength=OUT).cumsum(0)))
        tensors |= {"rows": starts.int(), "cols": column.int(), "vals": added[row, column]}
        dense = dense + added
    return tensors, dense, {"quant_method": "squeezellm", "wbits": bits}


def two_of_four(dtype: torch.dtype) -> Made:
    random = torch.Generator().manual_seed(8)
    weight = torch.randn(OUT, IN, generator=random)
    kept = torch.zeros_like(weight, dtype=torch.bool)
    kept.view(-1, 4).scatter_(1, weight.abs().view(-1, 4).topk(2).indices, True)
    values, tensors = (weight * kept).to(dtype), {}
    if dtype == torch.float8_e4m3fn:
        tensors["weight_scale"] = torch.rand(OUT, 1, generator=random)
    bits = values.view(torch.uint8) if dtype.itemsize == 1 else values
    tensors |= {"compressed": bits[kept].view(dtype).view(OUT, -1), "bitmask": sparse.pack_mask(kept),
                "shape": torch.tensor([OUT, IN])}  # fmt: skip
    dense = values.float() * tensors.get("weight_scale", 1.0)
    return tensors, dense, {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
                            "sparsity_config": {"format": "sparse-24-bitmask"}}  # fmt: skip


def mlx(bits: int, group: int = GROUP, offsets: str = "biases") -> Made:
    codes, zeros, scales = numbers(bits, IN // group)
    less = (-(zeros + 0.3) * scales.float()).half()
    tensors = {"weight": words_by_bit(codes, bits).view(torch.uint32), "scales": scales, offsets: less}
    wide = [t.double().repeat_interleave(group, 1) for t in (scales, less)]
    named = {"bits": bits, "group_size": group, "mode": "affine"}
    config = {"quant_method": "mlx", "bits": 4, "group_size": 64, "w": named, "w.another": False}
    return tensors, (codes.double() * wide[0] + wide[1]).float(), config


def mlx_floats(mode: str) -> Made:
    """The tensors of compressed-tensors under MLX's names, in words."""
    tensors, dense, _ = four_bit_floats(f"{mode.upper()}A16")
    codes = tensors.get("weight_packed", tensors.get("weight"))
    assert codes is not None
    scales = tensors["weight_scale"].view(torch.uint8)
    if mode == "nvfp4":
        dense = dense * 512.0  # there is no scale of the whole matrix
    made = {"weight": codes.view(torch.uint8).view(torch.uint32), "scales": scales}
    sizes = {"bits": 8 if mode == "mxfp8" else 4, "group_size": 16 if mode == "nvfp4" else 32, "mode": mode}
    return made, dense, {"quant_method": "mlx", "bits": 4, "group_size": 64, "w": sizes, "other": {"mode": "mxfp8"}}


def block_fp8(*, powers: bool) -> Made:
    data = torch.randn(256, 384, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-6, 3, (2, 3)).float()) if powers else torch.rand(2, 3) + 0.5
    dense = data.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    stored = scales.to(torch.float8_e8m0fnu) if powers else scales
    return {"weight": data, "weight_scale_inv": stored}, dense, {"quant_method": "fp8", "weight_block_size": [128, 128]}


# Made, the largest error of what is read over the largest number, and of what it settles into.
FORMS: dict[str, tuple[Callable[[], Made], float, float]] = {
    **{f"gptq {bits}": (partial(gptq, bits), 1e-6, 1e-6) for bits in (2, 3, 4, 8)},
    **{f"gptq {bits} middle": (partial(gptq, bits, middle=True), 1e-6, 1e-6) for bits in (3, 4, 8)},
    "gptq v2": (lambda: gptq(4, second=True), 1e-6, 1e-6),
    **{f"gptq {bits} ordered": (partial(gptq, bits, ordered=True), 1e-6, 1e-6) for bits in (3, 4)},
    "awq gemm": (awq_gemm, 1e-6, 1e-6),
    "awq gemv": (awq_gemv, 1e-6, 1e-6),
    **{f"packed {bits}": (partial(packed_integers, bits), 1e-6, 1e-6) for bits in range(2, 9)},
    **{f"packed {bits} zero": (partial(packed_integers, bits, zero=True), 1e-6, 1e-6) for bits in (2, 4, 8)},
    "packed ordered": (lambda: packed_integers(4, ordered=True), 1e-6, 1e-6),
    "int8 zero": (eight_asymmetric, 1e-6, 1e-6),
    "nvfp4": (lambda: four_bit_floats("NVFP4A16"), 1e-6, 6e-3),
    "mxfp4": (lambda: four_bit_floats("MXFP4A16"), 1e-6, 1e-6),
    "mxfp8": (lambda: four_bit_floats("MXFP8A16"), 1e-6, 6e-3),
    "modelopt nvfp4": (modelopt, 1e-6, 6e-3),
    "bitnet": (lambda: bitnet(divide=False), 1e-6, 1e-6),
    "bitnet divided": (lambda: bitnet(divide=True), 1e-6, 1e-6),
    "nf4": (lambda: bitsandbytes(nested=False), 1e-6, 5e-3),
    "nf4 nested": (lambda: bitsandbytes(nested=True), 1e-6, 5e-3),
    "bitsandbytes 8": (bitsandbytes_eight, 5e-4, 5e-4),
    **{f"hqq {bits}": (partial(hqq, bits), 2e-3, 6e-3) for bits in (8, 4, 3, 2)},
    "quanto 4": (quanto, 2e-3, 2e-3),
    "quanto 8": (quanto_eight, 5e-4, 5e-4),
    **{f"torchao {bits}": (partial(torchao, bits), 1e-6, 1e-6) for bits in (2, 4, 5)},
    "torchao 8": (lambda: torchao(8, zero=False, whole=True), 1e-6, 1e-6),
    "torchao pairs": (torchao_pairs, 1e-6, 4e-3),
    "torchao float8": (torchao_float8, 1e-6, 1e-6),
    "torchao mxfp4": (lambda: torchao_fine("MXFP4"), 1e-6, 1e-6),
    "torchao mxfp8": (lambda: torchao_fine("MXFP8", swizzle=True), 1e-6, 6e-3),
    "torchao nvfp4": (lambda: torchao_fine("NVFP4", swizzle=True), 1e-6, 6e-3),
    **{f"mlx {bits}": (partial(mlx, bits), 1e-6, 2e-3) for bits in (2, 3, 4, 5, 6, 8)},
    **{f"mlx 4 by {group}": (partial(mlx, 4, group), 1e-6, 2e-3) for group in (32, 128)},
    "mlx mxfp4": (lambda: mlx_floats("mxfp4"), 1e-6, 1e-6),
    "mlx mxfp8": (lambda: mlx_floats("mxfp8"), 1e-6, 1e-2),
    "mlx nvfp4": (lambda: mlx_floats("nvfp4"), 1e-6, 6e-3),
    "metal 4": (lambda: mlx(4, offsets="qbiases"), 1e-6, 2e-3),
    **{f"squeezellm {bits}": (partial(squeezed, bits), 1e-6, 6e-3) for bits in (3, 4)},
    "squeezellm dense": (lambda: squeezed(sparse=False), 1e-6, 6e-3),
    "2:4": (lambda: two_of_four(torch.float32), 1e-6, 1e-6),
    "2:4 fp8": (lambda: two_of_four(torch.float8_e4m3fn), 1e-6, 1e-6),
    "fp8 blocks": (lambda: block_fp8(powers=False), 1e-6, 1e-6),
    "fp8 blocks by powers": (lambda: block_fp8(powers=True), 1e-6, 1e-6),
}
