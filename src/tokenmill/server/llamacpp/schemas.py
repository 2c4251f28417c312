"""llama.cpp's requests. Owns: their fields and bounds, and what they mean in OpenAI's words.

Fields for sampling are those of a completion; llama.cpp's spellings of them are aliases (`request_rules.py`).
Must not know: engines, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError
from tokenmill.server.fields import MOST_MESSAGES, MOST_TEXTS, MOST_TOOLS, few
from tokenmill.server.openai.schemas import Message, TextPrompt, TokenPrompt, Tool

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
MOST_PROMPTS = 1024
MOST_ADAPTERS = 1024
FORBIDDEN = -100.0
"""The bias that `false` means: the token never occurs."""


class Scaled(BaseModel):
    """An adapter by its place in /lora-adapters, with a scale."""

    model_config = LOOSE
    id: int = Field(ge=0)
    scale: float = 1.0


class Adapted(BaseModel):
    """A request that may choose an adapter."""

    model_config = OPEN
    lora: Annotated[list[Scaled], few(MOST_ADAPTERS)] | None = None

    @property
    def silent(self) -> bool:
        """Is the prompt only to be read (n_predict = 0)?"""
        most = (self.model_extra or {}).get("max_tokens")
        return most == 0 and not isinstance(most, bool)

    def adapter(self, names: Sequence[str]) -> str | None:
        """The adapter that it chooses among the served ones. "": none of them. None: it does not choose."""
        if self.lora is None:
            return None
        used = {each.id: each.scale for each in self.lora if each.scale}
        if any(number >= len(names) for number in used):
            raise ParameterError("There is no adapter of this id: GET /lora-adapters lists them.", param="lora")
        if len(used) > 1 or any(scale != 1.0 for scale in used.values()):
            raise ParameterError(
                "Only one adapter can be used at a time, at scale 1 (give the others scale 0).", param="lora"
            )
        return next((names[number] for number in used), "")


class CompletionRequest(Adapted):
    """POST /completion and /completions."""

    prompt: TextPrompt | TokenPrompt | Annotated[list[TextPrompt | TokenPrompt], few(MOST_PROMPTS, 1)]
    stream: bool = False

    def fields(self) -> dict[str, Any]:
        """The request as fields of a completion."""
        return {**translated(self), "prompt": self.prompt, "stream": self.stream}


class Snippet(BaseModel):
    """A piece of another file."""

    model_config = LOOSE
    text: str
    filename: str = Field("", max_length=4096)


class InfillRequest(Adapted):
    """POST /infill: the texts before and after the gap, and the beginning of the text in it."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[Snippet], few(MOST_TEXTS)] = Field(default_factory=list)
    prompt: str = ""
    stream: bool = False

    def fields(self) -> dict[str, Any]:
        """The request as fields of a completion, without its prompt."""
        return {**translated(self), "prompt": "-", "stream": self.stream}


class TemplateRequest(BaseModel):
    """POST /apply-template."""

    model_config = LOOSE
    messages: Annotated[list[Message], few(MOST_MESSAGES, 1)]
    tools: Annotated[list[Tool], few(MOST_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingRequest(BaseModel):
    """POST /embedding and /embeddings."""

    model_config = LOOSE
    content: TextPrompt | TokenPrompt | Annotated[list[TextPrompt | TokenPrompt], few(MOST_TEXTS, 1)]


def translated(asked: Adapted) -> dict[str, Any]:
    """llama.cpp's values as those of a completion's fields: -1 as a random seed, biases as pairs, no limit by default,
    and one token if none is to be shown."""
    found = {"max_tokens": None, **(asked.model_extra or {})}
    if asked.silent:
        found["max_tokens"] = 1
    if found.get("seed") == -1:
        found["seed"] = None
    if type(found.get("logprobs")) in (int, float) and found["logprobs"] == 0:
        found["logprobs"] = None
    if isinstance(found.get("logit_bias"), list):
        found["logit_bias"] = dict(map(_bias, found["logit_bias"]))
    return found


def _bias(pair: Any) -> tuple[str, float]:
    """[token id, bias] as an entry of a completion's logit_bias."""
    if isinstance(pair, list) and len(pair) == 2:
        token, bias = pair
        number = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        if number and bias is False:
            return str(token), FORBIDDEN
        if number and isinstance(bias, (int, float)) and not isinstance(bias, bool):
            return str(token), float(bias)
    raise ParameterError("logit_bias must hold pairs of a token id and a number, or false.", param="logit_bias")
