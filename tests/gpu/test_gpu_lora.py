"""Adapters on the device: kernels against float32, and an engine's tokens against plain torch, recorded and not."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
import torch
from safetensors.torch import save_file
from tests.gpu.gpu_engine_helpers import agreement, ids, prompts
from tests.gpu.gpu_lora_helpers import adapters as shared_adapters
from tests.gpu.gpu_lora_helpers import asked, make
from tests.gpu.gpu_lora_helpers import model as shared_model

from tokenmill import LoRARequest, SamplingParams
from tokenmill.compute.adapters import AdapterSite, Delta
from tokenmill.kernels.reference import ReferenceKernels

model = shared_model
adapters = shared_adapters


def apart(a, b):
    """How far the logprobs of first tokens are from each other at most; tokens that one of both does not list are left
    out, but something is listed by both or the answer is infinite."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        x, y = x.outputs[0].logprobs[0], y.outputs[0].logprobs[0]
        worst = max(worst, max((abs(x[t].logprob - y[t].logprob) for t in x.keys() & y.keys()), default=float("inf")))
    return worst


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 17, 64, 300, 2049])
@pytest.mark.parametrize(("widths", "act", "residual", "gains"), [
    ([512, 128, 128], None, False, False), ([512], None, True, True), ([1024, 1024], "silu_mul", False, False),
])  # fmt: skip
def test_kernels(dtype, tokens, widths, act, residual, gains):
    from tokenmill.kernels.triton import TritonKernels

    kernels, plain, columns = TritonKernels(), ReferenceKernels(), sum(widths)
    ranks = [0, 16, 3, 0, 8]
    site = AdapterSite(512, (0, *accumulate(widths)))
    lanes = -(-len(widths) * 16 // 16) * 16
    site.down = (torch.randn(5, 512, lanes, device="cuda") * 0.05).to(dtype)
    site.up = (torch.randn(5, 16, columns, device="cuda") * 0.05).to(dtype)
    site.host_ranks, site.ranks = ranks, torch.tensor(ranks, dtype=torch.int32, device="cuda")
    if gains:
        site.gains, site.shifts = torch.rand(5, columns, device="cuda"), torch.randn(5, columns, device="cuda")
    x = (torch.randn(tokens, 512, device="cuda")).to(dtype)
    y = (torch.randn(tokens, columns, device="cuda")).to(dtype)
    rows = torch.randint(0, 7, (tokens,), device="cuda").sort().values
    slots = torch.tensor([0, 1, 2, 3, 4, 0, 1], dtype=torch.int32, device="cuda")[rows]
    beside = torch.randn(tokens, columns // 2 if act else columns, device="cuda").to(dtype) if residual else None
    found = kernels._adapted(y, Delta(site, x, kernels.adapt(x, site, slots), slots), act, beside)
    wide = Delta(site, x.float(), plain.adapt(x.float(), site, slots), slots)
    expected = plain.add_delta(y.float(), wide)
    expected = expected if act is None else plain.activate(expected, act)
    expected = expected if beside is None else expected + beside.float()
    error = (found.float() - expected).norm() / expected.norm()
    assert float(error) < (1e-2 if dtype == torch.bfloat16 else 2e-4)
    assert kernels.counters()["adapt"] == {"calls": 1, "fallbacks": 0}


@pytest.mark.parametrize("distinct", [0, 1, 5, 32])
@pytest.mark.parametrize("tokens", [1, 2, 17, 32, 64])
@pytest.mark.parametrize(("widths", "inputs", "act"), [
    ([2048, 512, 512], 2048, None), ([2048], 5632, None), ([5632, 5632], 2048, "silu_mul"),
], ids=["qkv", "down", "gate and up"])  # fmt: skip
def test_products_with_their_adapters_in_their_shade(widths, inputs, act, tokens, distinct):
    """Against float32, twice, so that counters that were left behind would show; then as a recording."""
    from tokenmill.kernels.triton import TritonKernels

    kernels, plain, columns = TritonKernels(), ReferenceKernels(), sum(widths)
    ranks = [0, *([16, 3, 9, 16] * 8)]
    site = AdapterSite(inputs, (0, *accumulate(widths)))
    lanes = -(-len(widths) * 16 // 16) * 16
    site.down = (torch.randn(33, inputs, lanes, device="cuda") * 0.05).bfloat16()
    site.up = (torch.randn(33, 16, columns, device="cuda") * 0.05).bfloat16()
    site.host_ranks, site.ranks = ranks, torch.tensor(ranks, dtype=torch.int32, device="cuda")
    weight = (torch.randn(columns, inputs, device="cuda") / inputs**0.5).bfloat16()
    slots = torch.tensor([1 + i % distinct if distinct and i % 7 else 0 for i in range(64)], dtype=torch.int32)
    slots = slots[torch.randperm(64)[:tokens]].cuda()
    width = columns // 2 if act else columns

    def run(x, beside):
        assert kernels.adapt(x, site, slots) is None
        return kernels.product(x, weight, act=act, residual=beside, delta=Delta(site, x, None, slots))

    x, beside = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (inputs, width))
    for _ in range(2):
        found = run(x, beside)
        wide = Delta(site, x.float(), plain.adapt(x.float(), site, slots), slots)
        y = plain.add_delta(x.float() @ weight.float().t(), wide)
        expected = (y if act is None else plain.activate(y, act)) + beside.float()
        assert float((found.float() - expected).norm() / expected.norm()) < 1e-2
        assert not kernels.launch.scratch.counters(x.device).any()
        x.normal_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, beside)
    for _ in range(3):
        graph.replay()
    assert torch.equal(found, run(x, beside))
    opened = kernels.open_product(x, weight, None, Delta(site, x, None, slots))
    if opened is not None:  # of more parts than one, or of a shape that streams whole
        wide = Delta(site, x.float(), plain.adapt(x.float(), site, slots), slots)
        expected = plain.add_delta(x.float() @ weight.float().t(), wide)
        assert float((opened.sum(0) - expected).norm() / expected.norm()) < 1e-2
    assert not kernels.launch.scratch.counters(x.device).any()


@pytest.mark.parametrize("options", [
    {}, {"enforce_eager": True}, {"max_loras": 3}, {"pipeline_depth": 1}, {"deterministic": True}, {"max_cpu_loras": 2},
], ids=["recorded", "eager", "three slots", "one plan", "deterministic", "few copies"])  # fmt: skip
def test_like_the_reference(model, adapters, options):
    given, params = prompts(27), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with make(model, dtype="float32", kernels="reference", enforce_eager=True) as llm:
        expected = ids(llm.generate(given, params, False, lora_request=asked(adapters, 27)))
    with make(model, dtype="float32", **options) as llm:
        found = ids(llm.generate(given, params, False, lora_request=asked(adapters, 27)))
        again = ids(llm.generate(given, params, False, lora_request=asked(adapters, 27)))
        counters = llm.engine.executor.control({"what": "counters"})["kernels"]
    assert agreement(found, expected) > 0.97
    assert agreement(again, expected) > 0.97
    assert counters["adapt"]["fallbacks"] == 0


@pytest.mark.parametrize("quantization", [None, "fp8", "int8", "int4"])
def test_on_every_format(model, adapters, quantization):
    """The first token's likeliest eight: weights are invented, so later ones fork at the first near tie."""
    given, params = prompts(18), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=8)
    with make(model, quantization=quantization, enable_prefix_caching=False) as llm:
        mixed = llm.generate(given, params, False, lora_request=asked(adapters, 18))
        alone = [llm.generate([p], params, False, lora_request=a)[0]
                 for p, a in zip(given, asked(adapters, 18), strict=True)]  # fmt: skip
        plain = llm.generate(given, params, False)
    assert apart(mixed, alone) < 0.15
    assert apart(mixed, plain) > 0.5


