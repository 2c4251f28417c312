"""For every field that is done: two bodies that differ in it alone and have different effects.

PROBES[object_name][field] = (base, before, after): `base` is what both bodies hold besides; a value of ABSENT leaves
the field out. `base` and values of objects without an endpoint of their own are whole bodies (see
`test_server_fields_done.py`).
"""

from __future__ import annotations

from typing import Any

from tokenmill.server.responses.schemas import PASSED

ABSENT = object()
Probe = tuple[dict[str, Any], Any, Any]
LOUD: dict[str, Any] = {"temperature": 1.0}
STREAM: dict[str, Any] = {"stream": True}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "hear", "parameters": SCHEMA}}
THOUGHT = "<think>\nhm\n</think>\n\nyes"
"""What the engine says in every probe."""
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
BEGUN: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "Well"}]


def _given(value: Any, base: dict[str, Any] | None = None) -> Probe:
    return (base or {}, ABSENT, value)


SAMPLING: dict[str, Probe] = {
    "model": _given("other"),
    "frequency_penalty": _given(0.5),
    "presence_penalty": _given(0.5),
    "repetition_penalty": _given(1.5),
    "temperature": _given(0.5),
    "top_p": _given(0.5),
    "top_k": _given(5),
    "min_p": _given(0.1),
    "typical_p": _given(0.5),
    "repeat_last_n": _given(5),
    "top_n_sigma": _given(1.5),
    "epsilon_cutoff": _given(3.0),
    "eta_cutoff": _given(3.0),
    "top_a": _given(0.2),
    "xtc_probability": _given(0.5),
    "xtc_threshold": _given(0.2),
    "dynatemp_range": _given(0.5),
    "dynatemp_exponent": _given(2.0),
    "smoothing_factor": _given(0.3),
    "smoothing_curve": _given(1.5),
    "mirostat": _given(2),
    "mirostat_tau": _given(3.0),
    "mirostat_eta": _given(0.2),
    "dry_multiplier": _given(0.8),
    "dry_base": _given(2.0),
    "dry_allowed_length": _given(3),
    "dry_penalty_last_n": _given(64),
    "dry_sequence_breakers": _given(["a"]),
    "no_repeat_ngram_size": _given(3),
    "samplers": _given(["top_k", "temperature"]),
    "temperature_last": ({}, False, True),
    "n": _given(2, LOUD),
    "best_of": _given(2, LOUD),
    "use_beam_search": ({"temperature": 0.0}, False, True),
    "length_penalty": _given(2.0, {"temperature": 0.0, "use_beam_search": True}),
    "seed": ({}, 3, 4),
    "stop": _given("h"),
    "stop_token_ids": _given([97]),
    "include_stop_str_in_output": ({"stop": "h"}, False, True),
    "ignore_eos": _given(True),
    "min_tokens": _given(2),
    "skip_special_tokens": _given(False),
    "spaces_between_special_tokens": _given(False),
    "truncate_prompt_tokens": _given(2),
    "truncation_side": ({"truncate_prompt_tokens": 2}, "left", "right"),
    "prompt_logprobs": _given(1),
    "allowed_token_ids": _given([97]),
    "bad_words": _given(["b"]),
    "logit_bias": _given({"97": 1.0}),
    "stream": _given(True),
    "stream_options": _given({"include_usage": True}, STREAM),
    "stream_interval": ({**STREAM, "max_tokens": 6}, ABSENT, 4),
    "response_format": _given({"type": "json_object"}),
    "structured_outputs": _given({"choice": ["a"]}),
    "guided_json": _given(SCHEMA),
    "guided_regex": _given("[a-c]"),
    "guided_choice": _given(["a"]),
    "guided_grammar": _given('root ::= "a"'),
    "guided_whitespace_pattern": _given("[ ]?", {"guided_json": SCHEMA}),
    "json_schema": _given(SCHEMA),
    "regex": _given("[a-c]"),
    "ebnf": _given('root ::= "a"'),
    "grammar": _given('root ::= "a"'),
    "structural_tag": _given({"structures": [], "triggers": []}),
    "priority": _given(1),
    "request_id": _given("mine"),
    "session_id": _given("talk"),
    "cache_salt": _given("salt"),
    "return_tokens_as_token_ids": ({"logprobs": 1}, False, True),
    "return_token_ids": _given(True),
    "timeout": _given(5.0),
}
CHAT: dict[str, Probe] = {
    **SAMPLING,
    "return_tokens_as_token_ids": ({"logprobs": True}, False, True),
    "messages": ({}, [USER], BEGUN),
    "logprobs": _given(True),
    "top_logprobs": ({"logprobs": True}, ABSENT, 2),
    "max_tokens": ({"max_completion_tokens": ABSENT}, 3, 4),
    "max_completion_tokens": ({}, 3, 4),
    "tools": _given([TOOL]),
    "tool_choice": ({"tools": [TOOL]}, "none", "required"),
    "parallel_tool_calls": ({"tools": [TOOL], "tool_choice": "required"}, True, False),
    "reasoning_effort": ({}, ABSENT, "low"),
    "echo": ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}, False, True),
    "add_generation_prompt": ({}, True, False),
    "continue_final_message": ({"messages": BEGUN, "add_generation_prompt": False}, False, True),
    "add_special_tokens": ({}, False, True),
    "documents": _given([{"text": "a"}]),
    "chat_template": _given("{{ messages[0].content }}"),
    "chat_template_kwargs": _given({"mood": "good"}),
    "include_reasoning": ({"max_completion_tokens": 40}, True, False),
    "separate_reasoning": ({"max_completion_tokens": 40}, True, False),
    "thinking_token_budget": _given(3),
    "return_prompt_text": _given(True),
    "store": ({}, False, True),
    "metadata": _given({"a": "b"}, {"store": True}),
}
COMPLETION: dict[str, Probe] = {
    **SAMPLING,
    "prompt": ({}, "Hi", "Ho"),
    "logprobs": _given(1),
    "max_tokens": ({}, 3, 4),
    "echo": ({}, False, True),
    "add_special_tokens": ({}, True, False),
    "suffix": _given("x"),
}
OPTIONS: dict[str, Probe] = {
    "num_predict": ({}, 3, 4),
    "num_ctx": ({}, 64, 1 << 20),
    "repeat_penalty": _given(1.5),
    "seed": ({}, 3, 4),
    "stop": _given("h"),
    **{name: SAMPLING[name] for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")},
    **{name: SAMPLING[name] for name in ("presence_penalty", "frequency_penalty", "repeat_last_n")},
    **{name: SAMPLING[name] for name in ("mirostat", "mirostat_tau", "mirostat_eta")},
}
KEEP: Probe = ({}, "5m", "soon")
"""A duration, and none; what durations do is seen where several models are served (test_server_many.py)."""
_OLLAMA: dict[str, Probe] = {
    "keep_alive": KEEP,
    "model": ({}, "fake", "other"),
    "stream": ({}, False, True),
    "format": _given("json"),
    "options": _given({"top_k": 3}),
    "think": ({}, False, True),
    "logprobs": ({}, False, True),
    "top_logprobs": ({"logprobs": True}, ABSENT, 2),
    "truncate": ({"_long": True}, False, True),
}
_SCORED: dict[str, Probe] = {
    "model": _given("other"),
    "method": ({}, "embedding", "likelihood"),
    "instruction": ({"method": "likelihood"}, ABSENT, "Be strict."),
    "truncate_prompt_tokens": _given(1),
    "truncation_side": ({"truncate_prompt_tokens": 1}, "left", "right"),
    "priority": _given(1),
    "timeout": _given(5.0),
}
_NOT_IN_ANSWERS = {
    *("logprobs", "prompt_logprobs", "echo", "return_tokens_as_token_ids", "return_token_ids", "stream_options"),
    *("request_id", "stream_interval"),
}
_VLLM = {name: probe for name, probe in COMPLETION.items() if name not in _NOT_IN_ANSWERS} | {"model": _given("nope")}
_CUTS = ("truncate_prompt_tokens", "truncation_side")
_LLAMA = {name: probe for name, probe in _VLLM.items() if name not in ("n", "best_of", "length_penalty")} | {
    "use_beam_search": ({"temperature": 0.0}, False, True),
    "length_penalty": _given(2.0, {"temperature": 0.0, "use_beam_search": True}),
    "return_token_ids": ({}, False, True),
    "logprobs": ({}, 0, 2),
}
_IN_CHAT = {"messages": [USER]}


def _tensor(text: str) -> dict[str, Any]:
    return {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [text]}


_TALK: dict[str, Probe] = {
    "chat_template_kwargs": _given({"mood": "good"}),
    "model": _given("nope"),
    "input": ({}, "Hi", "Ho!"),
    "instructions": _given("Be brief."),
    "previous_response_id": _given("resp_none"),
    "conversation": _given("conv_none"),
    "reasoning": _given({"effort": "low"}),
    "tools": _given([{"type": "function", **TOOL["function"]}]),
}
EMBEDDINGS: dict[str, Probe] = {
    "model": _given("other"),
    "input": ({}, "Hi", "Ho"),
    "encoding_format": ({}, "float", "base64"),
    "dimensions": _given(2),
    "truncate_prompt_tokens": _given(1),
    "add_special_tokens": ({}, True, False),
    "pooling": ({}, "last", "mean"),
    "priority": _given(1),
    "timeout": _given(5.0),
    "request_id": _given("mine"),
    "truncation_side": ({"truncate_prompt_tokens": 1}, "left", "right"),
}


PROBES: dict[str, dict[str, Probe]] = {
    "openai.ChatRequest": CHAT,
    "openai.CompletionRequest": COMPLETION,
    "openai.EmbeddingRequest": EMBEDDINGS,
    "openai.PoolingRequest": {**EMBEDDINGS, "task": _given("score")},
    "openai.TokenizeRequest": {
        "content": ({"prompt": ABSENT}, "Hi", "Ho"),
        "add_special": ({"prompt": ABSENT, "content": "Hi"}, False, True),
        "parse_special": ({"prompt": ABSENT, "content": "<|im_end|>"}, True, False),
        "with_pieces": ({"prompt": ABSENT, "content": "Hi"}, False, True),
        "model": _given("nope"),
        "prompt": ({}, "Hi", "Ho"),
        "messages": ({"prompt": ABSENT}, [USER], BEGUN),
        "add_special_tokens": ({}, True, False),
        "add_generation_prompt": ({"prompt": ABSENT, **_IN_CHAT}, True, False),
        "continue_final_message": (
            {"prompt": ABSENT, "messages": BEGUN, "add_generation_prompt": False},
            False,
            True,
        ),
        "return_token_strs": ({}, False, True),
        "chat_template_kwargs": _given({"mood": "good"}, {"prompt": ABSENT, **_IN_CHAT}),
        "tools": _given([TOOL], {"prompt": ABSENT, **_IN_CHAT}),
    },
    "openai.DetokenizeRequest": {
        "model": _given("nope"),
        "tokens": ({}, [70], [71]),
        "skip_special_tokens": ({"tokens": [257, 70]}, False, True),
    },
    "lora.LoadAdapterRequest": {
        "lora_name": ({"load_inplace": True}, "one", "two"),
        "lora_path": ({"load_inplace": True}, "adapter", "nowhere"),
        "load_inplace": ({"lora_name": "three"}, True, False),
        "model": ({"lora_name": "one", "load_inplace": True}, "fake", "nope"),
    },
    "lora.UnloadAdapterRequest": {"lora_name": ({}, "some", "other")},
    "ollama.PullRequest": {
        "model": ({"stream": False}, "weights", "nope"),
        "name": ({"model": ABSENT, "stream": False}, "weights", "nope"),
        "stream": ({}, True, False),
    },
    "ollama.CreateRequest": {
        "model": ({}, "mine", "yours"),
        "name": ({"model": ABSENT}, "mine", "yours"),
        "stream": ({}, True, False),
        "modelfile": ({"from": ABSENT}, "FROM weights", "FROM weights\nSYSTEM Be brief."),
        "from": ({}, "weights", "nope"),
        "files": ({"from": ABSENT}, {"a.gguf": f"sha256:{0:064d}"}, {"b.gguf": f"sha256:{0:064d}"}),
        "adapters": ({}, {"a.gguf": f"sha256:{0:064d}"}, {"b.gguf": f"sha256:{0:064d}"}),
        "template": ({}, "{% if true %}a{% endif %}", "{% if true %}b{% endif %}"),
        "license": _given("free"),
        "system": _given("Be brief."),
        "parameters": _given({"temperature": 0.5}),
        "messages": _given([{"role": "user", "content": "Hi"}]),
    },
    "ollama.CopyRequest": {"source": ({}, "here", "nope"), "destination": ({}, "one", "two")},
    "ollama.DeleteRequest": {"model": ({}, "here", "nope"), "name": ({}, "here", "nope")},
    "switch.ModelRequest": {"model": ({}, "fake", "nope")},
    "stored.UpdateRequest": {"metadata": ({}, {"a": "b"}, {"a": "c"})},
    "responses.TalkRequest": _TALK,
    "responses.CompactRequest": {
        **{name: _TALK[name] for name in ("model", "input", "instructions", "previous_response_id")},
        "timeout": _given(5.0),
    },
    "responses.CreateConversation": {"items": _given([USER]), "metadata": _given({"a": "b"})},
    "responses.UpdateConversation": {"metadata": ({}, {"a": "b"}, {"a": "c"})},
    "responses.CreateItems": {"items": ({}, [USER], [{**USER, "content": "Ho"}])},
    "responses.ResponsesRequest": {
        "conversation": _given("conv_none"),
        "model": _given("other"),
        "input": ({}, "Hi", "Ho"),
        "instructions": _given("Be brief."),
        "previous_response_id": _given("resp_none"),
        "store": ({}, True, False),
        "background": ({}, False, True),
        "stream": ({}, False, True),
        "max_output_tokens": ({}, 3, 4),
        "temperature": _given(0.5),
        "top_p": _given(0.5),
        "top_k": _given(5),
        "seed": ({}, 3, 4),
        **{name: SAMPLING[name] for name in PASSED if name not in ("temperature", "top_p", "top_k", "seed")},
        "chat_template_kwargs": _given({"mood": "good"}),
        "top_logprobs": ({}, ABSENT, 2),
        "include": _given(["message.output_text.logprobs"]),
        "reasoning": _given({"effort": "low"}),
        "text": _given({"format": {"type": "json_object"}}),
        "tools": _given([{"type": "function", **TOOL["function"]}]),
        "tool_choice": (
            {"tools": [{"type": "function", **TOOL["function"]}]},
            "none",
            "required",
        ),
        "parallel_tool_calls": (
            {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"},
            True,
            False,
        ),
        "truncation": ({"_long": True}, "disabled", "auto"),
        "timeout": _given(5.0),
    },
    "anthropic.CountRequest": {
        "model": ({}, "fake", "nope"),
        "messages": ({}, [USER], BEGUN),
        "system": _given("Be brief."),
        "tools": _given([{"name": "look", "input_schema": SCHEMA}]),
        "thinking": _given({"type": "enabled", "budget_tokens": 3}),
    },
    "anthropic.MessagesRequest": {
        "model": ({}, "fake", "other"),
        "messages": ({}, [USER], BEGUN),
        "system": _given("Be brief."),
        "tools": _given([{"name": "look", "input_schema": SCHEMA}]),
        "tool_choice": ({"tools": [{"name": "look", "input_schema": SCHEMA}]}, {"type": "none"}, {"type": "any"}),
        "thinking": _given({"type": "enabled", "budget_tokens": 3}),
        "max_tokens": ({}, 3, 4),
        "stream": ({}, False, True),
        "temperature": _given(0.5),
        "top_p": _given(0.5),
        "top_k": _given(5),
        "stop_sequences": _given(["h"]),
        "output_config": _given({"effort": "low"}),
    },
    "ollama.GenerateRequest": {
        **_OLLAMA,
        "prompt": ({}, "Hi", "Ho"),
        "system": _given("Be brief."),
        "raw": ({}, False, True),
        "suffix": _given("x"),
    },
    "ollama.ChatRequest": {**_OLLAMA, "messages": ({}, [USER], BEGUN), "tools": _given([TOOL])},
    "ollama.Options": OPTIONS,
    "ollama.EmbedOptions": {"num_ctx": OPTIONS["num_ctx"]},
    "ollama.EmbedRequest": {
        "keep_alive": KEEP,
        "model": ({}, "fake", "nope"),
        "input": ({}, "Hi", "Ho"),
        "truncate": ({"_long": True}, False, True),
        "dimensions": _given(2),
        "options": _given({"num_ctx": 1 << 20}),
    },
    "ollama.EmbeddingsRequest": {"keep_alive": KEEP, "model": ({}, "fake", "nope"), "prompt": ({}, "Hi", "Ho")},
    "ollama.ShowRequest": {"model": ({}, "fake", "nope"), "name": ({"model": ABSENT}, "fake", "nope")},
    "tgi.TgiRequest": {
        "inputs": ({}, "Hi", "Ho"),
        "parameters": _given({"top_k": 3}),
        "stream": ({}, False, True),
    },
    "tgi.Parameters": {
        "best_of": _given(2),
        "decoder_input_details": ({}, False, True),
        "details": ({}, False, True),
        "do_sample": ({}, False, True),
        "frequency_penalty": _given(0.5),
        "grammar": _given({"type": "regex", "value": "[a-c]"}),
        "max_new_tokens": ({}, 3, 4),
        "repetition_penalty": _given(1.5),
        "return_full_text": ({}, False, True),
        "seed": ({}, 3, 4),
        "stop": _given(["h"]),
        "temperature": _given(0.5),
        "top_k": _given(5),
        "top_n_tokens": ({"details": True}, ABSENT, 2),
        "top_p": _given(0.5),
        "truncate": _given(2),
        "typical_p": _given(0.5),
    },
    "tgi.VllmRequest": _VLLM,
    "scoring.RerankRequest": {
        **_SCORED,
        "query": ({}, "a", "b"),
        "documents": ({}, ["a"], ["b"]),
        "top_n": _given(1),
        "return_documents": ({}, True, False),
    },
    "scoring.ScoreRequest": {
        **_SCORED,
        "text_1": ({}, "a", "b"),
        "text_2": ({}, "a", "b"),
    },
    "scoring.EmbedRequest": {
        "inputs": ({}, "Hi", "Ho"),
        "truncate": ({"_long": True}, False, True),
        "truncation_direction": ({"_long": True, "truncate": True}, "right", "left"),
        "dimensions": _given(2),
    },
    "scoring.SimilarityRequest": {
        "inputs": ({}, {"source_sentence": "a", "sentences": ["b"]}, {"source_sentence": "a", "sentences": ["c"]})
    },
    "scoring.TeiRerankRequest": {
        "query": ({}, "a", "b"),
        "texts": ({}, ["a"], ["b"]),
        "top_n": _given(1),
        "return_text": ({}, False, True),
        "truncate": ({"texts": ["word " * 400]}, False, True),
        "truncation_direction": ({"texts": [f"{'a' * 2000}{'b' * 2000}"], "truncate": True}, "right", "left"),
    },
    "scoring.ClassifyRequest": {
        "model": _given("other"),
        "input": ({}, "Hi", "Ho"),
        "labels": ({}, ["a", "b"], ["a", "c"]),
        "instruction": _given("Which one?"),
        "priority": _given(1),
        "timeout": _given(5.0),
    },
    "llamacpp.CompletionRequest": {
        **_LLAMA,
        "lora": _given([{"id": 0}]),
        "response_fields": _given(["content"]),
    },
    "llamacpp.InfillRequest": {
        **{name: probe for name, probe in _LLAMA.items() if name not in ("suffix", *_CUTS)},
        "input_prefix": ({}, "Hi", "Ho"),
        "input_suffix": ({}, "x", "y"),
        "lora": _given([{"id": 1}]),
        "response_fields": _given(["content"]),
        "input_extra": _given([{"filename": "a.py", "text": "b"}]),
        "prompt": _given("more"),
    },
    "llamacpp.TemplateRequest": {
        "messages": ({}, [USER], BEGUN),
        "tools": _given([TOOL]),
        "add_generation_prompt": ({}, True, False),
        "continue_final_message": ({"messages": BEGUN}, False, True),
        "chat_template_kwargs": _given({"mood": "calm"}),
    },
    "llamacpp.EmbeddingRequest": {"content": ({}, "Hi", "Ho")},
    "kserve.InferRequest": {
        "id": _given("mine"),
        "inputs": ({}, [_tensor("Hi")], [_tensor("Ho")]),
        "parameters": _given({"max_tokens": 2}),
        "outputs": _given([{"name": "finish_reason"}]),
    },
    "kserve.GenerateRequest": {
        "id": _given("mine"),
        "text_input": ({}, "Hi", "Ho"),
        "parameters": _given({"max_tokens": 2}),
    },
    "kserve.Parameters": {
        **{name: probe for name, probe in _VLLM.items() if name not in ("model", "prompt")},
    },
}
REFUSAL_IS_THE_EFFECT = {
    ("priority", "--scheduling-policy"),
    ("num_ctx", "--max-model-len"),
    ("options", "--max-model-len"),
    ("n", "room for one text"),
    ("stream", "generate_stream"),
    ("model", "nope"),
    ("name", "nope"),
    ("from", "nope"),
    ("source", "nope"),
    ("files", "there is no file"),
    ("adapters", "there is no file"),
    ("previous_response_id", "resp_none"),
    ("conversation", "conv_none"),
    ("truncate", "context"),
    ("truncation", "context"),
    ("task", "task"),
    ("keep_alive", "duration"),
    ("lora_path", "no such adapter"),
    ("load_inplace", "served already"),
    ("lora_name", "no adapter"),
}
"""Fields of which one value is refused, and a word of that refusal."""
