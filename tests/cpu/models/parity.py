"""Runs a tiny random Transformers model and ours on the same tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.cpu.kernels.paged_batch import PagedBatch
from torch import Tensor

from tokenmill.compute.model import CausalLM
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.registry import build_model


class DictCheckpoint:
    """name -> tensor from a dict."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return list(self.tensors)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        found = self.tensors[name]
        return found if dtype is None else found.to(dtype)

    def part(self, name: str, dim: int, start: int, stop: int, shape: Any = None, dtype: Any = None) -> Tensor:
        return self.tensor(name, shape, dtype).narrow(dim, start, stop - start)

    def close(self) -> None:
        self.tensors = {}


def make(
    config: Any, folder: Path, *, attention: str = "eager", architecture: str | None = None
) -> tuple[Any, dict, dict[str, Tensor]]:
    """A random Transformers model of this config, saved and read back: (model, config.json, tensors).

    architecture: what published files say, where Transformers saves another name."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = copy.deepcopy(config)  # some classes write their defaults into it, and other tests share it
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Initial norms are all ones and biases all zeros: random ones would show a missing or misplaced one.
            noise = torch.randn_like(parameter)
            parameter.copy_(parameter + 0.3 * noise if "norm" in name or parameter.ndim == 1 else noise * 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    path = folder / "config.json"
    if architecture is not None:
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [architecture]}))
    tensors = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    return model, json.loads(path.read_text()), tensors


def theirs(model: Any, tokens: list[int]) -> Tensor:
    """Logits [T, vocab] of the Transformers model."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def chosen(model: Any, asked: list[int], count: int) -> list[int]:
    """The tokens that Transformers chooses next, each time from all tokens before."""
    said = list(asked)
    for _ in range(count):
        said.append(int(theirs(model, said)[-1].argmax()))
    return said[len(asked) :]


def load(config: dict, tensors: dict[str, Tensor], **options: Any) -> CausalLM:
    """Ours from the same files."""
    options = {"dtype": torch.float32, "kernels": ReferenceKernels(), **options}
    return build_model(config, DictCheckpoint(tensors), device="cpu", **options)


def ours(
    model: CausalLM,
    prompts: dict[str, list[int]],
    steps: list[list[tuple[str, int]]],
    kernels: Any = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Logits [T, vocab] of each sequence, computed in these steps of (name, count) grants."""
    batch = PagedBatch(model.spec.kv_specs, kernels or ReferenceKernels(), states=model.spec.states, **options)
    done = dict.fromkeys(prompts, 0)
    out: dict[str, list[Tensor]] = {name: [] for name in prompts}
    for grants in steps:
        tokens = [t for name, n in grants for t in prompts[name][done[name] : done[name] + n]]
        context = batch.step(grants)
        logits = model.logits(model.forward(torch.tensor(tokens), context), context)
        for (name, n), (start, _, _) in zip(grants, context.spans or [], strict=True):
            out[name].append(logits[start : start + n])
            done[name] += n
    return {name: torch.cat(parts) for name, parts in out.items() if parts}
