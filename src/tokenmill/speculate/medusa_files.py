"""Medusa heads as they lie on hubs. Owns: the forms of their config and the names of their tensors.

FasterDecoding, TGI   [medusa_head.]N.M.linear.weight/.bias, [medusa_head.]N.<blocks>.weight over the vocabulary
vLLM                  [medusa_heads.]blocks.N.layers.M.weight/.bias, lm_heads.N.weight

Instead of a matrix over the vocabulary for each head there may be one for all (lm_head.weight, or the first head's), or
none: then it is the target's. How many heads and blocks there are, the tensors tell: the config of the first heads on
hubs names two of five.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from tokenmill.compute.forward import Weight
from tokenmill.core.errors import ModelError
from tokenmill.layers.build import Build
from tokenmill.models.config import ModelConfig
from tokenmill.speculate.medusa import MedusaHead

MOST_HEADS, MOST_BLOCKS = 16, 8


@dataclass(frozen=True, slots=True)
class MedusaNames:
    """How matrices are called: of a head's block; over the vocabulary, by head and its number of blocks."""

    block: Callable[[int, int], str]
    over: Callable[[int, int], str]


FORMS = (
    *(
        MedusaNames(lambda n, m, at=at: f"{at}blocks.{n}.layers.{m}", lambda n, m, at=at: f"{at}lm_heads.{n}")  # type: ignore[misc]
        for at in ("", "medusa_heads.")
    ),
    *(
        MedusaNames(lambda n, m, at=at: f"{at}{n}.{m}.linear", lambda n, m, at=at: f"{at}{n}.{m}")  # type: ignore[misc]
        for at in ("", "medusa_head.")
    ),
)


def build_heads(config: dict[str, Any], b: Build, sizes: tuple[int, int], where: str) -> list[MedusaHead]:
    """The heads of a folder, for a target with (hidden size, vocabulary)."""
    hidden, vocab = sizes
    said = ModelConfig(config)
    for name in ("original_lm_head", "medusa_fc_bias"):
        said.get(name, bool, default=False)
    heads = _number(said, ("num_heads", "medusa_num_heads"), MOST_HEADS)
    blocks = _number(said, ("num_hidden_layers", "medusa_num_layers"), MOST_BLOCKS)
    if (read := said.get("hidden_size", int, hidden)) != hidden:
        raise ModelError(f"{where}: heads for hidden states of {read} numbers; the model has {hidden}.")
    if (
        said.get("vocab_size", int, vocab) != vocab
        or (said.get("truncated_vocab_size", int, 0, low=0) or vocab) != vocab
    ):
        raise ModelError(f"{where}: heads for another vocabulary than the model's {vocab}.")
    form = next((form for form in FORMS if b.has(f"{form.block(0, 0)}.weight")), FORMS[0])
    if list(b.checkpoint.names()):  # weights that are invented have every name
        heads = _stored(lambda n: b.has(f"{form.block(n, 0)}.weight"), heads, MOST_HEADS, f"{where}: heads")
        blocks = _stored(
            lambda m: b.has(f"{form.block(0, m)}.weight"), blocks, MOST_BLOCKS, f"{where}: blocks of a head"
        )
    words = _words(config, b, [form.over(n, blocks or 1) for n in range(heads or 5)], (vocab, hidden))
    made = []
    for n, over in enumerate(words):
        inner = []
        for name in (form.block(n, m) for m in range(blocks or 1)):
            bias = config.get("medusa_fc_bias", False) or b.has(f"{name}.bias")
            inner.append(b.settled(b.weight(name, (hidden, hidden), bias=bias)))
        made.append(MedusaHead(inner, over))
    b.book.used.add(b.path("token_map"))  # vLLM's, for a part of the vocabulary: here it names all of it
    b.check_leftovers()
    return made


def _words(config: dict[str, Any], b: Build, own: list[str], shape: tuple[int, int]) -> list[Weight | None]:
    """Each head's matrix over the vocabulary (None: the target's). own: what they are called if each has its own."""
    stored, original = list(b.checkpoint.names()), config.get("original_lm_head", False)
    if not original and any(b.has(f"{name}.weight") for name in own):
        return [b.settled(b.weight(name, shape, head=True)) for name in own]
    one = next((name for name in ("lm_head", own[0]) if stored and b.has(f"{name}.weight")), None)
    return [None if one is None else b.settled(b.weight(one, shape, head=True))] * len(own)


def _stored(there: Callable[[int], bool], said: int | None, most: int, what: str) -> int:
    """How many of them the file has; said: in config.json."""
    found = sum(1 for _ in takewhile(there, count()))
    if not (said or 1) <= found <= most:
        raise ModelError(f"{what}: the file has {found}; there must be {said or 1} to {most}.")
    return found


def _number(said: ModelConfig, names: tuple[str, ...], most: int) -> int | None:
    name = next((name for name in names if said.has(name)), None)
    return None if name is None else said.need(name, int, high=most)
