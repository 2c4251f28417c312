"""Requests that are answered, of every API. Owns: what the fuzzer begins with. Must not know: how it is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.testing.hostile import VALID, path_of

MODEL = "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y", 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 9}}, "required": ["place"]}
FUNCTION = {"name": "mill", "description": "Grinds.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "mill", "arguments": '{"place": "top"}'}}
ASKED: dict[str, Any] = {"role": "user", "content": "Grind this"}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a mill."},
    {"role": "user", "content": [{"type": "text", "text": "Grind"}, {"type": "text", "text": "this"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "call_1", "content": "flour"},
    {"role": "user", "content": "And?", "name": "miller"},
]
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "seed": 7,
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "repetition_penalty": 1.1,
    "stop": ["zz", "qq"],
    "stop_token_ids": [5],
    "logit_bias": {"7": 1.5},
    "bad_words": ["bad"],
    "min_tokens": 1,
    "user": "someone",
    "priority": 1,
    "n": 2,
}
STRUCTURES: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[a-c]{1,4}"}},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_grammar": 'root ::= "a" | "b"'},
    {"guided_regex": "[0-9]+"},
    {
        "response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
            "triggers": ["<a>"],
        }
    },
]
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Grind"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "call_1", "name": "mill", "arguments": '{"place": "top"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "flour"}]},
    {"role": "user", "content": "And?"},
]
BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Grind"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "toolu_1", "name": "mill", "input": {"place": "top"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "flour"}]}],
    },
]


STANDING = {
    "{response_id}": rb"resp_[0-9a-f]{32}",
    "{conversation_id}": rb"conv_[0-9a-f]{32}",
    "{item_id}": rb"msg_[0-9a-f]{32}",
    "{completion_id}": rb"chatcmpl-[0-9a-f]{32}",
}
"""What stands in cases for something that is kept, and how its id looks in answers."""


def placed(text: str, known: dict[str, str]) -> str:
    """The same with the ids that are known."""
    for name, value in known.items():
        text = text.replace(name, value)
    return text


@dataclass(frozen=True, slots=True)
class Case:
    """One request; `{response_id}` and other names of STANDING stand for what is kept."""

    api: str
    method: str
    path: str
    body: dict[str, Any] | None = None


def _openai() -> list[Case]:
    chat, complete = "/v1/chat/completions", "/v1/completions"
    plain: dict[str, Any] = {"model": MODEL, "messages": [ASKED], "max_tokens": 4}
    prompt: dict[str, Any] = {"model": MODEL, "prompt": "The mill", "max_tokens": 4}
    found: list[tuple[str, dict[str, Any]]] = [
        (chat, {**plain, **SAMPLING}),
        (chat, {"messages": TALK, "max_completion_tokens": 3, "tools": TOOLS, "tool_choice": "auto"}),
        (chat, {**plain, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mill"}}}),
        (chat, {**plain, "logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1.0}),
        (chat, {**plain, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True}),
        (chat, {**plain, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}),
        (chat, {**plain, "documents": [], "thinking_token_budget": 3}),
        (complete, {**prompt, **SAMPLING, "logprobs": 1, "echo": True}),
        (complete, {**prompt, "prompt": [[5, 6, 7], [8]], "stream": True, "return_token_ids": True}),
        (complete, {**prompt, "prompt": ["a", "b"], "prompt_logprobs": 1, "temperature": 1.0, "best_of": 2, "n": 1}),
        (complete, {**prompt, "use_beam_search": True, "n": 2, "length_penalty": 0.5}),
        (complete, {**prompt, "truncate_prompt_tokens": 2, "allowed_token_ids": [5, 6], "cache_salt": "s"}),
        ("/v1/embeddings", {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
        ("/v1/embeddings", {"input": [[5, 6], [7]], "pooling": "mean", "truncate_prompt_tokens": 1}),
        ("/tokenize", {"messages": TALK, "tools": TOOLS, "return_token_strs": True}),
        ("/tokenize", {"model": MODEL, "prompt": "The mill", "add_special_tokens": True}),
        ("/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
    ]
    for number, structure in enumerate(STRUCTURES):
        found.append((chat, {**plain, **structure, "max_tokens": 12, "stream": number % 2 == 0}))
        found.append((complete, {**prompt, **structure, "max_tokens": 12, "stream": number % 2 == 1}))
    return [Case("openai", "POST", path, body) for path, body in found]


def _responses() -> list[Case]:
    common: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4}
    tools = [{"type": "function", **FUNCTION, "strict": True}]
    form = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    bodies: list[dict[str, Any]] = [
        {**common, "input": "Grind", "instructions": "Be a mill.", "metadata": {"a": "b"}},
        {**common, "input": ITEMS, "stream": True, "temperature": 0.5, "top_p": 0.9, "top_logprobs": 2},
        {**common, "input": ITEMS, "tools": tools, "tool_choice": {"type": "function", "name": "mill"}},
        {
            **common,
            "input": ITEMS,
            "tools": tools,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "mill"}]},
        },
        {**common, "input": "Grind", "text": form, "store": False, "reasoning": {"effort": "low", "summary": "auto"}},
        {**common, "input": "And?", "previous_response_id": "{response_id}", "truncation": "auto"},
        {**common, "input": "Grind", "background": True, "include": ["message.output_text.logprobs"]},
    ]
    one = "/v1/responses/{response_id}"
    found = [Case("responses", "POST", "/v1/responses", body) for body in bodies]
    found += [Case("responses", "GET", path) for path in (one, one + "/input_items", one + "?stream=true")]
    found += [Case("responses", "GET", one + "?stream=true&starting_after=2"), Case("responses", "DELETE", one)]
    return [*found, Case("responses", "POST", one + "/cancel")]


def _kept() -> list[Case]:
    chat, talk = "/v1/chat/completions", "/v1/conversations"
    plain: dict[str, Any] = {"model": MODEL, "messages": TALK, "max_tokens": 4, "store": True, "metadata": {"a": "b"}}
    common: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4, "conversation": "{conversation_id}"}
    one, items, stored = f"{talk}/{{conversation_id}}", f"{talk}/{{conversation_id}}/items", f"{chat}/{{completion_id}}"
    posts: list[tuple[str, dict[str, Any]]] = [
        (chat, plain),
        (chat, {**plain, "stream": True, "tools": TOOLS, "n": 2, "temperature": 1.0, "logprobs": True}),
        (stored, {"metadata": {"c": "d"}}),
        (talk, {"items": ITEMS, "metadata": {"a": "b"}}),
        (one, {"metadata": {"a": "b"}}),
        (items, {"items": ITEMS}),
        ("/v1/responses", {**common, "input": "Grind"}),
        ("/v1/responses", {**common, "input": ITEMS, "conversation": {"id": "{conversation_id}"}, "stream": True}),
        ("/v1/responses/input_tokens", {"model": MODEL, "input": ITEMS, "instructions": "Be a mill."}),
        ("/v1/responses/compact", {"model": MODEL, "input": ITEMS}),
    ]
    found = [Case("kept", "POST", path, body) for path, body in posts]
    lists = (f"{chat}?limit=3&order=desc", f"{chat}?metadata[a]=b", f"{items}?after={{item_id}}", f"{items}?order=asc")
    reads = (*lists, one, stored, f"{stored}/messages", f"{items}/{{item_id}}")
    found += [Case("kept", "GET", path) for path in reads]
    return found + [Case("kept", "DELETE", path) for path in (one, stored, f"{items}/{{item_id}}")]


def _anthropic() -> list[Case]:
    common: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "messages": BLOCKS}
    tools = [{"name": "mill", "description": "Grinds.", "input_schema": PARAMETERS}]
    form = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["zz"], "metadata": {"user_id": "a"}}
    bodies: list[dict[str, Any]] = [
        {**common, **sampling, "system": [{"type": "text", "text": "Be a mill."}]},
        {**common, "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {**common, "tools": tools, "tool_choice": {"type": "tool", "name": "mill", "disable_parallel_tool_use": True}},
        {**common, "messages": [ASKED], "output_config": form, "max_tokens": 12},
        {**common, "messages": [ASKED, {"role": "assistant", "content": "Flour is"}]},
    ]
    counted = {"model": MODEL, "messages": BLOCKS, "system": "Be a mill.", "tools": tools}
    found = [Case("anthropic", "POST", "/v1/messages", body) for body in bodies]
    return [*found, Case("anthropic", "POST", "/v1/messages/count_tokens", counted)]


def _ollama() -> list[Case]:
    options = {"num_predict": 4, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 3, "stop": ["zz"]}
    common: dict[str, Any] = {"model": MODEL, "options": {"num_predict": 4}}
    call = {"function": {"name": "mill", "arguments": {"place": "top"}}}
    talk = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "hm"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/api/generate", {**common, "prompt": "Grind", "options": options, "keep_alive": "5m"}),
        ("/api/generate", {**common, "prompt": "Grind", "stream": False, "raw": True, "logprobs": True}),
        ("/api/generate", {**common, "prompt": "Grind", "format": SCHEMA, "system": "Be a mill."}),
        ("/api/chat", {**common, "messages": [*talk, {"role": "tool", "content": "flour", "tool_name": "mill"}]}),
        ("/api/chat", {**common, "messages": [ASKED], "tools": TOOLS, "stream": False, "think": False}),
        ("/api/chat", {**common, "messages": [ASKED], "format": "json", "top_logprobs": 2, "logprobs": True}),
        ("/api/embed", {"model": MODEL, "input": ["a", "b"], "truncate": True, "dimensions": 8}),
        ("/api/embeddings", {"model": MODEL, "prompt": "a"}),
        ("/api/show", {"model": MODEL, "verbose": True}),
    ]
    found = [Case("ollama", "POST", path, body) for path, body in bodies]
    return found + [Case("ollama", "GET", f"/api/{name}") for name in ("tags", "ps", "version")]


def _tgi() -> list[Case]:
    parameters = {
        **{"max_new_tokens": 4, "details": True, "top_n_tokens": 2, "stop": ["zz"], "return_full_text": True},
        **{"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "seed": 3, "truncate": 9},
    }
    asked = {"inputs": "Grind", "parameters": {"max_new_tokens": 4, "decoder_input_details": True, "details": True}}
    grammar = {"max_new_tokens": 9, "grammar": {"type": "json", "value": SCHEMA}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"inputs": "Grind", "parameters": parameters}),
        ("/generate", {"inputs": "Grind", "parameters": grammar}),
        ("/generate", asked),
        ("/generate", {"prompt": "Grind", "max_tokens": 4, "stream": True, "temperature": 0.0}),
        ("/generate_stream", {"inputs": "Grind", "parameters": parameters}),
        ("/", {"inputs": "Grind", "parameters": {"max_new_tokens": 4}, "stream": True}),
    ]
    return [*(Case("tgi", "POST", path, body) for path, body in bodies), Case("tgi", "GET", "/info")]


def _kserve() -> list[Case]:
    tensor = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["Grind", "this"]}
    more = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [4], "parameters": {}}
    root = f"/v2/models/{MODEL}"
    infer = {"id": "one", "inputs": [tensor, more], "outputs": [{"name": "text_output"}], "parameters": {}}
    said = {"id": "one", "text_input": "Grind", "parameters": {"max_tokens": 4, "temperature": 0.5, "stop": ["zz"]}}
    posts = {f"{root}/infer": infer, f"{root}/generate": said, f"{root}/generate_stream": said}
    found = [Case("kserve", "POST", path, body) for path, body in posts.items()]
    return found + [Case("kserve", "GET", path) for path in ("/v2", root, root + "/ready", "/v2/health/ready")]


def _scoring() -> list[Case]:
    rerank: dict[str, Any] = {"model": MODEL, "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/rerank", {**rerank, "return_documents": True, "method": "likelihood"}),
        ("/v1/rerank", {**rerank, "method": "likelihood", "instruction": "Find it."}),
        ("/v2/rerank", {**rerank, "truncate_prompt_tokens": 9}),
        ("/v1/reranking", rerank),
        ("/score", {"text_1": "a", "text_2": ["b", "c"], "model": MODEL}),
        ("/v1/score", {"queries": ["a", "b"], "items": ["b", "c"], "method": "likelihood"}),
        ("/classify", {"input": ["a", "b"], "labels": ["x", "y"], "instruction": "Which?"}),
    ]
    return [Case("scoring", "POST", path, body) for path, body in bodies]


def _others() -> list[Case]:
    gets = ("/v1/models", f"/v1/models/{MODEL}", "/v1/requests", "/v1/requests/x", "/v1/engine", "/version", "/load")
    found = [Case("server", "GET", path) for path in (*gets, "/ready", "/openapi.json", "/", "/v1/engine?since=1")]
    return found


def corpus() -> list[Case]:
    """All of them; a POST route that nothing above asks is in with a plain body."""
    found = [
        *(*_openai(), *_responses(), *_kept(), *_anthropic(), *_ollama()),
        *(*_tgi(), *_kserve(), *_scoring(), *_others()),
    ]
    asked = {case.path for case in found} | {"/infill"}  # the served model has no tokens for gaps
    for route, (body, _) in VALID.items():
        path = path_of(route).replace("fake", MODEL)
        if path not in asked and not any(name in route for name in STANDING):
            found.append(Case("server", "POST", path, body))
    return found
