"""Groups of columns that no kernel knows: shorter than 32 columns, no whole runs of 32, straddling rows, or ending
early. Files may have them; each is read as its numbers worked out by hand. Also matrices that are stored [in, out]
until a tool quantises them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.cpu.models.parity import DictCheckpoint
from tests.cpu.quant import stored_forms_helpers as forms
from torch import Tensor

from tokenmill.core.errors import ModelError
from tokenmill.kernels import make_kernels
from tokenmill.quant import compressed
from tokenmill.quant.detect import WeightRequest, check_config, load_weight
from tokenmill.quantize import recipes
from tokenmill.quantize.recipes import Recipe, complete_recipe

OUT = 32


def made(rows: int, columns: int, group: int, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and scales; the last group of a row may be shorter."""
    random, groups = torch.Generator().manual_seed(columns + group), -(-columns // group)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=random)
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=random)
    return codes, zeros, (torch.rand(rows, groups, generator=random) + 0.5).half()


def same(tensors: dict[str, Tensor], dense: Tensor, config: dict[str, Any]) -> None:
    """Read, settled on a CPU and cut for two ranks, it stays the matrix."""
    shape = (dense.shape[0], dense.shape[1])
    weight = forms.read(tensors, config, shape)
    assert torch.allclose(weight.dense(), dense, rtol=1e-6, atol=1e-6)
    half = weight.split(0, 1, 2).dense()
    assert torch.allclose(half, dense[shape[0] // 2 :], rtol=1e-6, atol=1e-6)
    named = DictCheckpoint({f"w.{name}": tensor for name, tensor in tensors.items()})
    how = check_config({"quantization_config": config})
    if shape[1] % 2 == 0:
        request = WeightRequest("w", shape, share=(1, 1, 2))
        part = load_weight(named, request, torch.float32, forms.CPU, None, how).dense()
        assert torch.allclose(part, dense[:, shape[1] // 2 :], rtol=1e-6, atol=1e-6)
    settled = weight.settle(make_kernels("cpu"))
    assert torch.allclose(settled.rows(torch.arange(shape[0])), dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("columns", "group"), [(96, 16), (96, 8), (96, 64), (160, 128), (160, 48), (320, 128)])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq(columns: int, group: int, ordered: bool) -> None:
    """GPTQ's last group may be shorter, also by what `g_idx` says."""
    codes, zeros, scales = made(OUT, columns, group)
    index = torch.arange(columns) // group
    index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(1))] if ordered else index
    tensors = {
        "qweight": forms.words_by_bit(codes, 4).T.contiguous(),
        "qzeros": forms.words_by_bit((zeros - 1).T, 4),
        "scales": scales.T.contiguous(),
        "g_idx": index.int(),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": ordered}
    dense = (codes - zeros[:, index]).float() * scales.float()[:, index]
    same(tensors, dense, config)
    with pytest.raises(ModelError, match="g_idx' does not divide"):
        forms.read({**tensors, "g_idx": index.clone().fill_(0).int()}, config, (OUT, columns))


@pytest.mark.parametrize("columns", [192, 128, 64])
@pytest.mark.parametrize(("rows", "bits"), [(1, 4), (3, 4), (1, 2), (5, 2), (6, 2)])
def test_quanto_with_parts_that_are_not_full(rows: int, bits: int, columns: int) -> None:
    """A byte holds a row of groups of each part; the last parts may lack some, and with two groups a file of 2 bits has
    the shape of one of 4."""
    codes, zeros, scales = made(rows, columns, 64, bits)
    dense = (codes - zeros.repeat_interleave(64, 1)).float() * scales.float().repeat_interleave(64, 1)
    groups, parts = codes.view(-1, 64), 8 // bits
    lines = -(-len(groups) // parts)
    full = torch.nn.functional.pad(groups, (0, 0, 0, lines * parts - len(groups))).view(parts, lines, 64)
    raw = sum(full[i] << bits * i for i in range(parts))
    tensors = {
        "weight._data._data": torch.as_tensor(raw).to(torch.uint8),
        "weight._scale": scales.float().view(-1, 1),
        "weight._shift": (scales.float() * zeros).view(-1, 1),
    }
    found = forms.read(tensors, {"quant_method": "quanto"}, (rows, columns)).dense()
    with pytest.raises(ModelError, match="does not lie in rows"):
        wide = {**tensors, "weight._data._data": tensors["weight._data._data"].float()}
        forms.read(wide, {"quant_method": "quanto"}, (rows, columns))
    assert torch.allclose(found, dense, atol=2e-2 * float(scales.max()))


@pytest.mark.parametrize(("columns", "group"), [(96, 16), (64, 8), (96, 48)])
@pytest.mark.parametrize("paired", [False, True])
def test_torchao(columns: int, group: int, paired: bool) -> None:
    codes, zeros, scales = made(OUT, columns, group)
    codes, zeros, wide = codes - 8, zeros - 8, scales.float().repeat_interleave(group, 1)
    if paired:
        bytes_ = (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
        tensors = {"_weight_qdata": bytes_, "_weight_scale": scales.T.float(), "_weight_zero_point": zeros.T.float()}
        dense = codes * wide + zeros.repeat_interleave(group, 1)
    else:
        tensors = {"_weight_qdata": codes.to(torch.int8), "_weight_scale": scales.float(),
                   "_weight_zero_point": zeros.to(torch.int8)}  # fmt: skip
        dense = (codes - zeros.repeat_interleave(group, 1)) * wide
    same(tensors, dense, {"quant_method": "torchao"})


@pytest.mark.parametrize(("rows", "bits", "parts"), [(8, 4, 2), (16, 2, 4), (24, 3, 3), (24, 7, 2), (8, 8, 2)])
def test_parts_of_few_rows(rows: int, bits: int, parts: int) -> None:
    """Zero points of few rows share a word, or do not fill their words: no rank cuts through one."""
    codes, zeros, scales = made(rows, 96, 32, bits)
    dense = (codes - zeros.repeat_interleave(32, 1)).float() * scales.float().repeat_interleave(32, 1)
    forms_ = [(
        {"weight_packed": forms.words_by_bit(codes, bits), "weight_scale": scales,
         "weight_zero_point": forms.words_by_bit(zeros.T, bits).T.contiguous(),
         "weight_shape": torch.tensor([rows, 96])},
        forms.tensors_config("pack-quantized", {"num_bits": bits, "type": "int", "strategy": "group",
                                                "group_size": 32, "symmetric": False}),
    )]  # fmt: skip
    if bits != 7:
        tensors = {"qweight": forms.words_by_bit(codes, bits).T, "qzeros": forms.words_by_bit((zeros - 1).T, bits),
                   "scales": scales.T}  # fmt: skip
        forms_.append((tensors, {"quant_method": "gptq", "bits": bits, "group_size": 32}))
    for tensors, config in forms_:
        named = DictCheckpoint({f"w.{name}": tensor.contiguous() for name, tensor in tensors.items()})
        how = check_config({"quantization_config": config})
        for part, wanted in enumerate(dense.chunk(parts)):
            request = WeightRequest("w", (rows, 96), share=(0, part, parts))
            found = load_weight(named, request, torch.float32, forms.CPU, None, how).dense()
            assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["plain", "compressed-tensors"])
def test_rows_of_any_length_are_pruned(form: str) -> None:
    recipe = complete_recipe(Recipe("magnitude", form=form, sparsity="0.5"))
    assert recipes.columns(recipe) == 1
    held = recipes.hold(recipe, torch.randn(6, 20, generator=torch.Generator().manual_seed(0)), 16, None, torch.float32)
    found = forms.read(held.tensors, None, (6, 20)).dense()
    assert torch.equal(found, held.dense) and bool(((found != 0).sum(1) == 10).all())


def test_rows_of_which_each_is_one_group() -> None:
    """Whatever their length is, they have a kernel."""
    codes, zeros, scales = made(OUT, 200, 200)
    tensors = {
        "qweight": forms.words_by_bit(codes, 4).T.contiguous(),
        "qzeros": forms.words_by_bit((zeros - 1).T, 4),
        "scales": scales.T.contiguous(),
    }
    weight = forms.read(tensors, {"quant_method": "gptq", "bits": 4, "group_size": -1}, (OUT, 200))
    assert torch.equal(weight.dense(), (codes - zeros).float() * scales.float()) and weight.bits == 4


@pytest.mark.parametrize(("columns", "group"), [(96, 16), (96, 64), (160, 128)])
def test_awq(columns: int, group: int) -> None:
    codes, zeros, scales = made(OUT, columns, group)

    def together(numbers: Tensor) -> Tensor:
        parts = numbers.view(numbers.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return forms.words_by_bit(parts.flatten(1), 4)

    tensors = {"qweight": together(codes.T), "qzeros": together(zeros.T), "scales": scales.T.contiguous()}
    index = torch.arange(columns) // group
    dense = (codes - zeros[:, index]).float() * scales.float()[:, index]
    same(tensors, dense, {"quant_method": "awq", "bits": 4, "group_size": group})


@pytest.mark.parametrize("group", [8, 16, 48])
def test_compressed_tensors(group: int) -> None:
    codes, zeros, scales = made(OUT, 96, group)
    tensors = {
        "weight_packed": forms.words_by_bit(codes, 4),
        "weight_scale": scales,
        "weight_zero_point": forms.words_by_bit(zeros.T, 4).T.contiguous(),
    }
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": False}
    index = torch.arange(96) // group
    dense = (codes - zeros[:, index]).float() * scales.float()[:, index]
    same(tensors, dense, forms.tensors_config("pack-quantized", weights))


@pytest.mark.parametrize(("columns", "group"), [(96, 64), (96, 128), (96, 8), (200, 40), (200, 200)])
def test_hqq(columns: int, group: int) -> None:
    """Its groups run on from one row to the next."""
    random = torch.Generator().manual_seed(group)
    count = OUT * columns // group
    codes = torch.randint(0, 16, (count, group), generator=random)
    scale, zero = torch.rand(count, 1, generator=random) + 0.5, torch.rand(count, 1, generator=random) * 15
    half = count // 2
    tensors = {"W_q": (codes[:half] << 4 | codes[half:]).to(torch.uint8), "scale": scale, "zero": zero}
    same(tensors, ((codes - zero) * scale).view(OUT, columns), {"quant_method": "hqq"})


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(32, 96), (32, 200), (31, 30), (3, 5)])
def test_bitsandbytes(rows: int, columns: int, nested: bool) -> None:
    """Its blocks of 64 do, too, and the last one may be shorter."""
    random, count = torch.Generator().manual_seed(rows), rows * columns
    codes, blocks = torch.randint(0, 16, (count,), generator=random), -(-count // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [rows, columns]}
    scales, tensors = torch.rand(blocks, generator=random) + 0.1, {}
    if nested:
        entries, table = torch.randint(0, 256, (blocks,), generator=random), torch.linspace(-1, 1, 256)
        tensors = {"weight.nested_quant_map": table, "weight.nested_absmax": torch.tensor([0.3])}
        state |= {"nested_blocksize": 256, "nested_offset": 0.6}
        scales = table[entries] * 0.3 + 0.6
    pairs = torch.nn.functional.pad(codes, (0, count % 2)).view(-1, 2)
    tensors |= {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        "weight.absmax": entries.to(torch.uint8) if nested else scales,
        "weight.quant_map": torch.tensor(forms.NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    dense = (torch.tensor(forms.NF4)[codes] * scales.repeat_interleave(64)[:count]).view(rows, columns)
    if rows % 2 == 0:
        same(tensors, dense, config)
    assert torch.allclose(forms.read(tensors, config, (rows, columns)).dense(), dense)


@pytest.mark.parametrize("field", ["blocksize", "nested_blocksize"])
def test_blocks_larger_than_the_matrix_take_no_memory(field: str) -> None:
    tensors, _, config = forms.bitsandbytes(nested=True)
    named = "weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[named].tolist()))
    tensors[named] = torch.tensor(list(json.dumps({**state, field: 1 << 50}).encode()), dtype=torch.uint8)
    if field == "blocksize":
        tensors["weight.absmax"] = tensors["weight.absmax"][:1]
    tensors["weight.nested_absmax"] = tensors["weight.nested_absmax"][:1]
    assert torch.isfinite(forms.read(tensors, config).dense()).all()


@pytest.mark.parametrize("name", ["gptq 4 ordered", "nf4 nested", "hqq 4", "bitsandbytes 8"])
def test_what_was_stored_turned_is_quantised_as_any_other(name: str) -> None:
    """GPT-2's matrices are stored [in, out]; GPTQ and bitsandbytes store their codes as they store any."""
    make, off, _ = forms.FORMS[name]
    tensors, dense, config = make()
    ckpt = DictCheckpoint({f"w.{part}": tensor for part, tensor in tensors.items()})
    how = check_config({"quantization_config": config})
    turned = WeightRequest("w", (forms.OUT, forms.IN), transposed=True)
    assert torch.allclose(load_weight(ckpt, turned, torch.float32, forms.CPU, None, how).dense(), dense, off, 2 * off)
    part = WeightRequest("w", (forms.OUT, forms.IN), transposed=True, share=(0, 1, 2))
    found = load_weight(ckpt, part, torch.float32, forms.CPU, None, how).dense()
    assert torch.allclose(found, dense[forms.OUT // 2 :], off, 2 * off)
    plain = DictCheckpoint({"w.weight": dense.T.contiguous()})
    assert torch.equal(load_weight(plain, turned, torch.float32, forms.CPU, None, {}).dense(), dense)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [2, 6, 8, 20, 30, 34])
def test_few_columns_of_any_number_of_bits(bits: int, columns: int) -> None:
    """A row of 8 columns takes one word with 2 to 4 bits: the settings say which it is. It was read as the
    last."""
    codes, _, scales = made(OUT, columns, columns, bits)
    weights = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": True}
    tensors = {
        "weight_packed": forms.words_by_bit(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUT, columns]),
    }
    dense = (codes - (1 << bits - 1)).float() * scales.float()
    weight = forms.read(tensors, compressed.config("pack-quantized", weights, None, []), (OUT, columns))
    assert torch.allclose(weight.dense(), dense, rtol=1e-6, atol=1e-6)


def test_few_columns_whose_bits_nothing_shows() -> None:
    codes, _, scales = made(OUT, 8, 8, 3)
    tensors = {"weight_packed": forms.words_by_bit(codes, 3), "weight_scale": scales}
    config = compressed.config("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "channel"}, None, [])
    other = {"num_bits": 4, "type": "int", "strategy": "channel"}
    config["config_groups"]["group_1"] = {"targets": ["re:x"], "weights": other}
    with pytest.raises(ModelError, match="may hold 3 or 4 bits a column"):
        forms.read(tensors, config, (OUT, 8))
    config["config_groups"] = {"group_0": {"targets": ["re:x"], "weights": other | {"num_bits": 7}}}
    with pytest.raises(ModelError, match=r"holds 2 or 3 or 4 bits a column: config\.json says 7"):
        forms.read(tensors, config, (OUT, 8))
