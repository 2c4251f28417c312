"""Names that are accepted and rightly have no effect: the one list of them, each with its reason.

Keys are names of objects, as in `refused.py`. Must not know: schemas, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.text.messages.names import CALL, MESSAGE, PART

Reasons = Mapping[str, str]


def _say(why: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, why)


ANYWHERE: Reasons = {
    **_say("a label for accounting", "user", "metadata", "safety_identifier"),
    **_say(
        "only about speed: the prefix cache finds equal beginnings by itself",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "cache_prompt",
        "cache_control",
        "id_slot",
        "n_cache_reuse",
    ),
    **_say("only about speed: it has an effect in Ollama's API", "keep_alive"),
}
"""Names in every request."""

_COMPANIONS: Reasons = {
    **_say("used only with adaptive_target, which is refused", "adaptive_decay"),
    **_say("used only with guidance_scale, which is refused", "negative_prompt"),
}
_OF_SAMPLERS: Reasons = {
    **_say("used only with xtc_probability, which is refused", "xtc_threshold"),
    **_say(
        "used only with dry_multiplier, which is refused",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
    ),
    **_say("used only with dynatemp_range, which is refused", "dynatemp_exponent"),
    **_say("used only with smoothing_factor, which is refused", "smoothing_curve"),
}
"""Names in requests where samplers are not read."""
_OF_MIROSTAT: Reasons = _say("used only with mirostat, which is refused", "mirostat_tau", "mirostat_eta")
GENERATING: Reasons = {
    **ANYWHERE,
    **_COMPANIONS,
    **_say("nothing is shifted out of a full context", "n_keep", "n_discard"),
    **_say(
        "speculation changes no token",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
        "draft_num_predict",
    ),
    **_say("all backends enforce the same", "guided_decoding_backend"),
}
"""Names in every request that makes text."""

_COUNT = "the count does not depend on it"
_NO_SAMPLERS: Reasons = {**GENERATING, **_OF_SAMPLERS, **_OF_MIROSTAT}

_ENFORCED = "a schema is enforced in any case"
_KIND = "there is one kind, and others are refused"
_ECHO = "part of an earlier answer, without use in a prompt"

_OLLAMA_LOADING: Reasons = _say(
    "about loading the model, which is already loaded",
    "num_batch",
    "num_gpu",
    "num_gqa",
    "main_gpu",
    "low_vram",
    "f16_kv",
    "use_mmap",
    "use_mlock",
    "num_thread",
    "numa",
)

_PADDING: Reasons = _say("streams are not padded; true is OpenAI's default", "include_obfuscation")
_SHIFT: Reasons = _say("an answer ends where the context ends; true is the default of Ollama's clients", "shift")


def _without_keeping(reasons: Reasons) -> Reasons:
    """Without those names of Ollama's requests that say how long a model stays loaded."""
    return {name: reason for name, reason in reasons.items() if name != "keep_alive"}


