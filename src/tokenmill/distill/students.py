"""Who learns. Owns: the three kinds of drafters as trainable networks, what each is asked, and the files they become.

    draft    a small Llama: at each position the teacher's next token
    medusa   heads on the teacher's last hidden state: head i the token i + 2 places on
    eagle3   one layer on three layers' outputs and the next word: what the teacher says one place later, then again
             from its own state, as in service

Must not know: how the teacher is loaded, optimisers.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmill.distill.teacher import States, Teacher

WORDS_ASIDE = 0.3
"""Weight of the text's own next token beside what the teacher thinks of all tokens."""
EPS = 1e-6


class Student(Protocol):
    """A drafter in the making."""

    net: nn.Module
    wants_logits: bool

    def loss(self, states: States) -> tuple[Tensor, Tensor]:
        """What is to become small, and the share of guesses that were right, by place."""
        ...

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors."""
        ...


class Norm(nn.Module):
    """Root mean square."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Layer(nn.Module):
    """A Llama layer; `wide`: how many inputs its attention reads side by side."""

    def __init__(self, hidden: int, inner: int, heads: tuple[int, int, int], theta: float, wide: int = 1) -> None:
        super().__init__()
        self.heads, self.theta = heads, theta
        count, kv, dim = heads
        self.q_proj = nn.Linear(wide * hidden, count * dim, bias=False)
        self.k_proj = nn.Linear(wide * hidden, kv * dim, bias=False)
        self.v_proj = nn.Linear(wide * hidden, kv * dim, bias=False)
        self.o_proj = nn.Linear(count * dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.post_attention_layernorm = Norm(hidden)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [B, T, wide * hidden], already normed."""
        q, k, v = (
            p(x).unflatten(-1, (n, self.heads[2])).transpose(1, 2)
            for p, n in ((self.q_proj, self.heads[0]), (self.k_proj, self.heads[1]), (self.v_proj, self.heads[1]))
        )
        q, k = (self._turn(part) for part in (q, k))
        share = self.heads[0] // self.heads[1]
        k, v = (part.repeat_interleave(share, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = residual + self.o_proj(mixed.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def _turn(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        inverse = self.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * inverse
        cos, sin, first, second = angle.cos(), angle.sin(), x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Its tensors as files name them."""
        found = {}
        for name, value in self.state_dict().items():
            where = "self_attn." if name[0] in "qkvo" else "mlp." if "norm" not in name else ""
            found[f"{prefix}.{where}{name}"] = value
        return found


class DraftStudent:
    """A Llama of a few narrow layers with the teacher's vocabulary."""

    wants_logits = True

    def __init__(self, teacher: Teacher, *, hidden: int, layers: int) -> None:
        spec = teacher.model.spec
        self.vocab, self.hidden, self.inner = spec.vocab_size, hidden, _rounded(hidden * 8 / 3)
        self.heads, self.theta, self.positions = _heads(hidden), 10000.0, spec.max_positions
        net = nn.Module()
        net.embed = nn.Embedding(self.vocab, hidden)
        nn.init.normal_(net.embed.weight, std=0.02)
        if teacher.embedding.shape[1] == hidden:
            net.embed.weight.data.copy_(teacher.embedding)
        net.layers = nn.ModuleList(Layer(hidden, self.inner, self.heads, self.theta) for _ in range(layers))
        net.firsts = nn.ModuleList(Norm(hidden) for _ in range(layers))
        net.norm = Norm(hidden)
        self.net = net.to(teacher.device)

    def loss(self, states: States) -> tuple[Tensor, Tensor]:
        net: Any = self.net
        x = net.embed(states.tokens)
        for layer, first in zip(net.layers, net.firsts, strict=True):
            x = layer(first(x), x)
        said = net.norm(x) @ net.embed.weight.t()
        assert states.logits is not None
        loss = _apart(said, states.logits) + WORDS_ASIDE * _missed(said[:, :-1], states.tokens[:, 1:])
        return loss, _agree(said, states.logits)[None]

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        net: Any = self.net
        tensors = {"model.embed_tokens.weight": net.embed.weight.data, "model.norm.weight": net.norm.weight.data}
        for n, (layer, first) in enumerate(zip(net.layers, net.firsts, strict=True)):
            tensors |= layer.named(f"model.layers.{n}")
            tensors[f"model.layers.{n}.input_layernorm.weight"] = first.weight.data
        return _llama(self, len(net.layers)), tensors


class MedusaStudent:
    """Heads of one block each, beginning as the identity: the first loss is that of saying the next token again."""

    wants_logits = False

    def __init__(self, teacher: Teacher, *, heads: int) -> None:
        self.hidden, self.vocab = teacher.model.spec.hidden_size, teacher.model.spec.vocab_size
        self.words = teacher.head.to(teacher.device)
        self.blocks = [nn.Linear(self.hidden, self.hidden) for _ in range(heads)]
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.net: nn.Module = nn.ModuleList(self.blocks).to(teacher.device)

    def loss(self, states: States) -> tuple[Tensor, Tensor]:
        losses, right = [], []
        for n, block in enumerate(self.blocks):
            x = states.hidden[:, : -2 - n]
            said = (x + F.silu(block(x))) @ self.words.t()
            wanted = states.tokens[:, 2 + n :]
            losses.append(_missed(said, wanted) * 0.8**n)
            right.append((said.argmax(-1) == wanted).float().mean())
        return torch.stack(losses).sum(), torch.stack(right)

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        for n, block in enumerate(self.blocks):
            tensors |= {f"blocks.{n}.layers.0.weight": block.weight.data, f"blocks.{n}.layers.0.bias": block.bias.data}
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": self.hidden}
        config |= {"vocab_size": self.vocab, "num_heads": len(self.blocks), "num_hidden_layers": 1}
        return config | {"original_lm_head": True, "medusa_fc_bias": True}, tensors


class Eagle3Student:
    """One layer that is given three of the teacher's and the next word, and goes on from its own states."""

    wants_logits = True
    STEPS = 2

    def __init__(self, teacher: Teacher) -> None:
        spec = teacher.model.spec
        self.vocab, self.hidden, self.inner = spec.vocab_size, spec.hidden_size, _rounded(spec.hidden_size * 3)
        self.heads, self.theta, self.positions = _heads(self.hidden), 10000.0, spec.max_positions
        self.embedding, self.taps = teacher.embedding, teacher.taps
        net = nn.Module()
        net.fc = nn.Linear(3 * self.hidden, self.hidden, bias=False)
        net.layer = Layer(self.hidden, self.inner, self.heads, self.theta, wide=2)
        net.words_norm, net.states_norm, net.norm = Norm(self.hidden), Norm(self.hidden), Norm(self.hidden)
        net.head = nn.Linear(self.hidden, self.vocab, bias=False)
        net.head.weight.data.copy_(teacher.head)
        nn.init.normal_(net.fc.weight, std=1 / math.sqrt(3 * self.hidden))
        self.net = net.to(teacher.device)

    def loss(self, states: States) -> tuple[Tensor, Tensor]:
        net: Any = self.net
        assert states.taps is not None and states.logits is not None
        words = self.embedding[states.tokens]
        x = net.fc(states.taps[:, :-1])
        losses, right = [], []
        for n in range(self.STEPS):  # states[p] with the word at p + 1 + n says what comes at p + 2 + n
            both = torch.cat((net.words_norm(words[:, 1 + n :]), net.states_norm(x)), -1)
            x = net.layer(both, x)
            said = net.head(net.norm(x))
            losses.append(_apart(said, states.logits[:, 1 + n :]) * 0.8**n)
            right.append(_agree(said, states.logits[:, 1 + n :]))
            x = x[:, :-1]
        return torch.stack(losses).sum(), torch.stack(right)

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        net: Any = self.net
        tensors = {"fc.weight": net.fc.weight.data, "norm.weight": net.norm.weight.data}
        tensors |= {"lm_head.weight": net.head.weight.data, **net.layer.named("midlayer")}
        tensors["midlayer.input_layernorm.weight"] = net.words_norm.weight.data
        tensors["midlayer.hidden_norm.weight"] = net.states_norm.weight.data
        config = _llama(self, 1) | {"draft_vocab_size": self.vocab, "architectures": ["LlamaForCausalLMEagle3"]}
        return config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in self.taps]}}, tensors


