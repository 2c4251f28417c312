"""EAGLE heads of one layer and of several: what they guess is what plain torch makes of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import MOST, make_eagle
from engine_draft_models_helpers import PROMPTS
from engines import all_of_them, exact, greedy, hear_guesses, open_usual, run
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from tokenmill.core.errors import UserError
from tokenmill.testing.tiny import make_tiny

HEADS, HIDDEN, WORDS, READS = 4, 64, 100, (1, 2, 2)


class Reference:
    """Guesses in plain torch, over whole texts."""

    def __init__(self, target: Any, head: Path) -> None:
        self.target = target
        self.tensors = load_file(head / "model.safetensors")
        self.layers = json.loads((head / "config.json").read_text())["num_hidden_layers"]
        self.third = "lm_head.weight" in self.tensors

    def _times(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.tensors[f"{name}.weight"]

    def _layer(self, at: str, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, width], states [T, hidden] -> states [T, hidden]."""
        count, size = x.shape[0], HIDDEN // HEADS
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat((part(angles),) * 2, -1) for part in (torch.cos, torch.sin))

        def rotated(y: Tensor) -> Tensor:
            half = size // 2
            return y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin

        q, k, v = (self._times(x, f"{at}.self_attn.{n}_proj").view(count, HEADS, size).transpose(0, 1) for n in "qkv")
        seen = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        middle = residual + self._times(seen.transpose(0, 1).reshape(count, -1), f"{at}.self_attn.o_proj")
        y = self._norm(middle, f"{at}.post_attention_layernorm")
        gate = silu(self._times(y, f"{at}.mlp.gate_proj")) * self._times(y, f"{at}.mlp.up_proj")
        return middle + self._times(gate, f"{at}.mlp.down_proj")

    def _net(self, words: Tensor, states: Tensor) -> Tensor:
        if self.third:
            both = self._norm(words, "midlayer.input_layernorm"), self._norm(states, "midlayer.hidden_norm")
            found = self._layer("midlayer", torch.cat(both, -1), states)
        else:
            joined = self._times(torch.cat((words, states), -1), "fc")
            found = self._layer("layers.0", joined, joined)
        for n in range(1, self.layers):
            found = self._layer(f"layers.{n}", self._norm(found, f"layers.{n}.input_layernorm"), found)
        return found

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        with torch.no_grad():
            seen = self.target(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = self._times(torch.cat([seen[n][0] for n in READS], -1), "fc") if self.third else seen[-1][0]
        found: list[int] = []
        table = self.target.get_input_embeddings().weight.detach()
        for _ in range(count):
            out = self._net(table[torch.tensor(tokens[1:] + found)], states)
            if self.third:
                word = int(self._times(self._norm(out[-1], "norm"), "lm_head").argmax())
                found.append(word + int(self.tensors["d2t"][word]))
            else:
                found.append(int((out[-1] @ table.T).argmax()))
            states = torch.cat((states, out[-1:]))
        return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("eagle") / "target", layers=3)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_what_a_head_guesses(method: str, layers: int, target: Path, tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    head = make_eagle(tmp_path / "head", WORDS if method == "eagle3" else 0, layers=layers, reads=READS)
    file = head / "model.safetensors"
    tensors = load_file(file)
    noisy = {
        n: t + 0.3 * torch.randn_like(t) if t.ndim == 1 and t.is_floating_point() else t for n, t in tensors.items()
    }
    save_file(noisy, file)  # norms that are not all one
    config = {"method": method, "model": str(head), "num_speculative_tokens": MOST}
    with open_usual(target) as llm:
        wanted = [exact(o) for o in run(llm, PROMPTS[:4], greedy(20))]
    found: dict[tuple[int, ...], list[int]] = {}
    for more in ({}, {"max_num_batched_tokens": 16, "depth": 2}):
        with all_of_them(open_usual(target, speculative_config=config, **more)) as llm:
            hear_guesses(llm, found)
            assert [exact(o) for o in run(llm, PROMPTS[:4], greedy(20))] == wanted
    reference = Reference(hf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval(), head)
    texts = sorted(found)[:: max(1, len(found) // 16)]
    right = [found[text] == reference.guesses(list(text), MOST) for text in texts]
    assert len(right) >= 12 and sum(right) >= len(right) - 1, right  # two logits may be one in float32


def test_a_layer_that_is_not_there(target: Path, tmp_path: Path) -> None:
    head = make_eagle(tmp_path / "head", layers=2)
    said = json.loads((head / "config.json").read_text())
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": MOST}
    for count, why in ((3, "layers.2"), (1, "layers.1"), (0, "num_hidden_layers")):
        (head / "config.json").write_text(json.dumps(said | {"num_hidden_layers": count}))
        with pytest.raises(UserError, match=why):
            open_usual(target, speculative_config=config)
