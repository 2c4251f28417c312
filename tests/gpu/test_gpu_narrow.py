"""Products with 8 and 4 bit weights on the device, against the widened matrix in float32."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.gpu_helpers import rand, relative
from tests.gpu.gpu_narrow_helpers import FP8, coded, matrix

from tokenmill import LLM, SamplingParams
from tokenmill.compute.forward import NormSpec
from tokenmill.demo import demo_dir
from tokenmill.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()


KINDS = ["fp8", "fp8/blocks", "int8", "int8/32", "int8/128", "int4/32", "int4/64", "int4/128", "int4", "int4z/32",
         "int4z/128", "fp4/16", "fp4/32", "nf4/64", "nf4/128", "nf4/256"]  # fmt: skip
ROUNDED = {"fp8": 0.045, "fp8/blocks": 0.045, "int8": 0.015}
"""How far rounding the activations may move a result."""


def check(kind, rows, width, inner, fusion, rounds=0.0):
    """rounds: by how much rounding many rows may move a result, where a 4 bit weight lets them be rounded."""
    from tokenmill.kernels.triton import TritonKernels

    # Both halves of what is gated are off, 1.6 times as much on average; of two rows a few large numbers decide.
    gated = 2 if rows > 16 else 3
    kernels, weight = TritonKernels(), matrix(kind, width, inner, bias=fusion == "all")
    if rounds:
        weight = replace(weight, row_steps=(weight.scales.float() * 8).amax(0) / 448)
    x = rand(rows, inner)
    norm = NormSpec(rand(inner).abs() + 0.5, 1e-5) if fusion in ("gated", "all") else None
    act = "silu_mul" if fusion in ("gated", "all") else None
    residual = rand(rows, width // 2 if act else width) if fusion in ("residual", "all") else None
    dense = weight.rows(torch.arange(width, device="cuda"), torch.float32)
    exact = REFERENCE.product(
        x.float(), dense, None if weight.bias is None else weight.bias.float(),
        norm=None if norm is None else replace(norm, weight=norm.weight.float()), act=act,
        residual=None if residual is None else residual.float(),
    )  # fmt: skip
    rounding = rounds if rounds and rows > 256 else ROUNDED.get(kind, 0.0)
    limit = rounding * (gated if act else 1) if rows > 1 else 0.0
    for _ in range(2):
        found = kernels.product(x, weight, norm=norm, act=act, residual=residual)
        assert relative(found, exact) < max(0.02 if act else 0.012, limit)
    assert not kernels.launch.scratch.counters(x.device).any()
    counts = kernels.counters()
    assert counts["narrow_linear"]["calls"] == 2 and not any(c["fallbacks"] for c in counts.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 17, 33, 64, 100, 300])
def test_narrow_linear(kind, rows):
    check(kind, rows, 1024, 4096, "residual")
    check(kind, rows, 512, 1536, "gated")


@pytest.mark.parametrize("rows", [1, 33, 256, 257, 2000])
@pytest.mark.parametrize("fusion", ["residual", "gated", "all"])
def test_activations_that_may_be_rounded(rows, fusion):
    """w4a8: many rows become float8, and the weight, too."""
    check("int4/128", rows, 1024, 4096, fusion, rounds=0.05)
    check("int4/128", rows, 1000, 640, fusion, rounds=0.05)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4/128", "fp4/32", "nf4/64"])
@pytest.mark.parametrize("rows", [1, 5, 33, 130])
def test_odd_shapes(kind, rows):
    check(kind, rows, 1000, 640, "all")
    check(kind, rows, 272, 14336, "plain")


@pytest.mark.parametrize("kind", ["int4/32", "int4z/64", "fp4/16", "fp4/32", "nf4/32"])
@pytest.mark.parametrize("rows", [1, 5, 33, 100])
def test_columns_that_fill_no_block(kind, rows):
    check(kind, rows, 640, 2880, "all")
    check(kind, rows, 72, 576, "plain")


@pytest.mark.parametrize("kind", ["fp4/16", "fp4/32", "nf4/64"])
def test_tables_keep_their_numbers(kind):
    """One column after the other, through both kernels that find many codes at once."""
    from tokenmill.kernels.triton import TritonKernels

    kernels, m = TritonKernels(), coded(kind, 64, 256)
    weight, dense = kernels.pack(m), m.dense()
    assert weight.bits == 4 and weight.data.nbytes == 64 * 256 // 2
    every = torch.eye(256, device="cuda", dtype=torch.bfloat16)
    found = torch.cat([kernels.product(part, weight) for part in every.split(32)]).T  # few rows
    assert relative(found, dense) < (2e-3 if kind == "fp4/32" else 6e-3)
    found = torch.cat([kernels.product(row[None], weight) for row in every]).T
    assert relative(found, dense) < (2e-3 if kind == "fp4/32" else 6e-3)
    assert relative(kernels.product(every, weight).T, dense) < (2e-3 if kind == "fp4/32" else 6e-3)  # widened


@pytest.mark.parametrize("rows", [1, 3, 64, 200])
def test_weights_that_are_widened_at_every_call_are_whole_when_they_are_read(rows):
    """Halves that share a block of scales: widened right before each product, where another matrix lay before."""
    from tokenmill.kernels.triton import TritonKernels

    kernels, x = TritonKernels(), rand(rows, 4096)
    weights = [matrix("fp8/blocks", 2 * 4160, 4096) for _ in range(3)]
    every = torch.arange(2 * 4160, device="cuda")
    exact = [REFERENCE.product(x.float(), weight.rows(every, torch.float32), act="silu_mul") for weight in weights]
    for _ in range(30):
        for weight, expected in zip(weights, exact, strict=True):
            assert relative(kernels.product(x, weight, act="silu_mul"), expected) < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["fp8", "int8/32", "int4/64", "int4z/64", "fp4/32", "nf4/64"])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_other_types(dtype, kind, rows):
    from tokenmill.kernels.triton import TritonKernels

    weight, x = matrix(kind, 256, 512), rand(rows, 512, dtype=dtype)
    dense = weight.rows(torch.arange(256, device="cuda"), torch.float32)
    found = TritonKernels().product(x, weight)
    assert found.dtype == dtype
    limit = 0.045 if kind == "fp8" else 2e-3
    assert relative(found, x.float() @ dense.T) < (limit if rows > 1 else 0.012)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_rounding(dtype):
    from tokenmill.kernels.triton.quantised.narrow_round import round_rows

    x, norm = rand(40, 14336), NormSpec(rand(14336).abs() + 0.5, 1e-5)
    q, steps = round_rows(x, dtype, norm, pdl=True)
    want = REFERENCE.norm(x.float(), replace(norm, weight=norm.weight.float()))
    assert relative(q.float() * steps[:, None], want) < (0.03 if dtype == FP8 else 0.02)


def test_weights_that_are_rounded_on_the_device():
    from tokenmill.kernels.triton import TritonKernels
    from tokenmill.quant.detect import from_dense

    kernels, dense = TritonKernels(), rand(512, 768, scale=0.05)
    for scheme, limit in (("fp8", 0.03), ("int8", 0.012), ("int4", 0.09), ("int4-g128", 0.12)):
        weight = from_dense(dense, None, scheme).settle(kernels)
        assert relative(weight.dense(), dense) < limit
        assert weight.bytes() < 512 * 768 * (1.02 if scheme in ("fp8", "int8") else 0.57)


GOLDEN = [json.loads(line) for line in (demo_dir() / "golden.jsonl").read_text().splitlines()]


def demo_answers(**options):
    """Greedy answers to the golden prompts, and the likeliest token at every position of prompt and answer."""
    asked = [{"prompt_token_ids": g["prompt_ids"]} for g in GOLDEN]
    params = [SamplingParams(temperature=0, max_tokens=len(g["output_ids"])) for g in GOLDEN]
    whole = [{"prompt_token_ids": (g["prompt_ids"] + g["output_ids"])[:500]} for g in GOLDEN]
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(model="demo", max_model_len=1024, max_num_seqs=32, num_gpu_blocks_override=2000, **options) as llm:
        kept = sum(
            list(o.outputs[0].token_ids) == g["output_ids"]
            for o, g in zip(llm.generate(asked, params, use_tqdm=False), GOLDEN, strict=True)
        )
        lines = [d for o in llm.generate(whole, scored, use_tqdm=False) for d in o.prompt_logprobs[1:]]
    return kept, [max(d, key=lambda token: d[token].logprob) for d in lines]


@pytest.fixture(scope="module")
def plain_demo():
    return demo_answers()


@pytest.mark.parametrize(
    ("scheme", "least", "same"),
    [("fp8", 23, 0.96), ("int8", 23, 0.98), ("int4", 22, 0.95), ("int4-g128", 21, 0.94), ("fp8,head=none", 23, 0.97)],
)
def test_the_demo_model_keeps_its_answers(scheme, least, same, plain_demo):
    kept, likeliest = demo_answers(quantization=scheme)
    assert kept >= least, f"{kept} of {len(GOLDEN)}"
    agreed = sum(a == b for a, b in zip(likeliest, plain_demo[1], strict=True)) / len(likeliest)
    print("top-1 agreement", scheme, agreed)
    assert agreed >= same


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_recorded_steps_say_what_others_say(scheme):
    assert demo_answers(quantization=scheme)[0] - demo_answers(quantization=scheme, enforce_eager=True)[0] in (-1, 0, 1)
