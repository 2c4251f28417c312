"""Ollama's requests. Owns: their fields and bounds, and what they mean in OpenAI's words.

Unknown options are ignored, as Ollama does; those that ask for something that is missing here are refused by name.
Must not know: engines, HTTP.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
Name = Annotated[str, Field(min_length=1, max_length=1024)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Think = bool | Literal["low", "medium", "high"] | None


class Options(BaseModel):
    """Sampling; what concerns loading a model is ignored, because it is loaded."""

    model_config = LOOSE
    num_predict: int | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    mirostat: int | None = None

    def translated(self) -> dict[str, Any]:
        """The same as fields of OpenAI's requests (vLLM's names where OpenAI has none)."""
        if self.mirostat:
            raise ParameterError("mirostat sampling is not supported in this version.", param="options.mirostat")
        most = self.num_predict
        if most == 0:
            raise ParameterError("num_predict must be positive, or -1 for no limit.", param="options.num_predict")
        return {
            "max_tokens": most if most is not None and most > 0 else None,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p or None,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "stop": self.stop or None,
        }


class Asked(BaseModel):
    """What generate and chat share."""

    model_config = LOOSE
    model: Name
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: Think = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def fields(self) -> dict[str, Any]:
        """As fields of OpenAI's requests."""
        found: dict[str, Any] = (self.options or Options.model_validate({})).translated()
        found["model"] = self.model.removesuffix(":latest")
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            found["structured_outputs"] = {"json": self.format}
        if self.think is not None:
            effort = self.think if isinstance(self.think, str) else None
            found["chat_template_kwargs"] = {"enable_thinking": bool(self.think), "thinking": bool(self.think)}
            found["reasoning_effort"] = effort
        if self.logprobs:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return found


class GenerateRequest(Asked):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    images: list[Any] | None = None
    raw: bool = False
    context: list[int] | None = None

    def check(self) -> None:
        """Refuse what cannot be honoured."""
        refused = {
            "suffix": "fills in the middle, which this model's format does not have",
            "template": "is not accepted from requests",
            "images": "need a model that sees",
            "context": "is not kept: send the conversation to /api/chat",
        }
        for name, reason in refused.items():
            if getattr(self, name):
                raise ParameterError(f"{name} {reason}.", param=name)


class Function(BaseModel):
    """A call that the assistant made."""

    model_config = LOOSE
    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(BaseModel):
    """One of a message's calls."""

    model_config = LOOSE
    function: Function


class Message(BaseModel):
    """One turn."""

    model_config = LOOSE
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def translated(self, number: int) -> dict[str, Any]:
        """As OpenAI's message; `number` makes ids of calls."""
        if self.images:
            raise ParameterError("images need a model that sees.", param=f"messages.{number}.images")
        found: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.thinking:
            found["reasoning"] = self.thinking
        if self.tool_name:
            found["name"] = self.tool_name
        if self.tool_call_id:
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": f"call_{number}_{i}",
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": json.dumps(c.function.arguments)},
                }
                for i, c in enumerate(self.tool_calls)
            ]
        return found


def usual_order(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose parameters' properties come before the names of the required ones, as models have mostly seen
    them; Ollama's own client writes them the other way round."""
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(parameters, dict) or "required" not in parameters:
        return tool
    last = {name: value for name, value in parameters.items() if name != "required"}
    return {**tool, "function": {**function, "parameters": {**last, "required": parameters["required"]}}}


class ChatRequest(Asked):
    """POST /api/chat."""

    messages: Annotated[list[Message], Field(max_length=65_536)] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


class EmbedRequest(BaseModel):
    """POST /api/embed."""

    model_config = LOOSE
    model: Name
    input: str | Annotated[list[str], Field(max_length=2048)]
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1)
    options: Options | None = None
    keep_alive: float | str | None = None


class EmbeddingsRequest(BaseModel):
    """POST /api/embeddings, the older form."""

    model_config = LOOSE
    model: Name
    prompt: str = ""


class ShowRequest(BaseModel):
    """POST /api/show."""

    model_config = LOOSE
    model: str | None = None
    name: str | None = None
    verbose: bool = False
