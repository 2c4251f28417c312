"""llama.cpp's requests. Owns: their fields and bounds, and what they mean in OpenAI's words.

Fields for sampling are those of a completion; llama.cpp's spellings of them are aliases (`request_rules.py`).
Must not know: engines, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError
from tokenmill.server.fields import MOST_IDS, MOST_MESSAGES, MOST_TEXTS, MOST_TOOLS, Label, few
from tokenmill.server.llamacpp.texts import Prompt
from tokenmill.server.openai.schemas import Message, TextPrompt, TokenId, TokenPrompt, Tool

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
MOST_PROMPTS = 1024
MOST_ADAPTERS = 1024
MOST_RESPONSE_FIELDS = 256


class Scaled(BaseModel):
    """An adapter by its place in /lora-adapters, with a scale."""

    model_config = LOOSE
    id: int = Field(ge=0)
    scale: float = 1.0


class Adapted(BaseModel):
    """A request that may choose an adapter."""

    model_config = OPEN
    lora: Annotated[list[Scaled], few(MOST_ADAPTERS)] | None = None
    response_fields: Annotated[list[Label], few(MOST_RESPONSE_FIELDS)] | None = None

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


class TextObject(BaseModel):
    """A prompt of text in an object, which at llama.cpp may also hold pictures."""

    model_config = LOOSE
    prompt_string: TextPrompt


Mixed = Annotated[list[TokenId | TextPrompt], few(MOST_IDS, 1)]


class CompletionRequest(Adapted):
    """POST /completion and /completions. A prompt is a text, ids, or both in turn."""

    prompt: (
        TextPrompt
        | TextObject
        | TokenPrompt
        | Annotated[list[TextPrompt | TextObject | TokenPrompt | Mixed], few(MOST_PROMPTS, 1)]
        | Mixed
    )
    stream: bool = False

    def prompts(self) -> tuple[list[Prompt], bool]:
        """Every prompt, and whether they came in a list."""
        given = self.prompt
        several = isinstance(given, list) and not any(isinstance(piece, int) for piece in given)
        each: list[Any] = given if several and isinstance(given, list) else [given]
        return [one.prompt_string if isinstance(one, TextObject) else one for one in each], several

    def fields(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """The request as fields of a completion. `prompts`: each as one text or as ids."""
        prompt = list(prompts) if self.prompts()[1] else prompts[0]
        return {**translated(self), "prompt": prompt, "stream": self.stream}


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
    """llama.cpp's values as those of a completion's fields: -1 as a random seed, no limit by default, and one token if
    none is to be shown."""
    found = {"max_tokens": None, **(asked.model_extra or {})}
    if asked.silent:
        found["max_tokens"] = 1
    if found.get("seed") == -1:
        found["seed"] = None
    if type(found.get("logprobs")) in (int, float) and found["logprobs"] == 0:
        found["logprobs"] = None
    return found
