"""Whole models in the forms that people download, with the logits of the same numbers unpacked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from tests.cpu.models import parity
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels import make_kernels

BASE = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None}  # fmt: skip
TABLE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TOKENS = [(7 * i + 3) % 96 for i in range(24)]


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., in] -> blocks [..., in / 32, 16] and scales, as gpt-oss ships them."""
    parts = weight.unflatten(-1, (-1, 32))
    powers = (parts.abs().amax(-1) / 6.0).log2().ceil().clamp(-120, 120)
    scaled = parts / torch.exp2(powers)[..., None]
    codes = (scaled.abs()[..., None] - TABLE).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (powers + 127).to(torch.uint8)


def test_gpt_oss_in_its_own_mxfp4(tmp_path: Path) -> None:
    """As Transformers widens the same blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = hf.GptOssConfig(**BASE, head_dim=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
                             sliding_window=8)  # fmt: skip
    model, said, tensors = parity.make(config, tmp_path)
    narrow = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")) and tensor.ndim == 3:
            blocks, scales = to_mxfp4(tensor.transpose(1, 2))
            narrow[f"{name}_blocks"], narrow[f"{name}_scales"] = blocks, scales
            wide = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
            model.get_parameter(name).data.copy_(wide)
        else:
            narrow[name] = tensor
    said["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    want = parity.theirs(model, TOKENS)
    found = parity.ours(parity.load(said, narrow), {"a": TOKENS}, [[("a", len(TOKENS))]])["a"]
    assert float((found - want).abs().max()) < 0.02 * float(want.abs().max())  # activations are rounded to 8 bits
    native = make_kernels("cpu")
    fast = parity.ours(parity.load(said, narrow, kernels=native), {"a": TOKENS}, [[("a", len(TOKENS))]], native)["a"]
    assert float((fast - want).abs().max()) < 0.02 * float(want.abs().max())


@pytest.mark.parametrize("inner", [96, 128])
def test_deepseek_in_block_fp8(inner: int, tmp_path: Path) -> None:
    """Experts and latent attention with a scale per 128 x 128 block, borders that no block ends at included."""
    config = hf.DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4}, intermediate_size=160, moe_intermediate_size=inner, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, n_shared_experts=1,
    )  # fmt: skip
    _, said, tensors = parity.make(config, tmp_path)
    narrow, wide = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not any(part in name for part in ("proj.weight", "_proj_with", "_a_proj")):
            narrow[name] = wide[name] = tensor
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        scales = torch.rand(rows, columns) * 0.001 + 0.001
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
        narrow[name] = (tensor / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        narrow[f"{name}_scale_inv"] = scales
        wide[name] = narrow[name].float() * spread
    kept = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    steps = [[("a", 7)], [("a", 17)]]
    want = parity.ours(parity.load(said, wide), {"a": TOKENS}, steps)["a"]
    narrowed = {**said, "quantization_config": kept}
    for kernels in (parity.ReferenceKernels(), make_kernels("cpu")):
        found = parity.ours(parity.load(narrowed, narrow, kernels=kernels), {"a": TOKENS}, steps, kernels)["a"]
        assert float((found - want).abs().max()) < 1e-4 * float(want.abs().max())


def _joined(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The same with each mixture's experts in two tensors, as Transformers holds them."""
    stems = sorted({name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name})
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for stem in stems:
        up, gate, down = (
            torch.stack([tensors[f"{stem}.{i}.{part}_proj.weight"] for i in range(count)])
            for part in ("up", "gate", "down")
        )
        found |= {f"{stem}.gate_up_proj": torch.cat((gate, up), 1), f"{stem}.down_proj": down}
    return found


@pytest.mark.parametrize(("inner", "block"), [(64, 128), (96, 128), (128, 128), (128, 1024)])
def test_experts_in_one_tensor_of_float8(inner: int, block: int, tmp_path: Path) -> None:
    """As Transformers writes them: a scale per 128 x 128 block of gate and up together, or one per matrix."""
    config = hf.Qwen3MoeConfig(**{**BASE, "hidden_size": 160}, head_dim=16, intermediate_size=32, num_experts=3,
                               num_experts_per_tok=2, moe_intermediate_size=inner)  # fmt: skip
    _, said, tensors = parity.make(config, tmp_path)
    tensors = _joined(tensors, 3)
    narrow, wide = dict(tensors), dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        tensor = tensors[name]
        scales = torch.rand(3, *(-(-size // block) for size in tensor.shape[1:])) * 0.001 + 0.001
        spread = scales.repeat_interleave(block, 1).repeat_interleave(block, 2)
        spread = spread[:, : tensor.shape[1], : tensor.shape[2]]
        narrow[name] = (tensor / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        narrow[f"{name}_scale_inv"], wide[name] = scales, narrow[name].float() * spread
    narrowed = {**said, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    steps = [[("a", 7)], [("a", 17)]]
    want = parity.ours(parity.load(said, wide), {"a": TOKENS}, steps)["a"]
    for kernels in (parity.ReferenceKernels(), make_kernels("cpu")):
        found = parity.ours(parity.load(narrowed, narrow, kernels=kernels), {"a": TOKENS}, steps, kernels)["a"]
        assert float((found - want).abs().max()) < 1e-4 * float(want.abs().max())
    name = next(name for name in narrow if name.endswith("down_proj_scale_inv"))
    for value in (float("nan"), float("inf")):
        with pytest.raises(ModelError, match="exceed float32's range"):
            parity.load(narrowed, {**narrow, name: torch.full_like(narrow[name], value)})
    powers = torch.full(narrow[name].shape, 120, dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"down_proj_scale_inv' holds bytes, and config\.json does not say"):
        parity.load(narrowed, {**narrow, name: powers})
    by_powers = {"quantization_config": {**narrowed["quantization_config"], "scale_fmt": "ue8m0"}}
    parity.load({**narrowed, **by_powers}, {**narrow, name: powers})
    for shape in ((3, 7, 1), (2, 1, 1), (3,)):
        with pytest.raises(ModelError, match=r"experts.*(does not fit|neither per row)"):
            parity.load(narrowed, {**narrow, name: torch.ones(shape)})


@pytest.mark.parametrize("scales", ["_scale", "_scales", "_scale_inv"])
def test_experts_in_one_tensor_of_other_codes_are_told_as_such(scales: str, tmp_path: Path) -> None:
    config = hf.Qwen3MoeConfig(**BASE, head_dim=16, intermediate_size=32, num_experts=2, num_experts_per_tok=1,
                               moe_intermediate_size=32)  # fmt: skip
    _, said, tensors = parity.make(config, tmp_path)
    tensors = _joined(tensors, 2)
    for name in [name for name in tensors if ".experts." in name]:
        tensors |= {name: tensors[name].to(torch.int8), f"{name}{scales}": torch.ones(2, 1, 1)}
    for more in ({}, {"quantization_config": {"quant_method": "fp8"}}):
        with pytest.raises(ModelError, match=rf"gate_up_proj' holds codes with scales of their own, '.*{scales}'"):
            parity.load({**said, **more}, tensors)
