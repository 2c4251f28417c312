"""Ollama's requests. Owns: their fields and bounds, and what they mean in OpenAI's words.

Must not know: engines, HTTP.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError
from tokenmill.server.fields import MOST_MESSAGES, MOST_PARTS, MOST_TEXTS, MOST_TOOLS, Inside, Label, few

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
Name = Annotated[str, Field(min_length=1, max_length=1024)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Think = bool | Literal["low", "medium", "high"] | None


NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "structured_outputs": "format",
    **{
        name: f"options.{name}"
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n", "mirostat", "mirostat_tau"),
            *("mirostat_eta", "presence_penalty", "frequency_penalty", "seed", "stop"),
        )
    },
}
"""Names of OpenAI's fields -> this API's names, for errors."""


class Options(BaseModel):
    """Sampling options. Options about loading a model are set where the server is started."""

    model_config = LOOSE
    num_predict: int | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=2**31 - 1)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=100)
    mirostat_eta: float | None = Field(None, ge=0, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    stop: Annotated[list[str], few(64)] | str | None = None
    num_ctx: int | None = Field(None, ge=1, le=2**31 - 1)

    def translated(self) -> dict[str, Any]:
        """The same as fields of OpenAI's requests, under vLLM's names where OpenAI has none."""
        most = self.num_predict
        if most is not None and (most == 0 or most < -2):
            raise ParameterError("num_predict must be positive, or -1 for no limit.", param="options.num_predict")
        return {
            "max_tokens": most if most is not None and most > 0 else None,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p or None,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repeat_penalty,
            "repeat_last_n": self.repeat_last_n,
            "mirostat": self.mirostat,
            "mirostat_tau": self.mirostat_tau,
            "mirostat_eta": self.mirostat_eta,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed == -1 else self.seed,  # ollama's clients write -1 for a random seed
            "stop": self.stop or None,
        }


class AskFields(BaseModel):
    """The fields that generate and chat share."""

    model_config = LOOSE
    model: Name
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | Label | None = None
    think: Think = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: bool | None = None

    def fields(self) -> dict[str, Any]:
        """The request as fields of OpenAI's requests."""
        found: dict[str, Any] = (self.options or Options.model_validate({})).translated()
        found["model"] = self.model.removesuffix(":latest")
        if self.truncate:
            found["truncate_prompt_tokens"] = -1
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            found["structured_outputs"] = {"json": self.format}
        if self.think is not None:
            effort = self.think if isinstance(self.think, str) else None
            found["chat_template_kwargs"] = {"enable_thinking": bool(self.think), "thinking": bool(self.think)}
            found["reasoning_effort"] = effort
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.logprobs:
            found |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return found


class GenerateRequest(AskFields):
    """POST /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = None

    def as_chat(self) -> dict[str, Any]:
        """The request as fields of a chat with one message."""
        if self.raw:
            for name in [name for name in ("system", "think") if getattr(self, name)]:
                raise ParameterError(f"{name} has no effect in raw mode: the prompt is taken as it is.", param=name)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.fields(), "messages": [*messages, {"role": "user", "content": self.prompt}]}


class Function(BaseModel):
    """A call that the assistant made."""

    model_config = LOOSE
    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(BaseModel):
    """One of a message's calls."""

    model_config = LOOSE
    id: Label | None = None
    function: Function


class Message(BaseModel):
    """One turn."""

    model_config = LOOSE
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[Call], few(MOST_PARTS)] | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None

    def translated(self, number: int) -> dict[str, Any]:
        """The message in OpenAI's form. `number` makes the ids of calls."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            found["reasoning"] = self.thinking
        if self.tool_name:
            found["name"] = self.tool_name
        if self.tool_call_id:
            found["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": c.id or f"call_{number}_{i}",
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": json.dumps(c.function.arguments)},
                }
                for i, c in enumerate(self.tool_calls)
            ]
        return found


def usual_order(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose parameters list `properties` before `required`, the order that models know best. Ollama's own client
    writes them the other way round."""
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(parameters, dict) or "required" not in parameters:
        return tool
    last = {name: value for name, value in parameters.items() if name != "required"}
    return {**tool, "function": {**function, "parameters": {**last, "required": parameters["required"]}}}


class ChatRequest(AskFields):
    """POST /api/chat."""

    messages: Annotated[list[Message], few(MOST_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[dict[str, Any]], few(MOST_TOOLS), Inside("ollama.Tool")] | None = None

    def as_chat(self) -> dict[str, Any]:
        """The request as fields of OpenAI's chat."""
        messages = [message.translated(number) for number, message in enumerate(self.messages)]
        tools = [usual_order(tool) for tool in self.tools or ()]
        return {**self.fields(), "messages": messages, "tools": tools or None}


class EmbedRequest(BaseModel):
    """POST /api/embed."""

    model_config = LOOSE
    model: Name
    input: str | Annotated[list[str], few(MOST_TEXTS)] | None = None
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1)
    options: Annotated[Options, Inside("ollama.EmbedOptions")] | None = None
    keep_alive: float | Label | None = None

    def cut(self) -> dict[str, Any]:
        """The fields that cut texts to the context, or to num_ctx: their beginnings stay."""
        if not self.truncate:
            return {}
        most = self.options.num_ctx if self.options is not None else None
        return {"truncate_prompt_tokens": most or -1, "truncation_side": "right"}


class EmbeddingsRequest(BaseModel):
    """POST /api/embeddings, the older form."""

    model_config = LOOSE
    model: Name
    prompt: str = ""
    keep_alive: float | Label | None = None


class Naming(BaseModel):
    """A request about a model by its name. `name` is the older word for `model`."""

    model_config = LOOSE
    model: Label | None = None
    name: Label | None = None

    def named(self) -> str:
        """The model's name. A request without one, or with two, is refused."""
        found = self.model or self.name
        if not found:
            raise ParameterError("model is missing.", param="model")
        if self.name not in (None, "", found):
            raise ParameterError("Give model or name, not both.", param="name")
        return found


class ShowRequest(Naming):
    """POST /api/show."""

    verbose: bool = False


class Streaming(Naming):
    """The fields of requests that take time."""

    stream: bool = True


class PullRequest(Streaming):
    """POST /api/pull."""


class StoredMessage(BaseModel):
    """A message with which conversations begin."""

    model_config = LOOSE
    role: Literal["system", "user", "assistant"]
    content: str


class CreateRequest(Streaming):
    """POST /api/create: a model in parts, or the text of a Modelfile."""

    modelfile: str | None = None
    from_: Annotated[str, Field(max_length=1024)] | None = Field(None, alias="from")
    files: dict[Label, Label] | None = None
    adapters: dict[Label, Label] | None = None
    template: str | None = None
    license: str | Annotated[list[str], few(16)] | None = None
    system: str | None = None
    parameters: dict[Label, Any] | None = None
    messages: Annotated[list[StoredMessage], few(MOST_MESSAGES)] | None = None


class DeleteRequest(Naming):
    """DELETE /api/delete."""


class CopyRequest(BaseModel):
    """POST /api/copy."""

    model_config = LOOSE
    source: Annotated[str, Field(min_length=1, max_length=1024)]
    destination: Annotated[str, Field(min_length=1, max_length=1024)]
