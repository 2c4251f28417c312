"""Bodies that cost more to read than to send, for every POST route. Owns: shapes of values, and where they are put.

For tests and measurements of the server's edge. Must not know: how bodies are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Shape = Callable[[int], bytes]
TALK: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "fake", "messages": TALK, "max_tokens": 2}
ITEM: dict[str, Any] = {"type": "message", "role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

VALID: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (CHAT, ("messages", "tools", "logit_bias", "stop", "chat_template_kwargs")),
    "/v1/chat/completions/{completion_id}": ({"metadata": {"a": "b"}}, ("metadata",)),
    "/v1/completions": ({"prompt": "abc", "max_tokens": 2}, ("prompt", "logit_bias", "allowed_token_ids", "bad_words")),
    "/v1/embeddings": ({"input": "abc"}, ("input",)),
    "/pooling": ({"input": "abc"}, ("input",)),
    "/invocations": ({"prompt": "abc", "max_tokens": 2}, ("messages", "prompt", "input")),
    "/embed": ({"inputs": "abc"}, ("inputs",)),
    "/similarity": ({"inputs": {"source_sentence": "a", "sentences": ["b"]}}, ("inputs",)),
    "/tokenize": ({"prompt": "abc"}, ("prompt", "messages")),
    "/detokenize": ({"tokens": [1, 2]}, ("tokens",)),
    "/v1/responses": ({"input": "abc", "max_output_tokens": 2}, ("input", "metadata", "tools", "instructions")),
    "/v1/responses/compact": ({"input": "abc"}, ("input", "instructions")),
    "/v1/responses/input_tokens": ({"input": "abc"}, ("input", "tools", "instructions")),
    "/v1/conversations": ({"items": [ITEM]}, ("items", "metadata")),
    "/v1/conversations/{conversation_id}": ({"metadata": {"a": "b"}}, ("metadata",)),
    "/v1/conversations/{conversation_id}/items": ({"items": [ITEM]}, ("items",)),
    "/v1/responses/{response_id}/cancel": ({}, ("unknown",)),
    "/v1/messages": (CHAT, ("messages", "system", "tools", "metadata")),
    "/v1/messages/count_tokens": ({"model": "fake", "messages": TALK}, ("messages", "system")),
    "/api/generate": (
        {"model": "fake", "prompt": "abc", "options": {"num_predict": 2}},
        ("prompt", "context", "images"),
    ),
    "/api/chat": ({"model": "fake", "messages": TALK, "options": {"num_predict": 2}}, ("messages", "tools", "options")),
    "/api/embed": ({"model": "fake", "input": "abc"}, ("input",)),
    "/api/embeddings": ({"model": "fake", "prompt": "abc"}, ("prompt",)),
    "/api/show": ({"model": "fake"}, ("model",)),
    "/generate": ({"inputs": "abc", "parameters": {"max_new_tokens": 2}}, ("inputs", "prompt", "parameters")),
    "/generate_stream": ({"inputs": "abc", "parameters": {"max_new_tokens": 2}}, ("inputs", "parameters")),
    "/": ({"inputs": "abc", "parameters": {"max_new_tokens": 2}}, ("inputs",)),
    "/v2/models/{model}/infer": (
        {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["abc"]}], "parameters": {}},
        ("inputs", "parameters", "outputs"),
    ),
    "/v2/models/{model}/generate": (
        {"text_input": "abc", "parameters": {"max_tokens": 2}},
        ("text_input", "parameters"),
    ),
    "/v2/models/{model}/generate_stream": ({"text_input": "abc", "parameters": {"max_tokens": 2}}, ("text_input",)),
    "/rerank": ({"query": "a", "documents": ["b"]}, ("query", "documents")),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, ("documents",)),
    "/v2/rerank": ({"query": "a", "documents": ["b"]}, ("documents",)),
    "/reranking": ({"query": "a", "documents": ["b"]}, ("documents",)),
    "/v1/reranking": ({"query": "a", "documents": ["b"]}, ("documents",)),
    "/score": ({"text_1": "a", "text_2": "b"}, ("text_1", "text_2")),
    "/v1/score": ({"text_1": "a", "text_2": "b"}, ("text_2",)),
    "/classify": ({"input": "a", "labels": ["b", "c"]}, ("input", "labels")),
    "/completion": ({"prompt": "abc", "n_predict": 2}, ("prompt", "logit_bias", "stop")),
    "/completions": ({"prompt": "abc", "n_predict": 2}, ("prompt",)),
    "/infill": (
        {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
        ("input_prefix", "input_suffix", "input_extra", "prompt"),
    ),
    "/embedding": ({"content": "abc"}, ("content",)),
    "/embeddings": ({"content": "abc"}, ("content",)),
    "/apply-template": ({"messages": TALK}, ("messages", "tools", "chat_template_kwargs")),
    "/v1/load_lora_adapter": ({}, ("lora_name", "lora_path")),
    "/v1/unload_lora_adapter": ({}, ("lora_name",)),
    "/models/load": ({}, ("model",)),
    "/models/unload": ({}, ("model",)),
    "/sleep": ({}, ("unknown",)),
    "/wake_up": ({}, ("unknown",)),
    "/api/create": ({}, ("unknown",)),
    "/api/copy": ({}, ("unknown",)),
    "/api/pull": ({}, ("unknown",)),
    "/api/push": ({}, ("unknown",)),
    "/api/delete": ({}, ("unknown",)),
    "/api/blobs/{digest}": ({}, ("unknown",)),
}
"""Of each path: a body that is answered, and the fields that hold much."""
VALID |= {
    path.replace("{model}", "{model}/versions/1"): valid
    for path, valid in VALID.items()
    if path.startswith("/v2/models/")
}

STANDING = {
    "model": "fake",
    "response_id": "resp_x",
    "conversation_id": "conv_x",
    "item_id": "msg_x",
    "completion_id": "chatcmpl-x",
    "digest": "sha256:0",
}
"""What stands for the names in paths."""


def path_of(route: str) -> str:
    """A path that a route takes."""
    for name, value in STANDING.items():
        route = route.replace(f"{{{name}}}", value)
    return route


def filled(before: bytes, piece: bytes, after: bytes, size: int) -> bytes:
    """A list or text of pieces, together about so many bytes."""
    return before + piece * max(1, (size - len(before) - len(after)) // len(piece)) + after


def _numbered(piece: str, size: int) -> bytes:
    """An object of members with names of their own."""
    count = size // (len(piece) + 10)
    return b"{" + ",".join([f'"{i:07d}":{piece}' for i in range(count)]).encode() + b"}"


def _list(piece: bytes, last: bytes = b"1") -> Shape:
    return lambda size: filled(b"[", piece + b",", last + b"]", size)


def _nested(before: bytes, after: bytes) -> Shape:
    return lambda size: before * (size // 2 // len(before)) + b"1" + after * (size // 2 // len(before))


def _talk(before: bytes, piece: bytes, after: bytes) -> Shape:
    return lambda size: filled(b"[" + before, piece + b",", piece + after + b"]", size)


SHAPES: dict[str, Shape] = {
    "ones": _list(b"1"),
    "ids": _list(b"30000"),
    "ids, the last one bad": _list(b"30000", b'"a"'),
    "negative ids": _list(b"-1"),
    "nulls": _list(b"null"),
    "lists": _list(b"[]", b"[]"),
    "lists of one id": _list(b"[1]", b"[1]"),
    "objects": _list(b"{}", b"{}"),
    "empty texts": _list(b'""', b'""'),
    "texts": _list(b'"a"', b'"a"'),
    "parts": _list(b'{"type":"text","text":""}', b'{"type":"text","text":""}'),
    "messages": _list(b'{"role":"user","content":""}', b'{"role":"user","content":""}'),
    "bad messages": _list(b'{"role":1}', b"{}"),
    "tools": _list(json.dumps(TOOL).encode(), b"{}"),
    "a content of ones": _talk(b'{"role":"user","content":[', b"1", b"]}"),
    "a content of parts": _talk(b'{"role":"user","content":[', b'{"type":"text","text":"a"}', b"]}"),
    "calls": _talk(b'{"role":"assistant","tool_calls":[', b"{}", b"]}"),
    "long lists": _list(b"[" + b"1," * 5000 + b"1]", b"[1]"),
    "deep lists": _nested(b"[", b"]"),
    "deep objects": _nested(b'{"a":', b"}"),
    "names": lambda size: _numbered("1", size),
    "names of objects": lambda size: _numbered("{}", size),
    "one name": lambda size: filled(b"{", b'"a":1,', b'"a":1}', size),
    "a text": lambda size: filled(b'"', b"a", b'"', size),
    "a name": lambda size: filled(b'{"', b"a", b'":1}', size),
    "line ends": lambda size: filled(b'"', b"\\n", b'"', size),
    "escapes": lambda size: filled(b'"', b"\\u00e9", b'"', size),
    "quotes": lambda size: filled(b'"', b'\\"', b'"', size),
    "backslashes": lambda size: filled(b'"', b"\\\\", b'"', size),
    "emoji": lambda size: filled(b'"', "\U0001f600".encode(), b'"', size),
    "commas": lambda size: filled(b'"', b",[{:", b'"', size),
    "floats": _list(b"0.1234567890123456789"),
    "large floats": _list(b"1e308"),
    "too large numbers": _list(b"1e999"),
    "digits": lambda size: filled(b"", b"1", b"", size),
    "blanks": lambda size: filled(b"[1,", b" ", b"1]", size),
    "biases": lambda size: filled(b"{", b'"1":"x",', b'"2":1}', size),
    "no end": lambda size: filled(b"[", b"1,", b"", size),
    "no UTF-8": lambda size: filled(b'"', b"\xff", b'"', size),
}


def body(valid: dict[str, Any], field: str, value: bytes) -> bytes:
    """A valid body with one field replaced, or added."""
    kept = json.dumps({name: given for name, given in valid.items() if name != field}).encode()
    comma = b"," if len(kept) > len(b"{}") else b""
    return kept[:-1] + comma + json.dumps(field).encode() + b":" + value + b"}"
