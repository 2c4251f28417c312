"""Weights in float16 on a CPU: held in 16 bits, and what they multiply is what the same numbers in float32 give."""

from __future__ import annotations

import os

import pytest
import torch
from tests.cpu.models.families_helpers import prompt
from tests.cpu.models.family_cases import ALL
from tests.cpu.models.parity import load, ours, theirs
from torch import Tensor

from tokenmill import LLM, SamplingParams
from tokenmill.compute.model import CausalLM
from tokenmill.engine.load.loading import compute_dtype
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.testing.tiny import make_tiny

NATIVE = pytest.importorskip("tokenmill.kernels.cpu", reason="the native kernels were not built")
FEW = ("olmo2-0", "phi-0", "gpt_bigcode-1", "granitemoe-0", "dbrx-0", "llama4-0", "deepseek_v3-0", "falcon_h1-0")
"""Tied heads, biases, matrices stored transposed, experts in one tensor in either order, latent keys, states."""
SWEPT = [name for name in ALL if name.endswith("-0")] if os.environ.get("TOKENMILL_FAMILIES") else FEW


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def weight_bytes(model: CausalLM) -> int:
    found = model.spec.extras["weight_bytes"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize("name", SWEPT)
def test_the_same_bytes_as_in_float32(name, native, tmp_path):
    kernels = NATIVE.CpuKernels(1) if native else ReferenceKernels()
    _, config, tensors = ALL[name].make(tmp_path)
    half = halved(tensors)
    wide = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in half.items()}
    prompts, steps = {"a": prompt(40)}, [[("a", 37)], *[[("a", 1)]] * 3]
    held, exact = (load(config, each, kernels=kernels) for each in (half, wide))
    assert torch.equal(ours(held, prompts, steps, kernels)["a"], ours(exact, prompts, steps, kernels)["a"])
    if native:  # plain torch multiplies float32 by float32 alone
        # Gates of recurrent layers, and factors of streams, stay in float32.
        most = next((share for start, share in (("recurrent_gemma", 0.6), ("hy_v4", 0.75)) if name.startswith(start)),
                    0.55)  # fmt: skip
        assert weight_bytes(held) < most * weight_bytes(exact), "matrices take half of the memory"
    else:
        assert weight_bytes(held) == weight_bytes(exact)


def test_transformers_says_the_same(tmp_path):
    model, config, tensors = ALL["olmo2-0"].make(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    kernels = NATIVE.CpuKernels(1)
    found = ours(load(config, halved(tensors), kernels=kernels), {"a": prompt(40)}, [[("a", 40)]], kernels)["a"]
    torch.testing.assert_close(found, theirs(model, prompt(40)), atol=1e-4, rtol=1e-4)


def test_float16_that_is_asked_for_is_float32_on_a_cpu(tmp_path):
    """vLLM's command lines often say so. Whatever the files hold, requests are answered, and the reason is told."""
    folder, params = make_tiny(tmp_path / "tiny"), SamplingParams(temperature=0.0, max_tokens=4)
    answers = {}
    for dtype in ("float32", "float16"):
        with LLM(model=str(folder), dtype=dtype, device="cpu", max_model_len=64, num_blocks=16) as llm:
            (out,) = llm.generate(["some words"], params, use_tqdm=False)
            answers[dtype] = out.outputs[0].token_ids
    assert answers["float16"] == answers["float32"] and len(answers["float16"]) > 0
    for said, more in (("float16", "; weights stay float16"), ("torch.bfloat16", "")):
        told: list[str] = []
        assert compute_dtype("float16", {"torch_dtype": said}, "cpu", told) == torch.float32
        assert told == [f"computed in float32: CPUs compute float16 slowly{more}"]
        assert compute_dtype("float16", {"torch_dtype": said}, "cuda", []) == torch.float16


@pytest.mark.parametrize("said", ["int8", "nonsense", "torch.float64", 5])
def test_types_that_nothing_is_computed_in_are_told(said: object) -> None:
    told: list[str] = []
    assert compute_dtype("auto", {"dtype": said}, "cpu", told) == torch.float32
    assert any(repr(str(said).removeprefix("torch.")) in reason for reason in told)
    told.clear()
    assert compute_dtype("auto", {"dtype": "bfloat16"}, "cpu", told) == torch.bfloat16 and not told
