"""float8 weights: rounding, joining and splitting, files of both kinds, whole models; AutoAWQ and GPTQ words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tokenmill import LLM, SamplingParams
from tokenmill.cli.verbs import app
from tokenmill.compute.forward import NormSpec
from tokenmill.core.errors import ModelError
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.kernels.fp8 import FP8, round_rows, widen
from tokenmill.kernels.grid import widen as widen_grid
from tokenmill.quant import compressed, detect, fp8, gptq_awq
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.fp8 import Fp8Weight
from tokenmill.quant.grid import GridWeight
from tokenmill.runner.batch import bare_context
from tokenmill.testing.tiny import make_tiny

SMALL = {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 4}


def test_rounding_is_to_the_nearest() -> None:
    weight = torch.randn(40, 96)
    weight[7] = 0
    data, scales = round_rows(weight)
    assert data.dtype == FP8 and data[7].float().count_nonzero() == 0
    error = (widen(data, scales) - weight).abs()
    assert bool((error <= torch.maximum(weight.abs() / 16, scales * 2.0**-10) * 1.001).all())


def block_weight(rows: int, columns: int, bias: bool = False) -> Fp8Weight:
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    return Fp8Weight(
        torch.randn(rows, columns).to(FP8), scales, torch.float32, torch.randn(rows) if bias else None, blocks=True
    )


def test_blocks_join_split_and_move_whole() -> None:
    a, b = block_weight(256, 320), block_weight(130, 320, bias=True)
    joined = a.concat([b])
    assert isinstance(joined, Fp8Weight) and torch.equal(joined.dense(), torch.cat([a.dense(), b.dense()]))
    assert joined.bias is not None and torch.equal(joined.bias[256:], b.bias) and not joined.bias[:256].any()
    assert torch.equal(a.split(0, 1, 2).dense(), a.dense()[128:])
    moved = torch.cat([torch.arange(128, 256), torch.arange(0, 128)])
    assert torch.equal(a.take(moved).dense(), a.dense()[moved])
    assert torch.equal(a.rows(torch.tensor([200, 3])), a.dense()[[200, 3]])
    wide = block_weight(128, 512)
    assert torch.equal(wide.split(1, 1, 2).dense(), wide.dense()[:, 256:])
    for cut in (torch.tensor([5, 6]), torch.arange(255, -1, -1), torch.arange(0, 256, 2)):
        for weight in (a, block_weight(256, 96, bias=True)):
            taken = weight.take(cut)
            assert torch.equal(taken.dense(), weight.dense()[cut]), "blocks that are cut apart"
            assert weight.bias is None or torch.equal(taken.bias, weight.bias[cut])
            assert isinstance(taken, Fp8Weight if weight.shape[1] <= 128 else DenseWeight)
    with pytest.raises(ModelError, match="blocks of 128"):
        a.split(1, 1, 2)
    assert not isinstance(b.concat([a]), Fp8Weight)  # a border inside a block: they multiply side by side
    x = torch.randn(3, 320)
    assert torch.allclose(ReferenceKernels().product(x, a.stored()), x @ a.dense().T, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_parts_side_by_side_multiply_as_one_matrix(count: int) -> None:
    """A rank's heads may cut blocks, so that its matrices do not join: behind a norm, too, it has the bytes of one."""
    kernels = make_kernels("cpu")
    ctx, norm = bare_context(kernels, count, torch.device("cpu")), NormSpec(torch.rand(256).bfloat16(), 1e-6)
    parts = [block_weight(rows, 256) for rows in (128, 128, 128)]
    halves = [Fp8Weight(p.data[:64], p.scales, torch.bfloat16, blocks=True) for p in parts]
    for part in parts:
        part.dtype = torch.bfloat16
    one, apart = parts[0].concat(parts[1:]).settle(kernels), halves[0].concat(halves[1:]).settle(kernels)
    x = torch.randn(count, 256).bfloat16()
    for how in ({}, {"norm": norm}):
        rows = one.matmul(x, ctx, **how).unflatten(1, (3, 128))[:, :, :64].flatten(1)
        assert torch.equal(apart.matmul(x, ctx, **how), rows)


def test_rows_of_the_reference_do_not_see_each_other() -> None:
    weight, x = block_weight(128, 128), torch.randn(33, 128)
    whole = ReferenceKernels().product(x, weight.stored())
    for row in (0, 7, 32):
        assert torch.equal(ReferenceKernels().product(x[row : row + 1], weight.stored())[0], whole[row])


def logprobs(folder: Path, **options: Any) -> list[float]:
    with LLM(model=str(folder), dtype="float32", **SMALL, **options) as llm:
        ids = list(range(40, 80))
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (out,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return [row[i].logprob for i, row in zip(ids, out.prompt_logprobs or [], strict=True) if row is not None]


def furthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), hidden=128)


