"""Fields that have an effect only beside another one: the one list of them. Owns: which they are, and which of them are
harmless alone. The others are refused by name without the other field.

Keys are names of objects, as in `refused.py`. Must not know: schemas, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.core.object_rules import Companion

_DIRECTION = {"truncation_direction": Companion("truncate", neutral=("right", "Right"), harmless=True)}
_SIDE = {"truncation_side": Companion("truncate_prompt_tokens", neutral=("left",), harmless=True)}


def _of(sampler: str, *fields: str) -> dict[str, Companion]:
    """How a sampler does something. Interfaces with sliders send all of these fields, whichever samplers are on."""
    return dict.fromkeys(fields, Companion(sampler, (None, 0), harmless=True))


_OF_MIROSTAT = _of("mirostat", "mirostat_tau", "mirostat_eta")
_TEXT = {
    **_SIDE,
    **_OF_MIROSTAT,
    **_of("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    **_of("dynatemp_range", "dynatemp_exponent"),
    **_of("smoothing_factor", "smoothing_curve"),
    **_of("xtc_probability", "xtc_threshold"),
    "stream_interval": Companion("stream", neutral=(1,), harmless=True),
    "return_tokens_as_token_ids": Companion("logprobs", harmless=True),
}
_KINDS = ("text", "json_object", "json_schema", "structural_tag")
_TAGS = Companion("type", (*_KINDS[:3], "json", "regex"))

_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "compaction", None)


def _not_in(*kinds: str | None) -> Companion:
    """A field of the Responses API's items that only these kinds of items have."""
    return Companion("type", tuple(kind for kind in _ITEMS if kind not in kinds))


COMPANIONS: dict[str, Mapping[str, Companion]] = {
    "openai.ChatRequest": _TEXT,
    "openai.CompletionRequest": _TEXT,
    "openai.StreamOptions": {"continuous_usage_stats": Companion("include_usage", (False,), harmless=True)},
    "ollama.Options": _OF_MIROSTAT,
    "openai.EmbeddingRequest": _SIDE,
    "openai.PoolingRequest": _SIDE,
    "openai.ResponseFormat": {
        "json_schema": Companion("type", ("text", "json_object", "structural_tag", "json", "regex")),
        "schema": Companion("type", ("text", "structural_tag", "regex")),
        "value": Companion("type", ("text", "structural_tag")),
        **dict.fromkeys(("format", "structures", "triggers"), _TAGS),
    },
    "openai.TextPart": {"text": Companion("type", ("thinking", "refusal"))},
    "responses.Format": {"schema": Companion("type", _KINDS[:2])},
    "responses.Item": {
        **dict.fromkeys(("name", "arguments"), _not_in("function_call")),
        "call_id": _not_in("function_call", "function_call_output"),
        "output": _not_in("function_call_output"),
        "role": _not_in("message", None),
        "content": _not_in("message", "reasoning", None),
        "encrypted_content": _not_in("compaction", "reasoning"),
    },
    "anthropic.ToolChoice": {"name": Companion("type", ("auto", "any", "none"))},
    "anthropic.Block": {
        "text": Companion("type", ("thinking", "redacted_thinking", "tool_use", "tool_result")),
        "thinking": Companion("type", ("text", "tool_use", "tool_result")),
        "input": Companion("type", ("text", "thinking", "tool_result")),
        **dict.fromkeys(("content", "tool_use_id"), Companion("type", ("text", "thinking", "tool_use"))),
    },
    "scoring.EmbedRequest": _DIRECTION,
    "scoring.TeiRerankRequest": _DIRECTION,
    "scoring.RerankRequest": _SIDE,
    "scoring.ScoreRequest": _SIDE,
}
