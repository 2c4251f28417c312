"""Medusa heads as they lie on hubs. Owns: the forms of their config and the names of their tensors.

FasterDecoding   [medusa_head.]N.M.linear.weight/.bias, [medusa_head.]N.<blocks>.weight over the vocabulary
vLLM, TGI        blocks.N.layers.M.weight/.bias, lm_heads.N.weight (or lm_head.weight for all, or the target's)
"""

from __future__ import annotations

from typing import Any

from tokenmill.core.errors import ModelError
from tokenmill.layers.build import Build
from tokenmill.speculate.medusa import Head

MOST_HEADS, MOST_BLOCKS = 16, 8


def build_heads(config: dict[str, Any], b: Build, sizes: tuple[int, int], where: str) -> list[Head]:
    """The heads of a folder, for a target with (hidden size, vocabulary)."""
    hidden, vocab = sizes
    heads = _number(config, ("num_heads", "medusa_num_heads"), 5, MOST_HEADS, where)
    blocks = _number(config, ("num_hidden_layers", "medusa_num_layers"), 1, MOST_BLOCKS, where)
    if config.get("hidden_size", hidden) != hidden:
        raise ModelError(
            f"{where}: heads for hidden states of {config['hidden_size']} numbers; the model has {hidden}."
        )
    if config.get("vocab_size", vocab) != vocab or (config.get("truncated_vocab_size") or vocab) != vocab:
        raise ModelError(f"{where}: heads for another vocabulary than the model's {vocab}.")
    known = [name for name in ("blocks.0.layers.0", "medusa_head.0.0.linear", "0.0.linear") if b.has(f"{name}.weight")]
    if not known:
        known = ["blocks.0.layers.0"]  # weights that are invented have every name
    form = known[0].removesuffix(".0.layers.0").removesuffix("0.0.linear")
    made = []
    for n in range(heads):
        names = [f"blocks.{n}.layers.{m}" if form == "blocks" else f"{form}{n}.{m}.linear" for m in range(blocks)]
        inner = [
            b.settled(
                b.weight(name, (hidden, hidden), bias=b.has(f"{name}.bias") or config.get("medusa_fc_bias", False))
            )
            for name in names
        ]
        over = f"lm_heads.{n}" if form == "blocks" else f"{form}{n}.{blocks}"
        own = not config.get("original_lm_head", False) and b.has(f"{over}.weight")
        made.append(Head(inner, b.settled(b.weight(over, (vocab, hidden), head=True)) if own else None))
    b.check_leftovers()
    return made


def _number(config: dict[str, Any], names: tuple[str, ...], default: int, most: int, where: str) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ModelError(f"{where}: config.json: '{names[0]}' must be a whole number from 1 to {most}, not {value!r}.")
    return value
