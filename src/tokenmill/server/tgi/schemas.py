"""TGI's requests and vLLM's old ones. Owns: their fields and bounds, and what they mean in OpenAI's words.

Must not know: engines, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError
from tokenmill.server.fields import few

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
DEFAULT_TOKENS = 100


class Grammar(BaseModel):
    """The form that the text must have."""

    model_config = LOOSE
    type: Literal["json", "regex", "json_schema"]
    value: Any


NAMES = {
    "prompt": "inputs",
    "max_tokens": "parameters.max_new_tokens",
    "n": "parameters.best_of",
    "truncate_prompt_tokens": "parameters.truncate",
    "structured_outputs": "parameters.grammar",
    "logprobs": "parameters.top_n_tokens",
    "prompt_logprobs": "parameters.decoder_input_details",
    **{
        name: f"parameters.{name}"
        for name in (
            *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty"),
            *("seed", "stop"),
        )
    },
}
"""Names of completions' fields -> this API's names, for errors."""


class Parameters(BaseModel):
    """TGI's parameters. Text is chosen greedily unless a field asks for sampling."""

    model_config = LOOSE
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    decoder_input_details: bool = False
    details: bool = False
    do_sample: bool = False
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    grammar: Grammar | None = None
    max_new_tokens: Positive | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    return_full_text: bool | None = None
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], few(64)] = Field(default_factory=list)
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    top_k: Positive | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    truncate: Positive | None = None
    typical_p: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None

    def fields(self, prompt: str, *, stream: bool) -> dict[str, Any]:
        """The parameters as fields of a completion. Every token's probability is part of TGI's answers."""
        if stream and (self.best_of or 1) > 1:
            raise ParameterError("best_of is not available in streams.", param="best_of")
        if stream and self.decoder_input_details:
            raise ParameterError("decoder_input_details is not available in streams.", param="decoder_input_details")
        if self.top_n_tokens and not (stream or self.details or self.decoder_input_details):
            raise ParameterError("top_n_tokens has no effect without details = true.", param="top_n_tokens")
        warped = any(x is not None for x in (self.temperature, self.top_k, self.top_p, self.typical_p))
        sampled = self.do_sample or warped or (self.best_of or 1) > 1
        default = 1.0 if sampled else 0.0
        return {
            "prompt": prompt,
            "max_tokens": self.max_new_tokens or DEFAULT_TOKENS,
            "temperature": default if self.temperature is None else self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "stop": self.stop or None,
            "include_stop_str_in_output": True,
            "truncate_prompt_tokens": self.truncate,
            "structured_outputs": _structure(self.grammar),
            "n": self.best_of,
            "logprobs": self.top_n_tokens or 0,
            "prompt_logprobs": 0 if self.decoder_input_details else None,
        }


class TgiRequest(BaseModel):
    """POST /generate and /generate_stream."""

    model_config = LOOSE
    inputs: Annotated[str, Field(min_length=1)]
    parameters: Parameters = Field(default_factory=lambda: Parameters.model_validate({}))
    stream: bool = False


class VllmRequest(BaseModel):
    """vLLM's first API: a prompt with sampling fields beside it, and perhaps `stream`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    prompt: Annotated[str, Field(min_length=1)]
    stream: bool = False
    use_beam_search: bool = False


class AnyRequest(BaseModel):
    """POST /generate: TGI's body has `inputs`, vLLM's has `prompt`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    inputs: str | None = None
    prompt: str | None = None


def form_of(raw: Mapping[str, Any]) -> type[TgiRequest] | type[VllmRequest]:
    """The schema that fits a body of /generate."""
    return VllmRequest if raw.get("inputs") is None and raw.get("prompt") is not None else TgiRequest


def _structure(grammar: Grammar | None) -> dict[str, Any] | None:
    if grammar is None:
        return None
    if grammar.type == "regex":
        return {"regex": grammar.value}
    value = grammar.value
    if grammar.type == "json_schema" and isinstance(value, dict):
        value = value.get("schema", value)
    return {"json": value}
