"""What an EAGLE head guesses, in plain torch, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu


class Reference:
    """Guesses over whole texts. reads: the target's hidden states that EAGLE-3 reads, as Transformers counts them."""

    def __init__(self, target: Any, head: Path, reads: tuple[int, ...], *, heads: int) -> None:
        self.target, self.reads, self.heads = target, reads, heads
        self.tensors = load_file(head / "model.safetensors")
        said = json.loads((head / "config.json").read_text())
        self.decoder = said.get("transformer_layer_config", said)
        self.said = {"norm_before_residual": "transformer_layer_config" in said} | said.get("eagle_config", {}) | said
        self.third = "norm.weight" in self.tensors
        self.first = "midlayer" if "midlayer.mlp.up_proj.weight" in self.tensors else "layers.0"

    def _times(self, x: Tensor, name: str) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        return x @ self.tensors[f"{name}.weight"].T + (0 if bias is None else bias)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.tensors[f"{name}.weight"]

    def _seen(self, count: int) -> Tensor:
        """Which positions see which [T, T]."""
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        window = self.decoder.get("sliding_window")
        return seen if window is None else seen & ~seen.tril(-window)

    def _layer(self, at: str, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, width], states [T, hidden] -> states [T, hidden]."""
        count, size = x.shape[0], residual.shape[1] // self.heads
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat((part(angles),) * 2, -1) for part in (torch.cos, torch.sin))

        def turned(y: Tensor, norm: str) -> Tensor:
            if f"{at}.self_attn.{norm}.weight" in self.tensors:
                y = self._norm(y, f"{at}.self_attn.{norm}")
            half = size // 2
            return y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin

        q, k, v = (
            self._times(x, f"{at}.self_attn.{n}_proj").view(count, self.heads, size).transpose(0, 1) for n in "qkv"
        )
        seen = scaled_dot_product_attention(turned(q, "q_norm"), turned(k, "k_norm"), v, attn_mask=self._seen(count))
        middle = residual + self._times(seen.transpose(0, 1).reshape(count, -1), f"{at}.self_attn.o_proj")
        y = self._norm(middle, f"{at}.post_attention_layernorm")
        gate = silu(self._times(y, f"{at}.mlp.gate_proj")) * self._times(y, f"{at}.mlp.up_proj")
        return middle + self._times(gate, f"{at}.mlp.down_proj")

    def _net(self, words: Tensor, states: Tensor) -> Tensor:
        if self.third:
            normed = self._norm(states, f"{self.first}.hidden_norm")
            both = torch.cat((self._norm(words, f"{self.first}.input_layernorm"), normed), -1)
            found = self._layer(self.first, both, normed if self.said["norm_before_residual"] else states)
        else:
            joined = self._times(torch.cat((words, states), -1), "fc")
            found = self._layer(self.first, joined, joined)
        for n in range(1, self.decoder["num_hidden_layers"]):
            found = self._layer(f"layers.{n}", self._norm(found, f"layers.{n}.input_layernorm"), found)
        return self._norm(found, "norm") if self.said.get("norm_output") else found

    def _joined(self, seen: Any) -> Tensor:
        """What the first step reads [T, hidden]."""
        if not self.third or self.said.get("use_aux_hidden_state") is False:
            return seen[-1][0]
        parts = [seen[n][0] for n in self.reads]
        if self.said.get("fc_norm"):
            parts = [self._norm(part, f"fc_norm.{n}") for n, part in enumerate(parts)]
        taps = torch.cat(parts, -1)
        return self._times(self._norm(taps, "input_norm") if self.said.get("norm_before_fc") else taps, "fc")

    def _word(self, state: Tensor, table: Tensor) -> int:
        if self.third and not self.said.get("norm_output"):
            state = self._norm(state, "norm")
        word = int((state @ self.tensors.get("lm_head.weight", table).T).argmax())
        return word + int(self.tensors["d2t"][word]) if "d2t" in self.tensors else word

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        with torch.no_grad():
            seen = self.target(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states, found = self._joined(seen), []
        table = self.target.get_input_embeddings().weight.detach()
        for _ in range(count):
            words = self.tensors.get("embed_tokens.weight", table)[torch.tensor(tokens[1:] + found)]
            out = self._net(words, states)
            found.append(self._word(out[-1], table))
            states = torch.cat((states, out[-1:]))
        return found
