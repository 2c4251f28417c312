"""Routing and experts on the device against float32 on the same inputs: one token to thousands, even and skewed."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.gpu_engine_helpers import agreement
from tests.gpu.gpu_helpers import rand, relative, triton_kernels

from tokenmill import LLM, SamplingParams
from tokenmill.compute.forward import ForwardContext, Mixture, NormSpec, RouteSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quant.base import WeightBase
from tokenmill.quant.dense import DenseWeight

REFERENCE = ReferenceKernels()


@pytest.mark.parametrize(("experts", "top", "groups", "order"), [
    (128, 8, 1, "softmax_topk"), (160, 6, 8, "softmax_topk"), (256, 8, 8, "sigmoid_topk"), (32, 4, 1, "topk_softmax"),
    (64, 4, 1, "topk_sigmoid"),
])  # fmt: skip
def test_route(experts, top, groups, order):
    bias = rand(experts, dtype=torch.float32, scale=0.1) if order != "softmax_topk" else None
    spec = RouteSpec(
        experts, top, order=order, groups=groups, top_groups=min(groups, 4), group_sum2=order == "sigmoid_topk",
        bias=bias, scale=2.5,
    )  # fmt: skip
    logits = rand(777, experts, dtype=torch.float32)
    ids, gates = triton_kernels().route(logits, spec)
    expected, weights = REFERENCE.route(logits, spec)
    assert float((ids == expected).float().mean()) > 0.999  # near ties may fall either way
    same = (ids == expected).all(-1)
    assert torch.allclose(gates[same], weights[same], rtol=1e-4)


def exact(x, ups, downs, ids, gates, act):
    """Expert by expert in float32."""
    y = torch.zeros(x.shape[0], downs.shape[1], device=x.device)
    for e in ids.unique().tolist():
        token, place = torch.where(ids == e)
        h = REFERENCE.activate(x[token].float() @ ups[e].float().T, act)
        y.index_add_(0, token, gates[token, place, None] * (h @ downs[e].float().T))
    return y


def layer(experts, hidden, inner, top, *, skew=0.0, shared=False, dtype=torch.bfloat16, **options):
    """A mixture, its kernels' form, and its pieces; skew makes all tokens prefer the same experts."""
    ups = rand(experts, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    downs = rand(experts, hidden, inner, dtype=dtype, scale=inner**-0.5)
    # A router in float32, as DeepSeek keeps it: near ties would fall either way in bf16.
    router = rand(experts, hidden, dtype=torch.float32, scale=hidden**-0.5)
    bias = rand(experts, dtype=torch.float32, scale=skew) if skew else None
    beside = None
    if shared:
        beside = (
            DenseWeight(rand(4 * inner, hidden, dtype=dtype, scale=hidden**-0.5)),
            DenseWeight(rand(hidden, 2 * inner, dtype=dtype, scale=inner**-0.5)),
        )
    kernels, spec = triton_kernels(**options), RouteSpec(experts, top)
    mixture = Mixture(
        DenseWeight(router, bias), spec, [DenseWeight(w) for w in ups], [DenseWeight(w.clone()) for w in downs],
        "silu_mul", beside, wide=True,
    )  # fmt: skip
    return kernels, kernels.pack_mixture(mixture), mixture, ups, downs


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 33, 64, 65, 200, 777, 4096])
@pytest.mark.parametrize("shape", [(128, 2048, 768, 8), (16, 512, 352, 4)])
@pytest.mark.parametrize("skew", [0.0, 20.0])
def test_mixture(tokens, shape, skew):
    kernels, fused, mixture, ups, downs = layer(*shape, skew=skew, shared=tokens in (1, 33))
    x, norm = rand(tokens, shape[1]), NormSpec(rand(shape[1]).abs() + 0.5, 1e-6)
    residual = rand(tokens, shape[1])
    ctx = ForwardContext(kernels, x, x, x, 1, [], [])
    h = REFERENCE.norm(x, norm)
    # Few tokens are routed before their norm is rounded.
    seen = REFERENCE.norm(x.float(), NormSpec(norm.weight.float(), norm.eps)) if tokens <= 64 else h.float()
    ids, gates = REFERENCE.route(REFERENCE.product(seen, mixture.router.table, mixture.router.bias), mixture.route)
    expected = exact(h, ups, downs, ids, gates, "silu_mul") + residual.float()
    if mixture.shared is not None:
        up, down = (w.table.float() for w in mixture.shared)
        expected += REFERENCE.activate(h.float() @ up.T, "silu_mul") @ down.T
    for _ in range(2):
        found = fused(x, ctx, norm=norm, residual=residual)
        # Almost equal experts may change places: few tokens, all others close.
        error = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert torch.isfinite(found).all()
        assert float(error.median()) < 1e-2 and float((error > 2e-2).float().mean()) <= max(0.04, 1.01 / tokens)
    assert kernels.waits == 0 and not kernels.launch.scratch.counters(x.device).any()


