"""Fields that clients send and this version cannot honour. Owns: their names and the values that ask for nothing.

A value that asks for something is refused with a sentence; silence would be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import ParameterError

_NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
_ALSO: dict[str, tuple[Any, ...]] = {
    "thinking_token_budget": (-1,),
    "modalities": (["text"],),
    "function_call": ("none",),
    "stream_reasoning": (True,),
    "service_tier": ("auto", "default"),
}
SHARED = frozenset(
    {
        "logprob_token_ids",
        "repetition_detection",
        "watermarking",
        "return_token_offsets",
        "return_mm_kwargs",
        "routed_experts_prompt_start",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "stop_regex",
        "no_stop_trim",
        "lora_path",
        "session_params",
        "custom_logit_processor",
        "custom_params",
        "input_ids",
        "rid",
        "extra_key",
        "return_hidden_states",
        "return_routed_experts",
        "return_cached_tokens_details",
        "return_meta_info",
        "data_parallel_rank",
    }
)
CHAT = SHARED | {
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_assistant_tokens_mask",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "prediction",
    "web_search_options",
    "stream_reasoning",
    "service_tier",
}
COMPLETION = SHARED | {"suffix", "prompt_embeds", "thinking_token_budget"}
EMBEDDING = frozenset({"embed_dtype", "messages", "lora_path", "data_parallel_rank"})


def refuse_unbuilt(body: Mapping[str, Any], names: frozenset[str]) -> None:
    """ParameterError for the first field that asks for something this version cannot do."""
    for name in body.keys() & names:
        value = body[name]
        if not any(value is v or (value == v and type(value) is type(v)) for v in (*_NOTHING, *_ALSO.get(name, ()))):
            raise ParameterError(f"{name} is not supported in this version; leave it out.", param=name)
