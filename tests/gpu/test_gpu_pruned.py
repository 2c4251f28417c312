"""Products with 2:4 matrices on the device, against the matrix with its zeros in float32; a pruned model as a whole."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.gpu_helpers import relative

from tokenmill import LLM, SamplingParams
from tokenmill.compute.forward import NormSpec
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
FP8 = torch.float8_e4m3fn


def two_of_four(rows, columns, device="cuda", share=0.5):
    """Random numbers of which two of every four are zero, in some fours more."""
    numbers = torch.randn(rows, columns // 4, 4, device=device)
    numbers.scatter_(2, torch.rand_like(numbers).topk(2, 2).indices, 0.0)
    return (numbers * (torch.rand_like(numbers) > 0.05)).flatten(1)


def packed(kernels, numbers, bias=None):
    shape = (numbers.shape[0], numbers.shape[1])
    if numbers.dtype == FP8:
        parts = (("codes", numbers), ("scales", torch.rand(len(numbers), 1, device="cuda") + 0.5))
        return kernels.pack(StoredMatrix("fp8", shape, parts, numbers.float, bias))
    return kernels.pack(StoredMatrix("dense", shape, (("numbers", numbers),), lambda: numbers, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_what_is_packed_comes_back(dtype):
    from tokenmill.kernels.triton import TritonKernels
    from tokenmill.kernels.triton.pruned.expand import with_zeros

    numbers = two_of_four(4128, 640).to(dtype)
    weight = packed(TritonKernels(pruned="packed"), numbers)
    assert weight.in_library, "cuSPARSELt is there and right"
    assert torch.equal(with_zeros(weight, pdl=True).float(), numbers.float())
    assert torch.equal(
        weight.stored.view(-1)[: weight.kept.numel()].view(weight.kept.shape).float(), weight.kept.float()
    )


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("rows", [1, 2, 31, 64, 65, 257, 2048, 3001])
@pytest.mark.parametrize("around", ["bare", "gated", "added"])
def test_products(dtype, rows, around, recorded):
    from tokenmill.kernels.triton import TritonKernels

    outputs, inputs = 4160, 1920
    kernels, like = TritonKernels(pruned="packed"), torch.bfloat16 if dtype == FP8 else dtype
    bias = torch.randn(outputs, device="cuda", dtype=like) if around != "bare" else None
    weight = packed(kernels, two_of_four(outputs, inputs).to(dtype), bias)
    x = torch.randn(rows, inputs, device="cuda", dtype=like)
    gated = around == "gated"
    norm = NormSpec(torch.rand(inputs, device="cuda", dtype=like) + 0.5, 1e-5) if gated else None
    act = "silu_mul" if gated else None
    residual = torch.randn(rows, outputs, device="cuda", dtype=like) * 30 if around == "added" else None

    def make():
        return kernels.product(x, weight, norm=norm, act=act, residual=None if residual is None else residual.clone())

    found = make()
    if recorded:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = make()
        for _ in range(2):
            graph.replay()
    every = torch.arange(outputs, device="cuda")
    exact = x.float() if norm is None else REFERENCE.norm(x.float(), NormSpec(norm.weight.float(), norm.eps))
    y = exact @ weight.rows(every, torch.float32).t() + (0.0 if bias is None else bias.float())
    y = y if act is None else REFERENCE.activate(y, act)
    y = y if residual is None else y + residual.float()
    assert relative(found, y) < (0.1 if gated else 0.05) * (1.0 if dtype == FP8 else 0.2)
    assert not kernels.launch.scratch.counters(x.device).any()
    assert not any(c["fallbacks"] for c in kernels.counters().values())


def test_a_pruned_model(tmp_path):
    """The same texts as with its zeros, but where two tokens are as likely as each other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
                         num_key_value_heads=4, head_dim=64, vocab_size=1024, max_position_embeddings=4096)  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            with torch.no_grad():
                parameter.copy_(two_of_four(*parameter.shape, device="cpu") * 0.05)
    model.save_pretrained(tmp_path)
    prompts = [[(7 * i + j) % 1000 for j in range(5 + 60 * i)] for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    found = []
    for options in ({"pruned_weights": "packed"}, {}):
        llm = LLM(
            model=str(tmp_path), skip_tokenizer_init=True, max_model_len=4096, kv_cache_memory_bytes=1 << 28, **options
        )
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        found.append([out.outputs[0] for out in outs])
        assert not options or llm.engine.executor.control({"what": "counters"})["kernels"]["pruned_linear"]["calls"] > 0
        llm.close()
    for pruned, dense in zip(*found, strict=True):
        for mine, theirs in zip(pruned.logprobs, dense.logprobs, strict=True):
            a, b = (next(iter(step.items())) for step in (mine, theirs))
            assert abs(a[1].logprob - b[1].logprob) < 0.1
            if a[0] != b[0]:  # nearly as likely, and what follows is another text
                break