def test_company_does_not_matter_when_deterministic(model, adapters):
    given, params = prompts(27), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    with make(model, deterministic=True) as llm:
        mixed = llm.generate(given, params, False, lora_request=asked(adapters, 27))
        for i in (0, 3, 7, 8):
            alone = llm.generate([given[i]], params, False, lora_request=asked(adapters, 27)[i])[0]
            assert alone.outputs[0].logprobs == mixed[i].outputs[0].logprobs


def test_without_adapters_an_engine_is_as_it_was(model, adapters):
    given, params = prompts(20), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    with make(model) as llm:
        llm.generate(given[:2], params, False, lora_request=asked(adapters, 2))
        found = llm.generate(given, params, False)
    with make(model, enable_lora=False) as llm:
        expected = llm.generate(given, params, False)
    assert [o.outputs[0].logprobs for o in found] == [o.outputs[0].logprobs for o in expected]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Adapters of the table of embeddings: of a low rank, the same with DoRA, and rows of chosen tokens, of the head
    too."""
    table, made = "base_model.model.model.embed_tokens", {}
    low = {
        f"{table}.lora_embedding_A": torch.randn(4, 2048) * 0.2,
        f"{table}.lora_embedding_B": torch.randn(512, 4) * 0.2,
    }
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    chosen = {"model.embed_tokens": list(range(3, 2048, 9)), "lm_head": list(range(0, 2048, 128))}
    rows = {
        f"base_model.model.{where}.token_adapter.trainable_tokens_delta": torch.randn(len(tokens), 512)
        for where, tokens in chosen.items()
    }
    for name, tensors, more in (
        ("low", low, {}),
        ("dora", {**low, f"{table}.lora_magnitude_vector": torch.rand(512) * 20 + 10}, {"use_dora": True}),
        (
            "chosen",
            rows,
            {"trainable_token_indices": {"embed_tokens": chosen["model.embed_tokens"], "lm_head": chosen["lm_head"]}},
        ),
    ):
        folder = tmp_path_factory.mktemp(name)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**said, **more}))
        made[name] = folder
    return made


@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_adapters_of_embeddings_like_the_reference(model, tables, eager):
    given, params = prompts(20), SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    requests = [LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(tables.items())]
    mixed = [None if i % 4 == 3 else requests[i % 4] for i in range(20)]
    with make(model, dtype="float32", max_lora_rank=256, kernels="reference", enforce_eager=True) as llm:
        expected = ids(llm.generate(given, params, False, lora_request=mixed))
    with make(model, dtype="float32", max_lora_rank=256, enforce_eager=eager) as llm:
        found = ids(llm.generate(given, params, False, lora_request=mixed))
        plain = ids(llm.generate(given, params, False))
    assert agreement(found, expected) > 0.97
    for kind in range(3):  # each of them says something else than the base does
        assert agreement(found[kind::4], plain[kind::4]) < 0.9
