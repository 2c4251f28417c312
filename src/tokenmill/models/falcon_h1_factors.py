"""Factors of what Falcon-H1's blocks read. Owns: which of them a norm takes up, and what is left for others.

Must not know: how blocks are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.compute.forward import NormSpec
from tokenmill.layers.build import Build
from tokenmill.models.config import ModelConfig
from tokenmill.models.rules import LEAST_SCALE

LEAST_GATE = 1e-2
"""The smallest factor of gates that the norm before them takes up."""


@dataclass(frozen=True, slots=True)
class Entering:
    """Factors of what the two blocks side by side read: what the config says of attention and of the state space, what
    the norm before both takes up, and what is left of the parts of the state space's product."""

    attention: float
    space: float
    norm: float
    parts: tuple[float, float, float, float, float]

    @property
    def left(self) -> float:
        """What is left of attention's."""
        return self.attention / self.norm


def read_entering(c: ModelConfig) -> Entering:
    """The norm takes up that of the state space's gates, if it is not too small."""
    attention = c.get("attention_in_multiplier", float, 1.0, low=LEAST_SCALE)
    space = c.get("ssm_in_multiplier", float, 1.0, low=LEAST_SCALE)
    gates, *others = read_factors(c, "ssm_multipliers", 5)
    taken = gates if gates > LEAST_GATE else 1.0
    values, keys, queries, paces = (other / taken for other in others)
    return Entering(attention, space, space * taken, (gates / taken, values, keys, queries, paces))


def times(norm: NormSpec, factor: float) -> NormSpec:
    """The norm and a factor, in float32: narrower weights would round it."""
    return norm if factor == 1.0 else replace(norm, weight=norm.weight.float() * factor)


def tell_divisors(at: Build, entering: Entering) -> None:
    """What norms do not take up of the inputs' factors is multiplied behind products here, whose only biases are those
    of adapters."""
    if at.adapters is not None:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            at.adapters.divides(at.path(f"self_attn.{name}"), entering.left)
        at.adapters.divides(at.path("mamba.in_proj"), entering.space / entering.norm)


def read_factors(c: ModelConfig, name: str, count: int) -> list[float]:
    """A list of this many numbers; ones if it is absent."""
    multipliers = c.get(name, list, [1.0] * count)
    if len(multipliers) != count:
        raise c.refuse(name, f"must be {count} numbers.")
    return [ModelConfig({name: one}).need(name, float) for one in multipliers]
