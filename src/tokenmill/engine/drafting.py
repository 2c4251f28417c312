"""Which drafter a configuration asks for. Owns: reading --speculative-config, and where drafts are made."""

from __future__ import annotations

import msgspec

from tokenmill.core.config import EngineConfig, SpeculateOptions
from tokenmill.core.drafting import DeviceDrafter
from tokenmill.core.errors import ParameterError
from tokenmill.speculate.lookup import NgramLookup

MAX_DRAFTS = 16


class Ngram(msgspec.Struct, frozen=True):
    """Prompt lookup as --speculative-config asks for it."""

    most: int
    longest: int
    shortest: int


def read_ngram(options: SpeculateOptions) -> Ngram | None:
    """What --speculative-config says; None: no drafts."""
    spec = options.speculative_config
    if not spec:
        return None
    known = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
    if not isinstance(spec, dict) or set(spec) - known:
        extra = ", ".join(sorted(set(spec) - known)) if isinstance(spec, dict) else "not an object"
        raise ParameterError(
            f"speculative_config: unknown entries ({extra}); known are {', '.join(sorted(known))}.",
            param="speculative_config",
        )
    if spec.get("method") != "ngram":
        raise ParameterError(
            f"speculative_config: method {spec.get('method')!r} is not available; use 'ngram'.",
            param="speculative_config",
        )
    count = spec.get("num_speculative_tokens", 4)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_DRAFTS:
        raise ParameterError(
            f"num_speculative_tokens must be an integer in [1, {MAX_DRAFTS}].", param="speculative_config"
        )
    return Ngram(count, spec.get("prompt_lookup_max", 4), spec.get("prompt_lookup_min", 2))


def device_drafter(config: EngineConfig, device: str) -> DeviceDrafter | None:
    """Where a user asks for several plans in flight (`pipeline_depth`), drafts come from the device, as those of the
    host would have to wait for the commit. Else the host's index is quicker than a search by many small operations:
    on an H200 the demo model made 727 tokens/s with the search and 4,261 with the index. (What the host must have a
    say in, grammars for one, gets the host's drafts in both cases.)"""
    ngram = read_ngram(config.speculate)
    if ngram is None or (config.execute.pipeline_depth or 1) == 1 or device != "cpu":
        return None
    return NgramLookup(ngram.most, ngram.longest, ngram.shortest)