HARMLESS: dict[str, Reasons] = {
    "openai.ChatRequest": {name: why for name, why in GENERATING.items() if name != "metadata"},
    "openai.CompletionRequest": GENERATING,
    "openai.EmbeddingRequest": ANYWHERE,
    "openai.PoolingRequest": ANYWHERE,
    "openai.TokenizeRequest": ANYWHERE,
    "openai.DetokenizeRequest": ANYWHERE,
    "openai.StreamOptions": _PADDING,
    "responses.StreamOptions": _PADDING,
    "openai.JsonSchemaFormat": {
        **_say("a name for people", "name", "description"),
        **_say(_ENFORCED, "strict"),
    },
    "openai.Message": MESSAGE.harmless,
    "openai.TextPart": PART.harmless,
    "openai.ToolCall": CALL.harmless,
    "openai.Tool": _say("only about speed: the prefix cache finds equal beginnings by itself", "cache_control"),
    "responses.ResponsesRequest": {**_NO_SAMPLERS, **_say("its fields are judged one by one", "stream_options")},
    "responses.TalkRequest": {
        **ANYWHERE,
        **_say(_COUNT, "text", "tool_choice", "parallel_tool_calls", "truncation", "max_output_tokens", "temperature"),
        **_say(_COUNT, "top_p", "store", "stream", "include", "background"),
    },
    "responses.CompactRequest": ANYWHERE,
    "responses.Item": _say(_ECHO, "id", "status", "summary", "phase", "created_by", "caller", "namespace", "async"),
    "responses.Part": _say(_ECHO, "annotations", "logprobs"),
    "responses.Format": {**_say("a name for people", "name", "description"), **_say(_ENFORCED, "strict")},
    "anthropic.MessagesRequest": {**_NO_SAMPLERS, **_say(_KIND, "anthropic_version", "anthropic_beta", "betas")},
    "anthropic.CountRequest": {
        **_NO_SAMPLERS,
        **_say(_KIND, "anthropic_version", "anthropic_beta", "betas"),
        **_say(_COUNT, "tool_choice", "output_config", "max_tokens", "stream"),
    },
    "anthropic.Turn": _say(_ECHO, "id", "type", "model", "stop_reason", "stop_sequence", "usage"),
    "anthropic.Block": {
        **_say("only about speed: the prefix cache finds equal beginnings by itself", "cache_control"),
        **_say("signatures are not verified", "signature"),
        **_say("hidden reasoning stays hidden", "data"),
        **_say("the result's text says what went wrong", "is_error"),
        **_say(_ECHO, "caller", "toolset_name"),
    },
    "anthropic.ResultPart": _say(
        "only about speed: the prefix cache finds equal beginnings by itself", "cache_control"
    ),
    "anthropic.Tool": {
        **_say("only about speed: the prefix cache finds equal beginnings by itself", "cache_control"),
        **_say("arguments are always sent as they come", "eager_input_streaming"),
        **_say(_KIND, "type"),
    },
    "ollama.GenerateRequest": _without_keeping({**_NO_SAMPLERS, **_SHIFT}),
    "ollama.ChatRequest": _without_keeping({**_NO_SAMPLERS, **_SHIFT}),
    "ollama.EmbedRequest": _without_keeping(ANYWHERE),
    "ollama.EmbeddingsRequest": _without_keeping(ANYWHERE),
    "ollama.ShowRequest": {**ANYWHERE, **_say("everything known is always shown", "verbose")},
    "ollama.PullRequest": _say("hub names come over TLS", "insecure"),
    "ollama.Options": {
        **_COMPANIONS,
        **_OF_SAMPLERS,
        **_say("speculation changes no token", "draft_num_predict"),
        **_say("nothing is shifted out of a full context", "num_keep"),
        **_OLLAMA_LOADING,
    },
    "ollama.EmbedOptions": {
        **_OLLAMA_LOADING,
        **_say(
            "vectors are not sampled",
            "num_predict",
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "typical_p",
            "repeat_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "stop",
            "repeat_last_n",
            "mirostat",
            "mirostat_tau",
            "mirostat_eta",
        ),
    },
    "ollama.Call": _say(_ECHO, "type"),
    "ollama.Function": _say(_ECHO, "index", "description"),
    "tgi.TgiRequest": {
        **ANYWHERE,
        **_say("the model stays loaded, and answers are never cached", "options"),
        **_say("one model is served", "model"),
    },
    "tgi.Parameters": _NO_SAMPLERS,
    "tgi.VllmRequest": GENERATING,
    "scoring.RerankRequest": ANYWHERE,
    "scoring.ScoreRequest": ANYWHERE,
    "scoring.ClassifyRequest": ANYWHERE,
    "scoring.EmbedRequest": ANYWHERE,
    "scoring.SimilarityRequest": ANYWHERE,
    "scoring.TeiRerankRequest": ANYWHERE,
    "lora.LoadAdapterRequest": _say("only adapters of language models are read", "is_3d_lora_weight"),
    "lora.UnloadAdapterRequest": _say("the name decides", "lora_int_id"),
    "kserve.InferRequest": ANYWHERE,
    "kserve.Tensor": _say("the values are counted", "shape"),
    "kserve.Output": {},
    "kserve.GenerateRequest": ANYWHERE,
    "kserve.Parameters": GENERATING,
    "llamacpp.CompletionRequest": GENERATING,
    "llamacpp.InfillRequest": GENERATING,
    "llamacpp.TemplateRequest": ANYWHERE,
    "llamacpp.EmbeddingRequest": ANYWHERE,
}
