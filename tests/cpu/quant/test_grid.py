"""Integer weights: rounding, the reference matmul, the native one, joining and splitting, whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.compute.forward import Weight
from tokenmill.core.errors import ModelError, UserError
from tokenmill.kernels import ReferenceKernels, make_kernels
from tokenmill.kernels.grid import quantise, widen
from tokenmill.quant.at_load import RoundedAtLoad, settle_all
from tokenmill.quant.dense import DenseWeight
from tokenmill.quant.fp8 import UnroundedFp8
from tokenmill.quant.grid import GridWeight, Unrounded
from tokenmill.testing.tiny import make_tiny


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.5 / 127), (4, 0.5 / 8)])
def test_rounding_error_is_half_a_step(bits: int, bound: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 96)
    q, scales = quantise(weight, bits)
    error = (widen(q, scales) - weight).view(40, 3, 32).abs().amax(-1)
    top = weight.view(40, 3, 32).abs().amax(-1)
    slack = 1.02 if bits == 8 else 2.1  # int4 has no +8: an entry opposite to the largest one may lose a whole step
    assert bool((error <= bound * top * slack + 1e-6).all())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 70), st.sampled_from([8, 4]), st.booleans())
def test_native_means_what_the_reference_says(tokens: int, groups: int, out: int, bits: int, biased: bool) -> None:
    kernels = make_kernels("cpu")
    torch.manual_seed(tokens * 1000 + groups * 100 + out)
    x, weight = torch.randn(tokens, groups * 32), torch.randn(out, groups * 32)
    bias = torch.randn(out) if biased else None
    q, scales = quantise(weight, bits)
    stored = GridWeight(q, scales, bits=bits, group=32, dtype=torch.float32, bias=bias).stored()
    want = ReferenceKernels().product(x, stored)
    packed = kernels.pack(stored)
    if packed is None:
        pytest.skip("no native module")
    torch.testing.assert_close(kernels.product(x, packed), want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(packed.rows(torch.arange(out), torch.float32), widen(q, scales), rtol=0, atol=0)


def test_reference_rows_do_not_see_each_other() -> None:
    torch.manual_seed(1)
    x, (q, scales) = torch.randn(33, 64), quantise(torch.randn(50, 64), 4)
    stored = GridWeight(q, scales, bits=4, group=32, dtype=torch.float32).stored()
    whole = ReferenceKernels().product(x, stored)
    for row in (0, 7, 32):
        assert torch.equal(ReferenceKernels().product(x[row : row + 1], stored)[0], whole[row])


def grid(weight: torch.Tensor, bias: torch.Tensor | None = None) -> GridWeight:
    q, scales = quantise(weight, 4)
    return GridWeight(q, scales, bits=4, group=32, dtype=weight.dtype, bias=bias)


def test_join_split_take() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(6, 128), torch.randn(4, 128)
    one, two = grid(a), grid(b, torch.ones(4))
    joined = one.concat([two])
    assert isinstance(joined, GridWeight) and joined.shape == (10, 128)
    assert torch.equal(joined.dense(), torch.cat([one.dense(), two.dense()]))
    assert torch.equal(joined.split(0, 1, 2).dense(), joined.dense()[5:])
    assert torch.equal(joined.split(1, 1, 2).dense(), joined.dense()[:, 64:])
    assert torch.equal(joined.take(torch.tensor([3, 1])).dense(), joined.dense()[[3, 1]])
    with pytest.raises(ModelError, match="groups of 32"):
        joined.split(1, 1, 8)


@pytest.mark.parametrize("backend", [ReferenceKernels(), make_kernels("cpu")], ids=["reference", "native"])
def test_rounded_when_settled(backend: ReferenceKernels) -> None:
    torch.manual_seed(3)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    joined = Unrounded(a, None, 4).concat([Unrounded(b, None, 4)])
    assert torch.equal(joined.dense(), torch.cat([a, b]))
    settled = joined.settle(backend)
    want = grid(torch.cat([a, b])).dense()
    assert isinstance(settled, GridWeight) and torch.equal(settled.dense(), want)
    assert settled.bytes() < 128 * 64  # 4.5 bits a weight, not 32


@pytest.mark.parametrize("backend", [ReferenceKernels(), make_kernels("cpu")], ids=["reference", "native"])
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 32), (4, 64), (16, 0)], ids=["8", "4", "4-64", "float8"])
@pytest.mark.parametrize("odd", ["", "tiny", "nan", "bias", "shape", "kind"])
def test_neighbours_rounded_together_are_as_by_themselves(
    backend: ReferenceKernels, bits: int, group: int, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one of them cannot be rounded, or is of another kind, too."""
    torch.manual_seed(4)
    dense = [torch.randn(24, 64) for _ in range(7)]
    dense[4] *= 1e-12 if odd == "tiny" else 1.0
    dense[4][3, 5] = float("nan") if odd == "nan" else 0.5
    dense[5] = torch.randn(16, 64) if odd == "shape" else dense[5]
    bias = torch.randn(24) if odd == "bias" else None

    def made() -> list[Weight]:
        kind, how = (UnroundedFp8, ()) if bits == 16 else (Unrounded, (bits, group))
        found: list[Weight] = [kind(each.clone(), bias if i == 2 else None, *how) for i, each in enumerate(dense)]
        if odd == "kind":
            found[3] = DenseWeight(dense[3].clone())
        return found

    alone = [one.settle(backend) for one in made()]
    calls: list[int] = []
    for kind in (Unrounded, UnroundedFp8):
        real = kind.rounded

        def rounded(self: RoundedAtLoad, kernels: ReferenceKernels, parts: int, real: Any = real) -> object:
            calls.append(parts)
            return real(self, kernels, parts)

        monkeypatch.setattr(kind, "rounded", rounded)
    monkeypatch.setattr(backend, "rounds_at_once", 3 * 24 * 64)
    given = made()
    together = settle_all(given, backend)
    assert calls[0] == (1 if odd == "bias" else 3)
    for one, other in zip(alone, together, strict=True):
        assert type(one) is type(other) and one.shape == other.shape
        torch.testing.assert_close(other.dense(), one.dense(), rtol=0, atol=0, equal_nan=True)
        assert (one.bias is None) == (other.bias is None)  # type: ignore[attr-defined]
    assert not any(isinstance(each, RoundedAtLoad) and each.table is not None for each in given if each not in together)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_whole_model(tmp_path: Path, scheme: str, kernels: str) -> None:
    from tokenmill import LLM, SamplingParams

    make_tiny(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(5, 45))}
    scores = {}
    for quantization in (None, scheme):
        with LLM(model=str(tmp_path), quantization=quantization, kernels=kernels) as llm:
            alone = llm.generate(prompt, params, use_tqdm=False)[0]
            crowd = llm.generate([prompt, {"prompt_token_ids": [9, 8, 7]}], params, use_tqdm=False)[0]
        assert alone.outputs[0].logprobs == crowd.outputs[0].logprobs
        assert alone.prompt_logprobs is not None
        scores[quantization] = torch.tensor([next(iter(d.values())).logprob for d in alone.prompt_logprobs[1:] if d])
    difference = (scores[None] - scores[scheme]).abs()
    assert 0 < difference.max() < (0.2 if scheme == "int8" else 3.0)


def test_unknown_scheme(tmp_path: Path) -> None:
    from tokenmill import LLM

    make_tiny(tmp_path)
    for name in ("awq", "awq_marlin", "gguf", "compressed-tensors", "none-such"):
        with pytest.raises(UserError, match="int8, int4"):
            LLM(model=str(tmp_path), quantization=name)
