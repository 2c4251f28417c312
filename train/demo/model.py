"""The network used in training. Owns: a packed, compiled decoder in plain torch (dense or MoE) and its export names."""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.nn.functional as F
from shapes import Shape
from torch import Tensor, nn


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last dimension, computed in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    return (y * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, D] with cos, sin [B, 1, T, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


class Decoder(nn.Module):
    """A decoder whose matrices of the same kind are stacked over layers (one Muon update for all)."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = s = shape
        generator = torch.Generator().manual_seed(seed)

        def matrix(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=generator) * size[-1] ** -0.5)

        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.embed = nn.Parameter(torch.randn(s.vocab, s.dim, generator=generator) * 0.02)
        self.q, self.k, self.v = matrix(s.layers, q, s.dim), matrix(s.layers, kv, s.dim), matrix(s.layers, kv, s.dim)
        self.o = nn.Parameter(torch.zeros(s.layers, s.dim, q))
        if s.experts:
            self.router = matrix(s.layers, s.experts, s.dim)
            self.gate, self.up = matrix(s.layers, s.experts, s.ffn, s.dim), matrix(s.layers, s.experts, s.ffn, s.dim)
            self.down = nn.Parameter(torch.zeros(s.layers, s.experts, s.dim, s.ffn))
        else:
            self.gate, self.up = matrix(s.layers, s.ffn, s.dim), matrix(s.layers, s.ffn, s.dim)
            self.down = nn.Parameter(torch.zeros(s.layers, s.dim, s.ffn))
        self.norm1, self.norm2 = nn.Parameter(torch.ones(s.layers, s.dim)), nn.Parameter(torch.ones(s.layers, s.dim))
        self.norm = nn.Parameter(torch.ones(s.dim))
        if s.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(s.layers, s.head_dim))
            self.k_norm = nn.Parameter(torch.ones(s.layers, s.head_dim))
        frequency = s.theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angle = torch.outer(torch.arange(s.positions).float(), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon trains."""
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def others(self) -> list[nn.Parameter]:
        """Norms and the router."""
        chosen = {id(p) for p in self.matrices()} | {id(self.embed)}
        return [p for p in self.parameters() if id(p) not in chosen]

    def forward(
        self, ids: Tensor, positions: Tensor, mask: object, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [B, T, dim] after the last norm, the router's balance loss, and the load [layers, experts]."""
        s = self.shape
        b, t = ids.shape
        cos, sin = (x[positions].unsqueeze(1).to(dtype) for x in (self.cos, self.sin))
        names = ["q", "k", "v", "o", "gate", "up", "down"] + (["router"] if s.experts else [])
        layers = zip(*(getattr(self, n).to(dtype).unbind(0) for n in names), strict=True)
        x = F.embedding(ids, self.embed.to(dtype))
        balance = torch.zeros((), device=ids.device)
        loads = []
        for i, (wq, wk, wv, wo, gate, up, down, *router) in enumerate(layers):
            h = norm(x, self.norm1[i])
            q = (h @ wq.T).view(b, t, s.heads, s.head_dim)
            k = (h @ wk.T).view(b, t, s.kv_heads, s.head_dim)
            v = (h @ wv.T).view(b, t, s.kv_heads, s.head_dim).transpose(1, 2)
            if s.qk_norm:
                q, k = norm(q, self.q_norm[i]), norm(k, self.k_norm[i])
            q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
            a = attend(q, k, v, mask)
            x = x + a.transpose(1, 2).reshape(b, t, -1) @ wo.T
            h = norm(x, self.norm2[i])
            if s.experts:
                y, loss, load = experts(h, router[0], gate, up, down, s.top_k)
                balance, x = balance + loss, x + y
                loads.append(load)
            else:
                x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
        return norm(x, self.norm), balance, torch.stack(loads) if loads else balance


def attend(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
    """Attention inside documents: flex attention with a block mask, or SDPA with a dense mask on the CPU."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def experts(
    h: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All experts on all tokens, mixed by the normalised top-k weights; balance loss and load per expert."""
    probabilities = (h @ router.T).float().softmax(-1)
    best, index = probabilities.topk(top_k, -1)
    best = best / best.sum(-1, keepdim=True)
    weights = torch.zeros_like(probabilities).scatter(-1, index, best)
    inner = F.silu(torch.einsum("btd,efd->btef", h, gate)) * torch.einsum("btd,efd->btef", h, up)
    inner = inner * weights.to(h.dtype).unsqueeze(-1)
    y = torch.einsum("btef,edf->btd", inner, down)
    load = (weights > 0).float().mean((0, 1)) / top_k
    return y, probabilities.shape[-1] * (load.detach() * probabilities.mean((0, 1))).sum(), load.detach()


def unpack(block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows [B, 2, T] as ids, targets, target weights, positions and document numbers, each [B, T]."""
    ids, words = block[:, 0].long(), block[:, 1].long()
    start = words >= 256
    weights = (words % 256).float() / 10
    document = start.long().cumsum(-1)
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    positions = index - torch.where(start, index, 0).cummax(-1).values
    targets = torch.roll(ids, -1, 1)
    target_weights = torch.roll(weights, -1, 1) * (torch.roll(document, -1, 1) == document)
    target_weights[:, -1] = 0
    return ids, targets, target_weights, positions, document


_mask_maker = None


def document_mask(document: Tensor) -> object:
    """The causal mask inside documents: dense on the CPU, a block mask on the GPU."""
    global _mask_maker
    b, t = document.shape
    if document.device.type == "cpu":
        same = document.unsqueeze(1) == document.unsqueeze(2)
        return (same & torch.ones(t, t, dtype=torch.bool).tril()).unsqueeze(1)
    from torch.nn.attention.flex_attention import create_block_mask

    if _mask_maker is None:
        _mask_maker = torch.compile(create_block_mask, dynamic=False)

    def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[batch, query] == document[batch, key])

    return _mask_maker(inside, b, None, t, t, device=document.device)


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor, z: float) -> Tensor:
    """Weighted mean of the cross entropy plus the z-loss."""
    logits = logits.float()
    total = torch.logsumexp(logits, -1)
    picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (weights * (total - picked + z * total.square())).sum() / weights.sum().clamp(min=1)


def hf_state(model: Decoder, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The weights under the names of Transformers (Qwen3, Llama or Qwen3Moe)."""
    s = model.shape
    out = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for i in range(s.layers):
        p = f"model.layers.{i}."
        for name in "qkvo":
            out[f"{p}self_attn.{name}_proj.weight"] = getattr(model, name)[i]
        if s.qk_norm:
            out[f"{p}self_attn.q_norm.weight"], out[f"{p}self_attn.k_norm.weight"] = model.q_norm[i], model.k_norm[i]
        out[f"{p}input_layernorm.weight"], out[f"{p}post_attention_layernorm.weight"] = model.norm1[i], model.norm2[i]
        for name in ("gate", "up", "down"):
            if s.experts:
                for e in range(s.experts):
                    out[f"{p}mlp.experts.{e}.{name}_proj.weight"] = getattr(model, name)[i, e]
            else:
                out[f"{p}mlp.{name}_proj.weight"] = getattr(model, name)[i]
        if s.experts:
            out[f"{p}mlp.gate.weight"] = model.router[i]
    return {k: v.detach().to(dtype).cpu().contiguous().clone() for k, v in out.items()}


def hf_config(shape: Shape) -> dict:
    """The config.json that Transformers reads."""
    s = asdict(shape)
    family = "Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"
    kind = {"Qwen3MoeForCausalLM": "qwen3_moe", "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}[family]
    config = {
        "architectures": [family],
        "model_type": kind,
        "vocab_size": s["vocab"],
        "hidden_size": s["dim"],
        "intermediate_size": s["ffn"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": s["theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": s["theta"]},
        "max_position_embeddings": s["positions"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind.startswith("qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None}
    if shape.experts:
        config |= {
            "num_experts": s["experts"],
            "num_experts_per_tok": s["top_k"],
            "moe_intermediate_size": s["ffn"],
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
        }
    return config


def load_decoder(folder: str, shape: Shape) -> Decoder:
    """A decoder with the weights of a dense Transformers folder."""
    from safetensors.torch import load_file

    state = load_file(f"{folder}/model.safetensors")
    model = Decoder(shape)
    names = {name: f"self_attn.{name}_proj.weight" for name in "qkvo"}
    names |= {name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    names |= {"norm1": "input_layernorm.weight", "norm2": "post_attention_layernorm.weight"}
    if shape.qk_norm:
        names |= {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
    with torch.no_grad():
        model.embed.copy_(state["model.embed_tokens.weight"])
        model.norm.copy_(state["model.norm.weight"])
        for name, key in names.items():
            for i in range(shape.layers):
                getattr(model, name)[i].copy_(state[f"model.layers.{i}.{key}"])
    return model
