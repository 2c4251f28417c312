"""The steps from edited logits to the draw. Owns: STEPS, the table that a new sampler is one line of.

A step changes scaled logits s [m, V] of m lines in place. The largest of each line is 0 when a step begins, and the
step leaves it so. Its function takes a Part; `asked` tells whether a row's parameters want it; `numbers` are the fields
of RowSampling that it reads, which lie on the device by row. Steps are taken in the order of this table, or in a row's
own (RowSampling.order). Must not know: rows, plans, noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tokenmill.compute.forward import Kernels
from tokenmill.core.samplers import ASKED, USUAL_ORDER
from tokenmill.core.step import RowSampling
from tokenmill.sampling import cutoffs, filters, temperature, xtc

FIRST_BIT = 16


@dataclass(slots=True)
class Part:
    """Lines that take a step: s [m, V], their rows [m] and parameters, the noise keys [m] of their positions. columns:
    the numbers of all rows by name. kernels: given if a backend may have a faster way."""

    s: Tensor
    rows: Tensor
    params: list[RowSampling]
    keys: Tensor
    columns: Mapping[str, Tensor]
    kernels: Kernels | None = None

    def number(self, name: str) -> Tensor:
        """A parameter of each line [m]."""
        return self.columns[name][self.rows]


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the table. shapes: it changes probabilities without dropping tokens, so it also runs before
    mirostat."""

    name: str
    apply_: Callable[[Part], None]
    numbers: tuple[str, ...] = ()
    shapes: bool = False

    def asked(self, p: RowSampling) -> bool:
        """Does a row take this step? (A fixed temperature in its usual place is not a step: it is multiplied in
        before.)"""
        if self.name == "temperature" and p.order is None:
            return p.dynatemp_range > 0.0
        return ASKED[self.name](p)

    @property
    def bit(self) -> int:
        """The feature bit of a row that takes this step."""
        return 1 << (FIRST_BIT + USUAL_ORDER.index(self.name))


def _cut_(part: Part, k: Tensor | None, p: Tensor | None) -> bool:
    """Let the backend cut without sorting; False: it cannot."""
    least = None if part.kernels is None else part.kernels.least_kept(part.s, k, p)
    if least is not None:
        filters.keep_at_least_(part.s, least)
    return least is not None


def _top_k_(part: Part) -> None:
    k = part.number("top_k")
    if not _cut_(part, k, None):
        filters.top_k_(part.s, k, max(p.top_k for p in part.params))


def _top_p_(part: Part) -> None:
    p = part.number("top_p")
    if not _cut_(part, None, p):
        filters.top_p_(part.s, p)


def _by(change_: Callable[..., None], *names: str) -> Callable[[Part], None]:
    """A step that needs only s and these numbers."""
    return lambda part: change_(part.s, *map(part.number, names))


STEPS = (
    Step(
        "temperature",
        _by(temperature.temperature_, "temperature", "dynatemp_range", "dynatemp_exponent"),
        ("temperature", "dynatemp_range", "dynatemp_exponent"),
        shapes=True,
    ),
    Step(
        "smoothing",
        _by(temperature.smoothing_, "smoothing_factor", "smoothing_curve"),
        ("smoothing_factor", "smoothing_curve"),
        shapes=True,
    ),
    Step("top_n_sigma", _by(cutoffs.top_n_sigma_, "top_n_sigma"), ("top_n_sigma",)),
    Step("min_p", _by(filters.min_p_, "log_min_p")),
    Step("top_k", _top_k_),
    Step("top_p", _top_p_),
    Step("typical_p", _by(filters.typical_p_, "typical_p")),
    Step(
        "epsilon_cutoff",
        _by(cutoffs.epsilon_cutoff_, "epsilon_cutoff"),
        ("epsilon_cutoff",),
    ),
    Step("eta_cutoff", _by(cutoffs.eta_cutoff_, "eta_cutoff"), ("eta_cutoff",)),
    Step("top_a", _by(cutoffs.top_a_, "top_a"), ("top_a",)),
    Step(
        "xtc",
        lambda part: xtc.xtc_(part.s, part.number("xtc_probability"), part.number("xtc_threshold"), part.keys),
        ("xtc_probability", "xtc_threshold"),
    ),
)
BY_NAME = {step.name: step for step in STEPS}
CUTS = sum(BY_NAME[name].bit for name in ("min_p", "top_k", "top_p"))
"""The bits of the steps that a backend's own draw can do."""
FILTERS = sum(step.bit for step in STEPS)
NUMBERS = tuple(dict.fromkeys(name for step in STEPS for name in step.numbers))
"""The columns that the table of rows keeps for these steps."""


def wanted_steps(p: RowSampling) -> list[Step]:
    """The steps that a sampled row takes, in its order."""
    steps = STEPS if p.order is None else [BY_NAME[name] for name in p.order]
    return [step for step in steps if step.asked(p) and (step.shapes or not p.mirostat)]
