"""Names of the ways to choose tokens, as requests spell them. Owns: the usual order of steps, and reading another
order.

llama.cpp's `samplers` is a list of names or a string of letters. Steps that change logits (penalties, dry) come before
the steps from temperature on; these two keep their place here. Must not know: tensors, what the steps compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import ParameterError, shown


class SamplerFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Numbers that a request sets and its row gets unchanged; the defaults switch everything off."""

    repeat_last_n: int = -1
    top_n_sigma: float = -1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_a: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    smoothing_factor: float = 0.0
    smoothing_curve: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    no_repeat_ngram_size: int = 0


ASKED: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda p: p.temperature != 1.0 or p.dynatemp_range > 0.0,
    "smoothing": lambda p: p.smoothing_factor > 0.0,
    "top_n_sigma": lambda p: p.top_n_sigma > 0.0,
    "min_p": lambda p: p.min_p > 0.0,
    "top_k": lambda p: p.top_k > 0,
    "top_p": lambda p: p.top_p < 1.0,
    "typical_p": lambda p: p.typical_p < 1.0,
    "epsilon_cutoff": lambda p: p.epsilon_cutoff > 0.0,
    "eta_cutoff": lambda p: p.eta_cutoff > 0.0,
    "top_a": lambda p: p.top_a > 0.0,
    "xtc": lambda p: p.xtc_probability > 0.0,
}
"""The steps from temperature on in their usual order, each with a test: do these parameters (SamplingParams,
RowSampling) ask for it?"""
USUAL_ORDER = tuple(ASKED)
LAST = ("temperature", "smoothing")
"""The steps that `temperature_last` moves behind the others."""
EDITS = ("penalties", "dry")
MOST_SAMPLERS = 32
MOST_BREAKERS, MOST_BREAKER_CHARS = 32, 40
USUAL_BREAKERS = ("\n", ":", '"', "*")

SAMPLER_RANGES: dict[str, tuple[float, float, bool]] = {
    "top_n_sigma": (-1.0, 100.0, False),
    "epsilon_cutoff": (0.0, 10_000.0, False),
    "eta_cutoff": (0.0, 10_000.0, False),
    "top_a": (0.0, 1.0, False),
    "xtc_probability": (0.0, 1.0, False),
    "xtc_threshold": (0.0, 1.0, False),
    "dynatemp_range": (0.0, 100.0, False),
    "dynatemp_exponent": (0.0, 100.0, False),
    "smoothing_factor": (0.0, 100.0, False),
    "smoothing_curve": (1.0, 10.0, False),
    "mirostat_tau": (0.0, 100.0, False),
    "mirostat_eta": (0.0, 100.0, False),
    "dry_multiplier": (0.0, 100.0, False),
    "dry_base": (1.0, 100.0, False),
}
"""The least value, the largest value, and whether the least value itself is excluded."""
SAMPLER_COUNTS: dict[str, tuple[int, int]] = {
    "repeat_last_n": (-1, 2**31 - 1),
    "mirostat": (0, 2),
    "dry_allowed_length": (0, 1024),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "no_repeat_ngram_size": (0, 1024),
}
SAMPLER_FIELDS = SamplerFields.__struct_fields__
"""The names of these numbers."""
NOT_OF_BEAMS = {
    **dict.fromkeys(("top_n_sigma", "epsilon_cutoff", "eta_cutoff", "top_a", "xtc_probability"), 0),
    **dict.fromkeys(("dynatemp_range", "smoothing_factor", "mirostat"), 0),
}
"""Fields that beam search refuses, with the largest value that asks for nothing."""

_LETTERS = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typical_p", "p": "top_p"},
    **{"m": "min_p", "x": "xtc", "t": "temperature"},
}
_SPELLINGS = {
    **{name: name for name in (*EDITS, *USUAL_ORDER)},
    **{"top-k": "top_k", "top-p": "top_p", "nucleus": "top_p", "min-p": "min_p", "temp": "temperature"},
    **{"typ_p": "typical_p", "typ-p": "typical_p", "typ": "typical_p", "typical": "typical_p"},
    **{"typical-p": "typical_p", "top-n-sigma": "top_n_sigma"},
}


def read_samplers(given: str | Sequence[str]) -> list[str]:
    """The names in `samplers`, spelled as in USUAL_ORDER and EDITS; raises a ParameterError if one is unknown or
    misplaced."""
    letters = isinstance(given, str) and ";" not in given
    if isinstance(given, str) and not letters:  # as on llama.cpp's command line
        given = given.split(";")
    if not isinstance(given, (str, list, tuple)) or len(given) > MOST_SAMPLERS:
        raise _wrong(f"must be a list of at most {MOST_SAMPLERS} names, or a string of their letters")
    known = _LETTERS if letters else _SPELLINGS
    names: list[str] = []
    for each in given:
        name = known.get(each) if isinstance(each, str) else None
        if name is None:
            raise _wrong(f"holds {shown(each)}; known are {', '.join(known)}")
        if name in EDITS and (name in names or any(before not in EDITS for before in names)):
            raise _wrong(f"has {name} in a place where it cannot be: penalties and dry come first, each once")
        names.append(name)
    return names


def order_of(params: Any) -> list[str] | None:
    """The steps from temperature on that these parameters take; None: they are in the usual order. (llama.cpp's page
    writes its order into every request, and mostly it makes no difference.)"""
    samplers: str | Sequence[str] | None = params.samplers
    names = [n for n in read_samplers(samplers) if n not in EDITS] if samplers is not None else list(USUAL_ORDER)
    if params.temperature_last:
        names = [n for n in names if n not in LAST] + [n for n in names if n in LAST]
    names = [n for n in names if ASKED[n](params)]
    return None if names == [n for n in USUAL_ORDER if ASKED[n](params)] else names


def _wrong(what: str) -> ParameterError:
    return ParameterError(f"samplers {what}.", param="samplers")