def test_steady_rows_ignore_their_company():
    kernels, fused, _, _, _ = layer(32, 512, 384, 4, steady=True)
    x, norm = rand(700, 512), NormSpec(rand(512).abs() + 0.5, 1e-6)

    def run(part):
        return fused(part, ForwardContext(kernels, part, part, part, 1, [], []), norm=norm, residual=part)

    together = run(x)
    for first, last in ((0, 1), (3, 20), (100, 700)):
        assert torch.equal(run(x[first:last]), together[first:last])


@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_float32(tokens):
    kernels, fused, mixture, ups, downs = layer(12, 320, 160, 3, dtype=torch.float32)
    x = rand(tokens, 320, dtype=torch.float32)
    ids, gates = REFERENCE.route(REFERENCE.product(x, mixture.router.table), mixture.route)
    found = fused(x, ForwardContext(kernels, x, x, x, 1, [], []))
    assert relative(found, exact(x, ups, downs, ids, gates, "silu_mul")) < 1e-4


@pytest.mark.parametrize("tokens", [17, 32, 50, 64])
@pytest.mark.parametrize("near", [False, True])
def test_a_split_router_chooses_alike(tokens, near):
    from tokenmill.kernels.triton.experts.route import pick
    from tokenmill.kernels.triton.experts.route_few import pick_few, splits

    kernels, spec, x = triton_kernels(), RouteSpec(128, 8), rand(tokens, 2048)
    router, norm = rand(128, 2048, scale=2048**-0.5), NormSpec(rand(2048).abs() + 0.5, 1e-6)
    soon = rand(128, 1 << 14) if near else None
    assert splits(x, router, router.shape[0])
    expected = pick(x, router, None, norm, spec, scratch=kernels.launch.scratch, pdl=kernels.launch.pdl, keep=True)
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(20):
        found = pick_few(
            x, router, None, norm, spec, scratch=kernels.launch.scratch, count=count, pdl=kernels.launch.pdl, near=soon
        )
        assert float((found[0] == expected[0]).float().mean()) > 0.999  # near ties may fall either way
        assert torch.allclose(found[1], expected[1], atol=1e-3) and relative(found[2], expected[2]) < 1e-2


