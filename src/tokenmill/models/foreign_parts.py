"""A model of Transformers in two halves. Owns: running the layers and the head apart, what the engine must know of such
a model, and how its failures are told. Must not know: caches.

The engine asks for logits of a few tokens only, and taps hidden states between the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext, KVSpec, ModelSpec, StateSpec
from tokenmill.core.errors import ModelError
from tokenmill.layers.build import Build


class Given(tuple):
    """A body's output as heads read it: hidden states, and nothing under any other name."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


class Stub(torch.nn.Module):
    """Replaces the body, so that the model's own code from hidden states to logits can run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    @property
    def decoder(self) -> Stub:
        """The stub itself: some heads call a part of the body."""
        return self

    def forward(self, *given: Any, **named: Any) -> Any:
        return Given((self.hidden,))


class Halves:
    """The layers (`body`), and the head."""

    words = None
    """Such a model runs on a single rank."""

    def __init__(self, body: Any, model: Any, stub: Stub) -> None:
        """model: with the stub in place of its body."""
        self.body, self.model, self.stub = body, model, stub

    def describe(
        self, b: Build, vocab: int, hidden: int, kv: tuple[KVSpec, ...], states: tuple[StateSpec, ...] = (),
        **extras: object,
    ) -> ModelSpec:  # fmt: skip
        """What the engine must know of the model. hidden: the width of the hidden states."""
        numbers = sum(p.numel() for part in (self.body, self.model) for p in part.parameters())
        said = {"weight_bytes": numbers * b.dtype.itemsize, "changed": [], "foreign": True, **extras}
        return ModelSpec(
            vocab_size=vocab, max_positions=b.max_positions, kv_specs=kv, states=states, hidden_size=hidden,
            flops_per_token=2.0 * numbers, extras=said,
        )  # fmt: skip

    def logits(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[n, hidden] -> [n, vocab]."""
        self.stub.hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
        return self.model(input_ids=ids, use_cache=False).logits[0]

    own_logits = logits


def divide(model: Any) -> tuple[Any, Any, Stub]:
    """Put a stub in the place of the body: -> the body, the model, the stub."""
    body, stub = model.base_model, Stub()
    _put(model, body, stub)
    return body, model, stub


@contextlib.contextmanager
def whole(halves: tuple[Any, Any, Stub]) -> Iterator[Any]:
    """The model with its body in its place, meanwhile."""
    body, model, stub = halves
    _put(model, stub, body)
    try:
        yield model
    finally:
        _put(model, body, stub)


def _put(model: Any, old: Any, new: Any) -> None:
    name = next((name for name, part in model.named_children() if part is old), None)
    if name is None:
        raise ModelError("its head cannot be told from its layers")
    setattr(model, name, new)


@contextlib.contextmanager
def failing_as(what: str, reason: bool = True) -> Iterator[None]:
    """Raise any error within this context as `what`. reason: append Transformers' own message."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:160].rstrip(".: ")
        raise ModelError(f"{what} ({why})" if reason else what) from error


def check_equal(what: str, found: Tensor, expected: Tensor, b: Build) -> None:
    """Refuse a way of computing a prompt that says something else than Transformers alone."""
    away = float((found - expected).norm() / expected.norm())
    if not away <= (1e-3 if b.dtype == torch.float32 else 6e-2):
        raise ModelError(f"its answers to {what} differ from its own by {away:.1g}")
