"""OpenAI's requests as pydantic models. Owns: field types and bounds.

Values are strict (a boolean or a string is not a number, and NaN is refused); `inputs/` judges other names.
Must not know: engines, HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from tokenmill.core.request import MAX_LOGPROBS, MAX_N, MAX_STOP, MAX_STOP_CHARS
from tokenmill.core.samplers import MOST_BREAKER_CHARS, MOST_BREAKERS, MOST_SAMPLERS
from tokenmill.server.fields import (
    MOST_IDS,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TEXTS,
    MOST_TOOLS,
    Inside,
    Label,
    Metadata,
    check_text,
    check_tool,
    few,
)
from tokenmill.structured.limits import MAX_ENUM

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
Breaker = Annotated[str, StringConstraints(min_length=1, max_length=MOST_BREAKER_CHARS)]
SamplerName = Annotated[str, StringConstraints(max_length=MAX_STOP_CHARS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
MOST_ALLOWED = 1 << 18
MOST_BAD_WORDS = 512


class StreamOptions(BaseModel):
    """The options of a stream."""

    model_config = STRICT
    include_usage: bool | None = None
    continuous_usage_stats: bool = False

    @property
    def usage_at_end(self) -> bool:
        """Does the client want usage at the end? A client that wants usage in every chunk does."""
        return self.continuous_usage_stats if self.include_usage is None else self.include_usage


class JsonSchemaFormat(BaseModel):
    """The schema of response_format json_schema."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)
    name: str = Field(max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Text, any JSON object, JSON of a schema (which llama.cpp puts beside `type`), or structural tags. `json`, `regex`
    and `value` are TGI's: a schema, a pattern, or what belongs under json_schema."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)
    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    value: dict[str, Any] | str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    format: dict[str, Any] | None = None
    structures: Annotated[list[dict[str, Any]], few(MOST_TOOLS)] | None = None
    triggers: Annotated[list[str], few(MOST_TOOLS)] | None = None


class SamplingFields(BaseModel):
    """The fields that chat and completions share. Unset ones take the model's generation_config, then neutral
    values."""

    model_config = STRICT
    model: str | None = Field(None, max_length=1024)
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repeat_last_n: int | None = Field(None, ge=-1, le=2**31 - 1)
    top_n_sigma: float | None = Field(None, ge=-1, le=100)
    epsilon_cutoff: float | None = Field(None, ge=0, le=10_000)
    eta_cutoff: float | None = Field(None, ge=0, le=10_000)
    top_a: float | None = Field(None, ge=0, le=1)
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    dynatemp_range: float | None = Field(None, ge=0, le=100)
    dynatemp_exponent: float | None = Field(None, ge=0, le=100)
    smoothing_factor: float | None = Field(None, ge=0, le=100)
    smoothing_curve: float | None = Field(None, ge=1, le=10)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, ge=0, le=100)
    mirostat_eta: float | None = Field(None, ge=0, le=100)
    dry_multiplier: float | None = Field(None, ge=0, le=100)
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: int | None = Field(None, ge=0, le=1024)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=2**31 - 1)
    dry_sequence_breakers: Annotated[list[Breaker], few(MOST_BREAKERS)] | None = None
    no_repeat_ngram_size: int | None = Field(None, ge=0, le=1024)
    samplers: SamplerName | Annotated[list[SamplerName], few(MOST_SAMPLERS)] | None = None
    temperature_last: bool = False
    n: int | None = Field(None, ge=1, le=MAX_N)
    best_of: int | None = Field(None, ge=0, le=MAX_N)
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-100, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: StopString | Annotated[list[StopString], few(MAX_STOP)] | None = None
    stop_token_ids: Annotated[list[TokenId], few(256)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**31 - 1)
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = Field(None, ge=-1, le=MAX_LOGPROBS)
    allowed_token_ids: Annotated[list[TokenId], few(MOST_ALLOWED, 1)] | None = None
    bad_words: Annotated[list[StopString], few(MOST_BAD_WORDS)] | None = None
    logit_bias: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")], float] | None = Field(
        None, max_length=4096
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(None, ge=1, le=1 << 20)
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], few(MAX_ENUM)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    session_id: str | None = Field(None, max_length=256)
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    timeout: float | None = Field(None, gt=0, le=86_400, description="Seconds after which the request is ended.")
    user: Label | None = None


