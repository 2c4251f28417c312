"""From request fields to SamplingParams. Owns: which value wins (the request's, then generation_config's, then the
neutral one), and limits by flag.

Must not know: HTTP, engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import ParameterError, TooLargeError
from tokenmill.core.request import SamplingParams
from tokenmill.core.samplers import SAMPLER_FIELDS
from tokenmill.engine.options.generation import DEFAULTS, default_params
from tokenmill.server.context import RequestLimits
from tokenmill.server.openai.schemas import SamplingFields
from tokenmill.server.openai.structure import structure

_AS_GIVEN = (
    "use_beam_search",
    "length_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "temperature_last",
)
MOST_TOGETHER = {"bad_words": 8192, "dry_sequence_breakers": 256}
"""Most characters of all entries of a field together. An engine tokenises them between two steps, while all answers
wait."""
_IF_GIVEN = (*SAMPLER_FIELDS, "dry_sequence_breakers", "samplers")


def sampling_params(
    body: SamplingFields,
    generation: Mapping[str, Any],
    limits: RequestLimits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    detokenize: bool = True,
) -> SamplingParams:
    """Checked parameters. A ParameterError names the wrong field. `echo`: the prompt's tokens are scored as well."""
    _check_limits(body, limits, logprobs)
    if body.stop and not detokenize:
        text = "stop has no effect without a tokenizer (--skip-tokenizer-init): use stop_token_ids."
        raise ParameterError(text, param="stop")
    neutral = SamplingParams() if body.use_beam_search else default_params(generation)
    values: dict[str, Any] = {name: getattr(body, name) for name in _AS_GIVEN}
    if body.stream:  # where only 0 is allowed, and nothing would show it
        values["prompt_logprobs"] = None
    if echo and logprobs is not None:
        values["prompt_logprobs"] = max(logprobs, body.prompt_logprobs or 0)
    for name in DEFAULTS:
        given = getattr(body, name)
        values[name] = getattr(neutral, name) if given is None else given
    values |= {name: getattr(body, name) for name in _IF_GIVEN if getattr(body, name) is not None}
    return SamplingParams(
        **values,
        n=body.n or 1,
        best_of=body.best_of or None,
        logit_bias=_bias(body.logit_bias),
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structure(body),
        thinking_token_budget=getattr(body, "thinking_token_budget", None),
        detokenize=detokenize,
    )


def all_of_them(body: Any, names: Sequence[str], vocab_size: int) -> None:
    """Turn -1 (the whole vocabulary) into the vocabulary's size, and lower larger numbers to it."""
    for name in names:
        wanted = getattr(body, name)
        if wanted is not None:
            setattr(body, name, vocab_size if wanted < 0 else min(wanted, vocab_size))


def truncate(
    ids: list[int], body: Any, max_model_len: int, max_tokens: int | None = None, *, text: bool = True
) -> list[int]:
    """Keep `truncate_prompt_tokens` tokens: the last ones, or with truncation_side = right the first ones. -1: as many
    as fit. text: beside an answer of max_tokens, or of one token; a vector needs no room."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == 0:
        raise ParameterError("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
    if keep == -1:
        keep = max(1, max_model_len - text * max(1, max_tokens or 1))
    return ids[:keep] if getattr(body, "truncation_side", None) == "right" else ids[-keep:]


def within(params: SamplingParams, room: int) -> SamplingParams:
    """Shorten a default length to the room in the context."""
    if params.max_tokens is None or not 0 < room < params.max_tokens:
        return params
    return msgspec.structs.replace(params, max_tokens=room)


def _check_limits(body: SamplingFields, limits: RequestLimits, logprobs: int | None) -> None:
    likely = "top_logprobs" if hasattr(body, "top_logprobs") else "logprobs"
    for name, given, most in (
        ("n", body.n, limits.n),
        ("best_of", body.best_of, limits.n),
        (likely, logprobs, limits.logprobs),
        ("prompt_logprobs", body.prompt_logprobs, limits.logprobs),
    ):
        if (given or 0) > most:
            raise ParameterError(f"{name} is more than this server allows ({most}).", param=name)
    if isinstance(body.stop, list) and len(body.stop) > limits.stop:
        raise ParameterError(f"stop holds more strings than this server allows ({limits.stop}).", param="stop")
    for name, most in MOST_TOGETHER.items():
        if sum(map(len, getattr(body, name) or ())) > most:
            raise TooLargeError(f"{name} holds more than {most} characters in all.", param=name)
    if body.stream and body.prompt_logprobs:  # (0 asks for nothing that a stream would show)
        raise ParameterError("prompt_logprobs is not available in streams.", param="prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options needs stream = true.", param="stream_options")


def _bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """Values are clamped to [-100, 100], as OpenAI's and vLLM's are."""
    if not given:
        return None
    found = {int(k): max(-100.0, min(100.0, v)) for k, v in given.items()}
    if len(found) < len(given):
        raise ParameterError("logit_bias names a token twice (in two spellings).", param="logit_bias")
    return found
