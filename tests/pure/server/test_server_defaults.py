"""What clients spell out though it is the default of their API asks for nothing: it is taken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.server.inputs.schema_names import spellings
from tokenmill.server.request_rules import ENDPOINTS
from tokenmill.testing.hostile import VALID, path_of

SAMPLING: dict[str, Any] = {
    **{"temperature": 1.0, "top_p": 1.0, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "seed": None},
    **{"stop": None, "logit_bias": None, "user": None, "stream": False, "stream_options": None, "logprobs": None},
}
MORE: dict[str, Any] = {  # of engines that serve the same API
    **{"top_k": -1, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
    **{"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "detokenize": True, "priority": 0},
    **{"stop_token_ids": [], "bad_words": [], "allowed_token_ids": None, "prompt_logprobs": None, "best_of": None},
    **{"logits_processors": None, "truncate_prompt_tokens": None, "return_tokens_as_token_ids": False},
    **{"return_token_ids": False, "cache_salt": None, "kv_transfer_params": None, "vllm_xargs": None, "regex": None},
    **{"ebnf": None, "no_stop_trim": False, "session_params": None, "lora_path": None, "return_hidden_states": False},
    **{"custom_logit_processor": None, "stop_regex": None, "rid": None, "data_parallel_rank": None},
    # llama.cpp's own page writes all of these into every request
    **{"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "repeat_last_n": 64, "repeat_penalty": 1.0},
    **{"dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1},
    **{"dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "top_n_sigma": -1.0},
    **{"dry_sequence_breakers": ["\n", ":", '"', "*"], "n_probs": 0, "min_keep": 0, "n_keep": 0, "n_discard": 0},
    **{"cache_prompt": True, "id_slot": -1, "timings_per_token": False, "post_sampling_probs": False, "lora": []},
    **{"samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]},
    **{"return_tokens": False, "return_progress": False, "grammar_lazy": False, "t_max_predict_ms": -1},
}
CHAT: dict[str, Any] = {
    **SAMPLING,
    **MORE,
    **{"audio": None, "function_call": None, "functions": None, "logprobs": False, "top_logprobs": None, "tools": None},
    **{"max_completion_tokens": None, "metadata": {}, "modalities": ["text"], "parallel_tool_calls": True},
    **{"prediction": None, "reasoning_effort": None, "response_format": {"type": "text"}, "service_tier": "auto"},
    **{"store": False, "verbosity": "medium", "web_search_options": None, "tool_choice": "auto"},
    **{"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "echo": False},
    **{"chat_template": None, "chat_template_kwargs": {}, "documents": None, "mm_processor_kwargs": None},
    **{"separate_reasoning": True, "stream_reasoning": True, "include_reasoning": True, "reasoning_format": "auto"},
    **{"thinking_token_budget": None, "parse_tool_calls": True, "safe_prompt": False, "safety_identifier": None},
}
COMPLETION: dict[str, Any] = {
    **{**SAMPLING, **MORE},
    **{"best_of": 1, "echo": False, "max_tokens": 16, "suffix": None, "add_special_tokens": True},
}
RESPONSES: dict[str, Any] = {
    **{"background": False, "conversation": None, "include": None, "instructions": None, "max_output_tokens": None},
    **{"max_tool_calls": None, "metadata": {}, "parallel_tool_calls": True, "previous_response_id": None},
    **{"prompt": None, "prompt_cache_key": None, "prompt_cache_retention": None, "reasoning": None, "user": None},
    **{"service_tier": "auto", "store": True, "stream": False, "stream_options": None, "temperature": 1.0},
    **{"text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto", "tools": [], "top_p": 1.0},
    **{"top_logprobs": 0, "truncation": "disabled", "safety_identifier": None, "context_management": None},
}
MESSAGES: dict[str, Any] = {
    **{"container": None, "context_management": None, "mcp_servers": [], "metadata": None, "service_tier": "auto"},
    **{"stop_sequences": [], "stream": False, "system": "", "temperature": 1.0, "thinking": {"type": "disabled"}},
    **{"tools": [], "tool_choice": {"type": "auto"}, "top_k": None, "top_p": 1.0, "cache_control": None},
    **{"output_config": None, "speed": "standard", "inference_geo": None},
}
OPTIONS: dict[str, Any] = {
    **{"num_keep": 4, "seed": -1, "num_predict": -1, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "typical_p": 1.0},
    **{"repeat_last_n": 64, "temperature": 0.8, "repeat_penalty": 1.1, "presence_penalty": 0.0, "tfs_z": 1.0},
    **{"frequency_penalty": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "penalize_newline": True},
    **{"stop": [], "numa": False, "num_ctx": 4096, "num_batch": 512, "num_gpu": -1, "main_gpu": 0, "use_mmap": None},
    **{"low_vram": False, "vocab_only": False, "use_mlock": False, "num_thread": 0, "logits_all": False},
    **{"f16_kv": True, "embedding_only": False, "num_gqa": 1, "draft_num_predict": 0},
}
ASKED: dict[str, Any] = {
    "stream": False,
    "format": "",
    "keep_alive": "5m",
    "think": None,
    "options": {},
    "truncate": None,
}
PARAMETERS: dict[str, Any] = {
    **{"adapter_id": None, "best_of": 1, "decoder_input_details": False, "details": False, "do_sample": False},
    **{"frequency_penalty": None, "grammar": None, "max_new_tokens": 100, "repetition_penalty": None, "seed": None},
    **{"return_full_text": False, "stop": [], "temperature": None, "top_k": None, "top_n_tokens": None},
    **{"top_p": None, "truncate": None, "typical_p": None, "watermark": False},
}
RERANK: dict[str, Any] = {
    **{"top_n": None, "return_documents": False, "max_chunks_per_doc": 10, "max_tokens_per_doc": 4096, "priority": 0},
    **{"truncation": True, "rank_fields": ["text"], "mm_processor_kwargs": None, "truncate_prompt_tokens": None},
}
EMBEDDING: dict[str, Any] = {
    **{"dimensions": None, "encoding_format": "float", "user": None, "truncate_prompt_tokens": None, "priority": 0},
    **{"embed_dtype": "float32", "output_dtype": "float", "normalize": True, "add_special_tokens": True},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": EMBEDDING,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/api/generate": {
        **{**ASKED, "suffix": "", "system": "", "template": "", "context": [], "raw": False, "images": []},
        **{"shift": True, "width": 0, "height": 0, "steps": 0, "logprobs": False, "top_logprobs": 0},
    },
    "/api/chat": {**ASKED, "tools": [], "shift": True, "logprobs": False, "top_logprobs": 0},
    "/api/embed": {"truncate": True, "keep_alive": "5m", "options": {}, "dimensions": None},
    "/generate": {"stream": False},
    "/rerank": RERANK,
    "/score": {"truncate_prompt_tokens": None, "priority": 0, "mm_processor_kwargs": None},
}
WITHIN: dict[str, tuple[str, dict[str, Any]]] = {
    "/api/chat": ("options", OPTIONS),
    "/api/generate": ("options", OPTIONS),
    "/generate": ("parameters", PARAMETERS),
    "/v2/models/{model}/generate": ("parameters", {**SAMPLING, "sequence_id": 0, "sequence_start": False}),
}


@pytest.mark.parametrize("path", DEFAULTS)
async def test_defaults_may_be_spelled_out(start: Starter, path: str) -> None:
    served = await start(strict_fields=True)
    valid = {**VALID[path][0]}
    wrong = {}
    together = {**DEFAULTS[path]}
    if path == "/generate":
        together["parameters"] = PARAMETERS
    for given in ({}, *({name: value} for name, value in DEFAULTS[path].items()), together):
        answer = await served.post(path_of(path), {**valid, **given})
        if answer.status_code != 200:
            wrong[str(given)[:80]] = answer.text
    assert wrong == {}


@pytest.mark.parametrize("path", WITHIN)
async def test_defaults_in_an_object_of_their_own(start: Starter, path: str) -> None:
    served = await start(strict_fields=True)
    name, values = WITHIN[path]
    valid = VALID[path][0]
    wrong = {}
    few = {"num_predict": 4} if name == "options" else {}  # a default of no limit takes the fake engine long
    for given in (*({each: value} for each, value in values.items()), values):
        answer = await served.post(
            path_of(path), {**valid, "stream": False, name: {**valid.get(name, {}), **given, **few}}
        )
        if answer.status_code != 200:
            wrong[str(given)[:80]] = answer.text
    assert wrong == {}


async def test_a_field_that_is_null_is_absent(start: Starter) -> None:
    """Every field of every schema that need not be given."""
    served = await start()
    wrong = {}
    for path, schemas in ENDPOINTS.items():
        valid = VALID[path][0]
        for name, info in spellings(schemas[0]).items() if valid else ():
            if info.is_required() or name in valid:
                continue
            answer = await served.post(path_of(path), {**valid, name: None})
            if answer.status_code != 200:
                wrong[f"{path} {name}"] = answer.text
    assert wrong == {}


async def test_seed_minus_one_of_ollama_is_no_seed(start: Starter) -> None:
    served = await start()
    body = {"model": "fake", "prompt": "abc", "stream": False, "options": {"num_predict": 40, "seed": -1}}
    said = {(await served.post("/api/generate", body)).json()["response"] for _ in range(4)}
    assert len(said) > 1