def rewritten(source: Path, target: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return target


def linear_names(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")]


def test_written_files_are_what_the_package_says(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", str(tiny), str(target), "--format", "fp8"])
    assert result.exit_code == 0, result.output
    config, tensors = json.loads((target / "config.json").read_text()), load_file(target / "model.safetensors")
    scheme = QuantizationConfig.model_validate(config["quantization_config"]).config_groups["group_0"]
    assert scheme.weights is not None and (scheme.weights.num_bits, scheme.weights.type) == (8, "float")
    assert scheme.input_activations is not None and scheme.input_activations.dynamic
    source = load_file(tiny / "model.safetensors")
    for name in linear_names(source):
        dense = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
        assert tensors[f"{name}.weight"].dtype == FP8
        assert (dense - source[f"{name}.weight"]).norm() < 0.04 * source[f"{name}.weight"].norm()
        source[f"{name}.weight"] = dense
    assert torch.equal(tensors["model.embed_tokens.weight"], source["model.embed_tokens.weight"])
    widened = rewritten(tiny, tmp_path / "widened", source, {})
    assert furthest(logprobs(target), logprobs(widened)) < 1e-3


@pytest.mark.parametrize("kind", ["blocks", "tensor"])
def test_files_with_quant_method_fp8(kind: str, tiny: Path, tmp_path: Path) -> None:
    source = load_file(tiny / "model.safetensors")
    stored = dict(source)
    for name in linear_names(source):
        dense = source[f"{name}.weight"]
        if kind == "blocks":
            grid = [-(-size // 128) for size in dense.shape]
            scales = torch.rand(grid) / 4000 + 0.001
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: dense.shape[0], : dense.shape[1]]
            stored[f"{name}.weight_scale_inv"] = scales
        else:
            wide = scales = dense.abs().max() / 448
            stored[f"{name}.weight_scale"], stored[f"{name}.input_scale"] = scales.clone(), torch.tensor(0.02)
        stored[f"{name}.weight"] = (dense / wide).to(FP8)
        source[f"{name}.weight"] = stored[f"{name}.weight"].float() * wide
    told: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    folder = rewritten(
        tiny, tmp_path / "fp8", stored, told | ({"weight_block_size": [128, 128]} if kind == "blocks" else {})
    )
    widened = rewritten(tiny, tmp_path / "widened", source, {})
    assert furthest(logprobs(folder), logprobs(widened)) < 1e-3


def test_configs_that_cannot_be_read() -> None:
    with pytest.raises(ModelError, match=r"blocks of \[64, 64\]"):
        fp8.check({"weight_block_size": [64, 64]})
    with pytest.raises(ModelError, match="gptq"):
        detect.check_config({"quantization_config": {"quant_method": "gptq", "bits": 5}})


@pytest.mark.parametrize("scheme", ["fp8", "int4-g64", "fp8,head=none", "int4,head=fp8"])
def test_rounded_at_load(tiny: Path, scheme: str) -> None:
    plain, rounded = logprobs(tiny), logprobs(tiny, quantization=scheme, kernels="reference")
    assert 0 < furthest(plain, rounded) < (1.5 if scheme.startswith("fp8") else 3.0)


class Tensors:
    """A checkpoint of these tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str, shape: Any = None, dtype: Any = None) -> torch.Tensor:
        found = self.tensors[name]
        assert shape is None or tuple(found.shape) == tuple(shape), name
        return found


def words_of(values: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """values [n, m] -> [n, m * bits / 32] int32; nibble i of a word holds column order[i]."""
    packed = torch.zeros(values.shape[0], values.shape[1] * bits // 32, dtype=torch.int64)
    for i, column in enumerate(order):
        packed |= values[:, column :: len(order)].long() << (i * bits)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq8", "compressed"])
def test_words(method: str) -> None:
    rows, columns, group = 24, 128, 32
    bits = 8 if method == "gptq8" else 4
    q = torch.randint(0, 1 << bits, (rows, columns))
    zeros = torch.randint(1, 16, (rows, columns // group)) if bits == 4 else torch.full((rows, columns // group), 128)
    scales = (torch.rand(rows, columns // group) + 0.5).half()
    want = (q - zeros.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    plain, awq = list(range(32 // bits)), [0, 2, 4, 6, 1, 3, 5, 7]
    if method == "compressed":
        tensors = {
            "w.weight_packed": pack_to_int32((q - 8).to(torch.int8), 4), "w.weight_scale": scales,
            "w.weight_zero_point": pack_to_int32((zeros - 8).to(torch.int8), 4, packed_dim=0),
        }  # fmt: skip
        weight = compressed.load_grid(Tensors(tensors), "w", (rows, columns), torch.float32, None)
    else:
        if method == "awq":
            tensors = {"w.qweight": words_of(q.T, 4, awq), "w.qzeros": words_of(zeros.T, 4, awq)}
        else:
            tensors = {"w.qweight": words_of(q, bits, plain).T, "w.qzeros": words_of(zeros.T - 1, bits, plain)}
            tensors["w.g_idx"] = torch.arange(columns, dtype=torch.int32) // group
        tensors["w.scales"] = scales.T
        weight = gptq_awq.load(Tensors(tensors), "w", (rows, columns), torch.float32, None)
    assert (weight.bits, weight.group, weight.zeros is None) == (bits, group, method == "gptq8")
    assert torch.equal(weight.dense(), want)
    assert torch.equal(weight.split(1, 1, 2).dense(), want[:, 64:])
    assert torch.equal(weight.take(torch.tensor([5, 2])).dense(), want[[5, 2]])
    other = GridWeight(torch.ones(2, columns, dtype=torch.int8), torch.ones(2, 4).half(), bits=bits, group=group,
                       dtype=torch.float32)  # fmt: skip
    joined = weight.concat([other])
    assert isinstance(joined, GridWeight) and torch.equal(joined.dense(), torch.cat([want, torch.ones(2, columns)]))
    settled = joined.settle(ReferenceKernels())
    assert isinstance(settled, GridWeight) and settled.bits == 8 and torch.equal(settled.dense()[:rows], want)
    assert settled.q is not None and torch.equal(widen_grid(settled.q, settled.scales)[:rows], want)