def _llama(student: DraftStudent | Eagle3Student, layers: int) -> dict[str, Any]:
    heads, kv, dim = student.heads
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": student.vocab,
        "hidden_size": student.hidden, "intermediate_size": student.inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim, "hidden_act": "silu",
        "rms_norm_eps": EPS, "rope_theta": student.theta, "max_position_embeddings": student.positions,
        "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip


def _apart(said: Tensor, wanted: Tensor) -> Tensor:
    """How far two distributions over words are apart: the divergence from the teacher's."""
    return F.kl_div(said.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum") / _count(said)


def _missed(said: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(said.flatten(0, 1), tokens.flatten())


def _agree(said: Tensor, wanted: Tensor) -> Tensor:
    return (said.argmax(-1) == wanted.argmax(-1)).float().mean()


def _count(x: Tensor) -> int:
    return x.shape[0] * x.shape[1]


def _rounded(size: float) -> int:
    return -(-int(size) // 64) * 64


def _heads(hidden: int) -> tuple[int, int, int]:
    """(query heads, key heads, numbers in a head) of a layer this wide."""
    dim = 128 if hidden >= 1024 else 64 if hidden >= 128 else 32
    count = max(1, hidden // dim)
    return count, count // 4 if count % 4 == 0 and count >= 8 else count, dim