BASE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "vocab_size": 2048, "max_position_embeddings": 4096, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "moe_intermediate_size": 192, "num_experts_per_tok": 4,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 2,
        "head_dim": 64, "num_experts": 32, "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **BASE, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 8,
        "q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "n_routed_experts": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_engine_like_the_reference(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    asked = [{"prompt_token_ids": torch.randint(0, 2048, (5 + 13 * i % 200,)).tolist()} for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = {}
    for kernels, options in (("auto", {}), ("auto", {"enforce_eager": True}), ("reference", {"enforce_eager": True})):
        with LLM(
            model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=64,
            num_gpu_blocks_override=600, dtype="float32", kernels=kernels, **options,
        ) as llm:  # fmt: skip
            outputs = llm.generate(asked, params, use_tqdm=False)
            found[kernels, bool(options)] = [list(o.outputs[0].token_ids) for o in outputs]
            if not options:
                runner = llm.engine.executor.runner
                graphs = runner.recorders[0].recordings
                assert graphs.possible and graphs.made, "decode steps are recorded"
                assert runner.kernels.waits == 0
    expected = found["reference", True]
    assert agreement(found["auto", False], expected) > 0.97
    assert agreement(found["auto", True], expected) > 0.97


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_quantised_experts_are_recorded(scheme, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    with LLM(
        model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=32,
        num_gpu_blocks_override=300, quantization=scheme,
    ) as llm:  # fmt: skip
        outputs = llm.generate(
            [{"prompt_token_ids": torch.randint(0, 2048, (9 + 40 * i,)).tolist()} for i in range(12)], params,
            use_tqdm=False,
        )  # fmt: skip
        runner = llm.engine.executor.runner
        graphs = runner.recorders[0].recordings
        assert graphs.possible and graphs.made and runner.kernels.waits == 0
        assert "experts" in runner.kernels.counters()
    assert all(len(o.outputs[0].token_ids) == 12 for o in outputs)


@pytest.mark.parametrize(("kind", "dtype"), [
    *((kind, torch.bfloat16) for kind in ("fp8", "blocks", "int4", "int4z/32", "fp4/16", "fp4/32", "nf4/64")),
    *((kind, torch.float16) for kind in ("int4", "int4z/32", "nf4/64")),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 5, 64, 300, 2048])
def test_packed_experts(kind, dtype, tokens):
    from tests.gpu.gpu_narrow_helpers import matrix as made

    from tokenmill.kernels.triton.quantised.narrow import pack4, pack8

    # gpt-oss has 2880 columns: no multiple of 128
    experts, hidden, inner, top = 16, 480 if kind == "fp4/32" else 512, 352 if kind == "fp4/32" else 384, 4

    def matrix(rows, columns):
        if "/" in kind:
            return made(kind, rows, columns)
        if kind == "int4":
            q = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, device="cuda")
            return pack4(q, rand(rows, columns // 128, dtype=torch.float16).abs() * columns**-0.5, None, None)
        data = rand(rows, columns, dtype=torch.float32).to(torch.float8_e4m3fn)
        cut = (rows // 128, columns // 128) if kind == "blocks" else (rows, 1)
        return pack8(data, rand(*cut, dtype=torch.float32).abs() * columns**-0.5, None, blocks=kind == "blocks")

    class Packed(WeightBase):
        def __init__(self, packed):
            self.packed, self.shape = packed, packed.shape

        def pieces(self):
            return self.packed.pieces()

    ups = [Packed(matrix(2 * inner, hidden)) for _ in range(experts)]
    downs = [Packed(matrix(hidden, inner)) for _ in range(experts)]
    wide = [
        torch.stack([w.packed.rows(torch.arange(w.shape[0], device="cuda"), torch.float32) for w in part])
        for part in (ups, downs)
    ]
    router = rand(experts, hidden, dtype=torch.float32, scale=hidden**-0.5)
    kernels, spec, x = triton_kernels(), RouteSpec(experts, top), rand(tokens, hidden, dtype=dtype)
    fused = kernels.pack_mixture(Mixture(DenseWeight(router), spec, ups, downs, "silu_mul", wide=True))
    ids, gates = REFERENCE.route(REFERENCE.product(x.float(), router), spec)
    found = fused(x, ForwardContext(kernels, x, x, x, 1, [], []))
    # One token meets 4 bits in 8 bits of its own, a step for every 32 columns; several meet 8 bits in float8.
    one, several = (1e-2, 6e-2) if kind in ("fp8", "blocks") else (2.5e-2, 1e-2)
    assert relative(found, exact(x, *wide, ids, gates, "silu_mul")) < (one if tokens == 1 else several)


def test_streamed_experts_again_and_again():
    """Programs that stay for many tiles, launches close together: the same bytes each time, and none hangs."""
    from tokenmill.kernels.triton.common import Scratch
    from tokenmill.kernels.triton.experts.narrow_grouped import NarrowStack
    from tokenmill.kernels.triton.experts.narrow_streamed import can_stream_experts, narrow_streamed, pick_cut
    from tokenmill.kernels.triton.experts.sorting import sort_rows

    def stack(rows, columns):
        words = torch.randint(-(1 << 15), 1 << 15, (64, rows, columns // 4), dtype=torch.int16, device="cuda")
        return NarrowStack(words, rand(64, columns // 32, rows, scale=1e-2), None, None, (rows, columns), 32)

    ups, downs, scratch, size = stack(1536, 2048), stack(2048, 768), Scratch(), 16
    if not triton_kernels().launch.hopper:
        pytest.skip("streams on Hopper only")
    for tokens in (8, 32, 100):
        x = rand(tokens, 2048)
        assert can_stream_experts(x, ups, gated=True)
        ids = torch.rand(tokens, 64, device="cuda").argsort(1)[:, :8].int()
        order, rows = sort_rows(x, ids, 64, size, scratch, pdl=True)

        def run(order=order, rows=rows):
            inner = narrow_streamed(rows, ups, order, "silu_mul", up=True, pdl=True, cut=pick_cut(size, gated=True))
            return narrow_streamed(inner, downs, order, None, up=False, pdl=True, cut=pick_cut(size, gated=False))

        first = run()
        for _ in range(20):
            found = [run() for _ in range(20)]
            assert all(torch.equal(one, first) for one in found)
