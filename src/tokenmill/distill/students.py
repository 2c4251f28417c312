"""Who learns. Owns: the three kinds of drafters as trainable networks, what each is asked, and the files they become.

    draft    a few layers cut out of the teacher, or a narrower Llama: at each position the teacher's next token
    medusa   heads on the teacher's last hidden state: head i the token i + 2 places on
    eagle3   one layer on three layers' outputs and the next word: what the teacher says one place later, then again
             from its own state, as in service

Where the teacher's own answers are learnt from, what stands in prompts counts for little, and is not judged.
Must not know: how the teacher is loaded, optimisers.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmill.distill.cutting import CutShape, shape_of
from tokenmill.distill.teacher import States, Teacher

WORDS_ASIDE = 0.3
"""Weight of the text's own next token beside what the teacher thinks of all tokens."""
EPS = 1e-6


class Student(Protocol):
    """A drafter in the making."""

    net: nn.Module
    wants_logits: bool
    stored: torch.dtype
    """Of its files' numbers."""

    @property
    def form(self) -> dict[str, int | str]:
        """What decides on its form, by the flags that say it."""
        ...

    def loss(self, states: States) -> tuple[Tensor, Tensor]:
        """What is to become small, and the share of guesses that were right, by place."""
        ...

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors."""
        ...


class StudentNorm(nn.Module):
    """Root mean square."""

    def __init__(self, size: int, eps: float = EPS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class StudentLayer(nn.Module):
    """A Llama layer, or Qwen3's (`turned`); `wide`: how many inputs its attention reads side by side."""

    def __init__(self, shape: CutShape, wide: int = 1) -> None:
        super().__init__()
        self.heads, self.theta, hidden, inner = shape.heads, shape.theta, shape.hidden, shape.inner
        count, kv, dim = shape.heads
        self.q_proj = nn.Linear(wide * hidden, count * dim, bias=False)
        self.k_proj = nn.Linear(wide * hidden, kv * dim, bias=False)
        self.v_proj = nn.Linear(wide * hidden, kv * dim, bias=False)
        self.o_proj = nn.Linear(count * dim, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.post_attention_layernorm = StudentNorm(hidden, shape.eps)
        self.q_norm = StudentNorm(dim, shape.eps) if shape.turned else nn.Identity()
        self.k_norm = StudentNorm(dim, shape.eps) if shape.turned else nn.Identity()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [B, T, wide * hidden], already normed."""
        q, k, v = (
            p(x).unflatten(-1, (n, self.heads[2])).transpose(1, 2)
            for p, n in ((self.q_proj, self.heads[0]), (self.k_proj, self.heads[1]), (self.v_proj, self.heads[1]))
        )
        q, k = self._rotate(self.q_norm(q)), self._rotate(self.k_norm(k))
        share = self.heads[0] // self.heads[1]
        k, v = (part.repeat_interleave(share, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = residual + self.o_proj(mixed.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def _rotate(self, x: Tensor) -> Tensor:
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
    """A few layers with the teacher's vocabulary: as wide as its own and cut out of it, where that can be done, else a
    narrow Llama that knows nothing. What is cut out keeps the teacher's embeddings and head as they are."""

    wants_logits = True
    stored = torch.bfloat16

    def __init__(self, teacher: Teacher, *, hidden: int, layers: int) -> None:
        """hidden: 0: the teacher's width if its layers can be cut out, else half of it."""
        spec = teacher.model.spec
        own = shape_of(teacher.raw)
        cut = teacher.layers(own, layers) if own is not None and hidden in (0, own.hidden) else None
        self.vocab, self.positions = spec.vocab_size, spec.max_positions
        wide = hidden or max(64, spec.hidden_size // 2 // 64 * 64)
        self.shape = own if own is not None and cut else _fresh(wide)
        self.layers = len(cut[0]) if cut else layers
        self._fill(teacher, self.layers, cut)

    def _fill(self, teacher: Teacher, count: int, cut: tuple[list[dict[str, Tensor]], Tensor] | None) -> None:
        """`count` layers; cut: their tensors and the last norm, if they are not to be learnt from nothing."""
        shape, embedding = self.shape, teacher.embedding
        net: Any = nn.Module()
        net.embed = nn.Embedding(self.vocab, shape.hidden)
        nn.init.normal_(net.embed.weight, std=0.02)
        if embedding.shape[1] == shape.hidden:
            net.embed.weight.data.copy_(embedding)
        net.layers = nn.ModuleList(StudentLayer(shape) for _ in range(count))
        net.firsts = nn.ModuleList(StudentNorm(shape.hidden, shape.eps) for _ in range(count))
        net.norm = StudentNorm(shape.hidden, shape.eps)
        for layer, first, tensors in zip(net.layers, net.firsts, cut[0] if cut else (), strict=False):
            first.weight.data.copy_(tensors.pop("input_layernorm.weight"))
            layer.load_state_dict(tensors)
        self.head = net.embed.weight if shape.tied else teacher.head.to(teacher.device)
        if cut:
            net.norm.weight.data.copy_(cut[1])
            net.embed.requires_grad_(False)
        self.net = net.to(teacher.device)

    @property
    def form(self) -> dict[str, int | str]:
        net: Any = self.net
        return {"--kind": "draft", "--hidden": self.shape.hidden, "--layers": len(net.layers)}

    def loss(self, states: States) -> tuple[Tensor, Tensor]:
        net: Any = self.net
        x = net.embed(states.tokens)
        for layer, first in zip(net.layers, net.firsts, strict=True):
            x = layer(first(x), x)
        said = net.norm(x[:, :-1]) @ self.head.t()
        assert states.logits is not None
        wanted, weight, judged = states.logits[:, :-1], *states.counts(1)
        loss = _apart(said, wanted, weight) + WORDS_ASIDE * _missed(said, states.tokens[:, 1:], weight)
        return loss, _agree(said, wanted.argmax(-1), judged)[None]

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        net: Any = self.net
        tensors = {"model.embed_tokens.weight": net.embed.weight.data, "model.norm.weight": net.norm.weight.data}
        if not self.shape.tied:
            tensors["lm_head.weight"] = self.head
        for n, (layer, first) in enumerate(zip(net.layers, net.firsts, strict=True)):
            tensors |= layer.named(f"model.layers.{n}")
            tensors[f"model.layers.{n}.input_layernorm.weight"] = first.weight.data
        return _config(self, len(net.layers)), tensors


class MedusaStudent:
    """Heads of one block each, beginning as the identity: the first loss is that of saying the next token again."""

    wants_logits = False
    stored = torch.bfloat16

    def __init__(self, teacher: Teacher, *, heads: int) -> None:
        self.hidden, self.vocab = teacher.model.spec.hidden_size, teacher.model.spec.vocab_size
        self.words, self.logits = teacher.head.to(teacher.device), teacher.logits
        self.blocks = [nn.Linear(self.hidden, self.hidden) for _ in range(heads)]
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.net: nn.Module = nn.ModuleList(self.blocks).to(teacher.device)

    @property
    def form(self) -> dict[str, int | str]:
        return {"--kind": "medusa", "--heads": len(self.blocks)}

    def loss(self, states: States) -> tuple[Tensor, Tensor]:
        losses, right = [], []
        for n, block in enumerate(self.blocks):
            x = states.hidden[:, : -2 - n]
            said = self.logits(x + F.silu(block(x)), self.words)
            wanted, (weight, judged) = states.tokens[:, 2 + n :], states.counts(2 + n)
            losses.append(_missed(said, wanted, weight) * 0.8**n)
            right.append(_agree(said, wanted, judged))
        return torch.stack(losses).sum(), torch.stack(right)

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        for n, block in enumerate(self.blocks):
            tensors |= {f"blocks.{n}.layers.0.weight": block.weight.data, f"blocks.{n}.layers.0.bias": block.bias.data}
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": self.hidden}
        config |= {"vocab_size": self.vocab, "num_heads": len(self.blocks), "num_hidden_layers": 1}
        return config | {"original_lm_head": True, "medusa_fc_bias": True}, tensors


def first_weights(seed: int) -> None:
    """Let the first weights of the student that is made next follow from the seed."""
    torch.manual_seed(seed)


class Eagle3Student:
    """One layer that is given three of the teacher's and the next word, and goes on from its own states."""

    wants_logits = True
    stored = torch.bfloat16
    STEPS = 2

    def __init__(self, teacher: Teacher) -> None:
        spec = teacher.model.spec
        self.vocab, self.hidden, self.positions = spec.vocab_size, spec.hidden_size, spec.max_positions
        self.shape = _fresh(self.hidden, 3)
        self.embedding, self.taps = teacher.embedding, teacher.taps
        net = nn.Module()
        net.fc = nn.Linear(3 * self.hidden, self.hidden, bias=False)
        net.layer = StudentLayer(self.shape, wide=2)
        net.words_norm, net.states_norm, net.norm = (
            StudentNorm(self.hidden),
            StudentNorm(self.hidden),
            StudentNorm(self.hidden),
        )
        net.head = nn.Linear(self.hidden, self.vocab, bias=False)
        net.head.weight.data.copy_(teacher.head)
        nn.init.normal_(net.fc.weight, std=1 / math.sqrt(3 * self.hidden))
        self.net = net.to(teacher.device)

    @property
    def form(self) -> dict[str, int | str]:
        return {"--kind": "eagle3"}

    def loss(self, states: States) -> tuple[Tensor, Tensor]:
        net: Any = self.net
        assert states.taps is not None and states.logits is not None
        words = self.embedding[states.tokens]
        x = net.fc(states.taps[:, :-1])
        losses, right = [], []
        for n in range(self.STEPS):  # states[p] with the word at p + 1 + n says what comes at p + 2 + n
            both = torch.cat((net.words_norm(words[:, 1 + n :]), net.states_norm(x)), -1)
            x = net.layer(both, x)
            said, (weight, judged) = net.head(net.norm(x[:, :-1])), states.counts(2 + n)
            wanted = states.logits[:, 1 + n : -1]
            losses.append(_apart(said, wanted, weight) * 0.8**n)
            right.append(_agree(said, wanted.argmax(-1), judged))
            x = x[:, :-1]
        return torch.stack(losses).sum(), torch.stack(right)

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        net: Any = self.net
        tensors = {"fc.weight": net.fc.weight.data, "norm.weight": net.norm.weight.data}
        tensors |= {"lm_head.weight": net.head.weight.data, **net.layer.named("midlayer")}
        tensors["midlayer.input_layernorm.weight"] = net.words_norm.weight.data
        tensors["midlayer.hidden_norm.weight"] = net.states_norm.weight.data
        config = _config(self, 1) | {"draft_vocab_size": self.vocab, "architectures": ["LlamaForCausalLMEagle3"]}
        # Programs count layers in two ways (speculate/eagle_config.py).
        behind, own = ({"eagle_aux_hidden_state_layer_ids": [tap + n for tap in self.taps]} for n in (1, 0))
        return config | behind | {"eagle_config": own}, tensors


def _config(student: DraftStudent | Eagle3Student, layers: int) -> dict[str, Any]:
    shape = student.shape
    heads, kv, dim = shape.heads
    name = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}[shape.family]
    return {
        "architectures": [f"{name}ForCausalLM"], "model_type": shape.family, "vocab_size": student.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim, "hidden_act": "silu",
        "rms_norm_eps": shape.eps, "rope_theta": shape.theta, "max_position_embeddings": student.positions,
        "tie_word_embeddings": shape.tied, "dtype": "bfloat16",
    }  # fmt: skip


def _apart(said: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """How far two distributions over words are apart: the divergence from the teacher's."""
    sure = wanted.log_softmax(-1)
    found = (sure.exp() * (sure - said.log_softmax(-1))).sum(-1)
    return (found * weight).sum() / weight.sum().clamp(min=1)


def _missed(said: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    found = F.cross_entropy(said.flatten(0, 1), tokens.flatten(), reduction="none")
    return (found * weight.flatten()).sum() / weight.sum().clamp(min=1)


def _agree(said: Tensor, wanted: Tensor, judged: Tensor) -> Tensor:
    """The share of right guesses among those that are judged."""
    return ((said.argmax(-1) == wanted) & judged).sum() / judged.sum().clamp(min=1)


def _fresh(hidden: int, times: float = 8 / 3) -> CutShape:
    """Of a Llama this wide, `times` as wide inside."""
    return CutShape("llama", hidden, _rounded(hidden * times), _heads(hidden), 10000.0, EPS)


def _rounded(size: float) -> int:
    return -(-int(size) // 64) * 64


def _heads(hidden: int) -> tuple[int, int, int]:
    """(query heads, key heads, numbers in a head) of a layer this wide."""
    dim = 128 if hidden >= 1024 else 64 if hidden >= 128 else 32
    count = max(1, hidden // dim)
    return count, count // 4 if count % 4 == 0 and count >= 8 else count, dim