class TextPart(BaseModel):
    """A piece of a message's text."""

    model_config = STRICT
    type: Literal["text", "input_text", "output_text", "thinking", "refusal"]
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> TextPart:
        check_text(self.type, self)
        return self


class FunctionCall(BaseModel):
    """A call that the assistant made earlier."""

    model_config = STRICT
    name: str = Field(max_length=1024)
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    """One of an assistant message's tool calls."""

    model_config = STRICT
    id: Label | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = STRICT
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[str | TextPart], few(MOST_PARTS)] | None = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], few(MOST_PARTS)] | None = None
    tool_call_id: Label | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _own(self) -> Message:
        parts = self.content if isinstance(self.content, list) else ()
        thinks = any(not isinstance(part, str) and part.type == "thinking" for part in parts)
        name = next((name for name in _OF_THE_MODEL if getattr(self, name)), "thinking" if thinks else None)
        if name is not None and self.role in _NEVER_THE_MODEL:
            raise _misplaced(name, self.role, "the assistant")
        if self.tool_call_id and self.role in _NEVER_A_RESULT:
            raise _misplaced("tool_call_id", self.role, "a tool's result")
        return self


def _misplaced(name: str, role: str, whose: str) -> PydanticCustomError:
    text = "{name} has no effect in a message of the role {role}: only {whose} has it"
    return PydanticCustomError("role", text, {"name": name, "role": role, "whose": whose})


_OF_THE_MODEL = ("tool_calls", "reasoning", "reasoning_content")
_NEVER_THE_MODEL = ("system", "developer", "user", "tool", "function")
_NEVER_A_RESULT = ("system", "developer", "user", "assistant")
"""A model's own names for roles are in neither."""


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = STRICT
    name: str = Field(min_length=1, max_length=1024)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A tool that the model may use."""

    model_config = STRICT
    type: Literal["function"] = "function"
    function: FunctionDefinition

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: object) -> object:
        return check_tool(given, "function")


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], few(MOST_MESSAGES, 1)]
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=-1, le=MAX_LOGPROBS)
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    tools: Annotated[list[Tool], few(MOST_TOOLS)] | None = None
    tool_choice: Label | Annotated[dict[str, Any], Inside("openai.ToolChoice")] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    echo: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Annotated[list[dict[str, Any]], few(MOST_TEXTS)] | None = None
    chat_template: str | None = Field(None, max_length=1 << 20)
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    thinking_token_budget: int | None = Field(None, ge=-1, le=2**31 - 1)
    return_prompt_text: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None


TokenPrompt = Annotated[list[TokenId], few(MOST_IDS, 1)]
TextPrompt = Annotated[str, StringConstraints(min_length=1)]


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: TextPrompt | TokenPrompt | Annotated[list[TextPrompt | TokenPrompt], few(1024, 1)]
    logprobs: int | None = Field(None, ge=-1, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(16, ge=0, le=2**31 - 1)
    echo: bool | None = False
    add_special_tokens: bool = True
    suffix: str | None = None


class EmbeddingRequest(BaseModel):
    """POST /v1/embeddings."""

    model_config = STRICT
    model: str | None = Field(None, max_length=1024)
    input: TextPrompt | TokenPrompt | Annotated[list[TextPrompt | TokenPrompt], few(MOST_TEXTS, 1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=1 << 20)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=2**31 - 1)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool = True
    pooling: Literal["last", "mean"] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    timeout: float | None = Field(None, gt=0, le=86_400)
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    user: Label | None = None


class PoolingRequest(EmbeddingRequest):
    """POST /pooling: vLLM's form of embeddings."""

    task: Literal["embed"] | None = None


class AnyRequest(BaseModel):
    """POST /invocations: a chat, a completion or embeddings, depending on the body's fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    messages: Any = None
    prompt: Any = None
    input: Any = None


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt or messages. `content` and the fields after it are llama.cpp's form."""

    model_config = STRICT
    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    messages: Annotated[list[Message], few(MOST_MESSAGES, 1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], few(MOST_TOOLS)] | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = STRICT
    model: str | None = Field(None, max_length=1024)
    tokens: Annotated[list[TokenId], few(MOST_IDS)]
    skip_special_tokens: bool = False
