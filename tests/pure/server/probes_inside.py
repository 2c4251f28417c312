"""Probes of objects that lie in a body: for every field that is done, a path and two bodies that differ in it alone."""

from __future__ import annotations

from typing import Any

from tests.pure.server.probes import OTHER, SCHEMA, TOOL, USER

Bodies = tuple[str, dict[str, Any], dict[str, Any]]
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ITEM_CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}
DEFINITION = {"name": "look", "description": "Look.", "parameters": SCHEMA, "strict": False}

NAMED: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
OTHER_NAMED: dict[str, Any] = {"type": "function", "function": {"name": "hear"}}
HEAR = {"type": "function", "name": "hear"}
FREELY: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": [{**HEAR, "name": "look"}]}


def _chat(before: dict[str, Any], after: dict[str, Any], **more: Any) -> Bodies:
    """Two messages."""
    return CHAT, {"messages": [before], **more}, {"messages": [after], **more}


def _near(change: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": {"source_sentence": "a", "sentences": ["b"], **change}}


def _infill(before: dict[str, Any], after: dict[str, Any]) -> Bodies:
    """Two pieces of another file; names of files are shown by tokenizers that have a mark for them."""
    base = {"input_prefix": "a", "input_suffix": "b", "seed": 3}
    first, second = ({**base, "input_extra": [{"text": "x", "filename": "y", **each}]} for each in (before, after))
    return "/infill", first, second


def _form(before: dict[str, Any], after: dict[str, Any]) -> Bodies:
    base = {"messages": [USER]}
    return CHAT, {**base, "response_format": before}, {**base, "response_format": after}


def _call(before: dict[str, Any], after: dict[str, Any]) -> Bodies:
    first, second = ({"role": "assistant", "tool_calls": [{**CALL, **each}]} for each in (before, after))
    return _chat(first, second)


def _tool(before: dict[str, Any], after: dict[str, Any], choice: str = "auto") -> Bodies:
    first, second = ({"messages": [USER], "tools": [each], "tool_choice": choice} for each in (before, after))
    return CHAT, first, second


def _choose(before: dict[str, Any], after: dict[str, Any]) -> Bodies:
    first, second = ({"messages": [USER], "tools": [TOOL, OTHER], "tool_choice": each} for each in (before, after))
    return CHAT, first, second


def _allow(**change: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED], **change}}


def _pick(before: dict[str, Any], after: dict[str, Any]) -> Bodies:
    tools = [{"type": "function", **each["function"]} for each in (TOOL, OTHER)]
    first, second = (
        {"input": "Hi", "tools": tools, "tool_choice": {"type": "function", **each}} for each in (before, after)
    )
    return RESPONSES, first, second


def _item(before: dict[str, Any], after: dict[str, Any], *earlier: dict[str, Any]) -> Bodies:
    return RESPONSES, {"input": [*earlier, before]}, {"input": [*earlier, after]}


def _part(before: dict[str, Any], after: dict[str, Any]) -> Bodies:
    first, second = ({"input": [{"role": "user", "content": [each]}]} for each in (before, after))
    return RESPONSES, first, second


def _said(before: dict[str, Any], after: dict[str, Any], role: str = "user") -> Bodies:
    calls = [{"role": "assistant", "content": [USE, {**USE, "id": "c2"}]}] if before["type"] == "tool_result" else []
    first, second = (
        {"model": "fake", "max_tokens": 4, "messages": [USER, *calls, {"role": role, "content": [each]}, USER]}
        for each in (before, after)
    )
    return ANTHROPIC, first, second


def _asked(before: dict[str, Any], after: dict[str, Any]) -> Bodies:
    base = {"model": "fake", "max_tokens": 4, "messages": [USER]}
    return ANTHROPIC, {**base, **before}, {**base, **after}


def _ollama(before: dict[str, Any], after: dict[str, Any], **more: Any) -> Bodies:
    first, second = ({"model": "fake", "stream": False, "messages": [each], **more} for each in (before, after))
    return "/api/chat", first, second


def _infer(before: dict[str, Any], after: dict[str, Any]) -> Bodies:
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}
    first, second = ({"inputs": [{**text, **each}]} for each in (before, after))
    return "/v2/models/fake/infer", first, second


def _function(name: str, before: Any, after: Any, choice: str = "auto") -> Bodies:
    tools = ({"type": "function", "function": {**DEFINITION, name: value}} for value in (before, after))
    return _tool(next(tools), next(tools), choice)


STREAMED: dict[str, Any] = {"messages": [USER], "stream": True}
SPANS: dict[str, Any] = {"type": "structural_tag", "structures": [], "triggers": []}
SPAN = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}
LONGER = {**SCHEMA, "required": []}
ANY = {"type": "any", "disable_parallel_tool_use": False}
ANTHROPIC_TOOL: dict[str, Any] = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
SAID: dict[str, Any] = {"role": "assistant", "content": "Hello"}
OLLAMA_CALL: dict[str, Any] = {"function": {"name": "look", "arguments": {"a": 1}}}
RESPONSES_TOOL: dict[str, Any] = {"type": "function", **DEFINITION}
JSON: dict[str, Any] = {"type": "json_schema", "name": "a", "schema": SCHEMA}


def _responses_tool(**change: Any) -> Bodies:
    base = {"input": "Hi", "tool_choice": "required" if "strict" in change else "auto"}
    return RESPONSES, {**base, "tools": [RESPONSES_TOOL]}, {**base, "tools": [{**RESPONSES_TOOL, **change}]}


def _ollama_tool(change: dict[str, Any]) -> Bodies:
    tools = ([{"type": "function", "function": {**DEFINITION, **each}}] for each in ({}, change))
    base = {"model": "fake", "stream": False, "messages": [USER]}
    return "/api/chat", {**base, "tools": next(tools)}, {**base, "tools": next(tools)}


INSIDE: dict[str, dict[str, Bodies]] = {
    "openai.StreamOptions": {
        "include_usage": (CHAT, STREAMED, {**STREAMED, "stream_options": {"include_usage": True}}),
        "continuous_usage_stats": (
            CHAT,
            {**STREAMED, "stream_options": {"include_usage": True}},
            {**STREAMED, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
    },
    "openai.ResponseFormat": {
        "type": _form({"type": "text"}, {"type": "json_object"}),
        "json_schema": _form(
            {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
        ),
        "schema": _form({"type": "json_object"}, {"type": "json_object", "schema": SCHEMA}),
        "value": _form({"type": "json_object"}, {"type": "json_object", "value": SCHEMA}),
        "schema_": _form({"type": "json_object"}, {"type": "json_object", "schema_": SCHEMA}),
        "format": _form(SPANS, {**SPANS, "format": {"type": "json_schema", "json_schema": SCHEMA}}),
        "structures": _form(SPANS, {**SPANS, "structures": [SPAN]}),
        "triggers": _form(SPANS, {**SPANS, "triggers": ["<a"]}),
    },
    "openai.JsonSchemaFormat": {
        name: _form(
            {"type": "json_schema", "json_schema": {"name": "a", name: SCHEMA}},
            {"type": "json_schema", "json_schema": {"name": "a", name: LONGER}},
        )
        for name in ("schema", "schema_")
    },
    "openai.Message": {
        "role": _chat(USER, {**USER, "role": "system"}),
        "content": _chat(USER, {**USER, "content": "Ho"}),
        "name": _chat(USER, {**USER, "name": "Ann"}),
        "tool_calls": _chat(
            {"role": "assistant", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [CALL]}
        ),
        "tool_call_id": _chat({"role": "tool", "content": "x"}, {"role": "tool", "content": "x", "tool_call_id": "c1"}),
        "reasoning": _chat(SAID, {**SAID, "reasoning": "hm"}),
        "reasoning_content": _chat(SAID, {**SAID, "reasoning_content": "hm"}),
    },
    "openai.TextPart": {
        "type": _chat(
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [{"type": "thinking", "text": "a"}]},
        ),
        "text": _chat(
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
        ),
        "thinking": _chat(
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}]},
        ),
        "refusal": _chat(
            {"role": "user", "content": [{"type": "refusal", "refusal": "a"}]},
            {"role": "user", "content": [{"type": "refusal", "refusal": "b"}]},
        ),
    },
    "openai.ToolCall": {
        "id": _call({"id": "c1"}, {"id": "c2"}),
        "type": _call({"type": "function"}, {"type": "custom"}),
        "function": _call({}, {"function": {"name": "hear", "arguments": "{}"}}),
    },
    "openai.FunctionCall": {
        "name": _call({}, {"function": {"name": "hear", "arguments": "{}"}}),
        "arguments": _call({}, {"function": {"name": "look", "arguments": '{"a":1}'}}),
    },
    "openai.Tool": {"type": _tool(TOOL, {**TOOL, "type": "custom"}), "function": _tool(TOOL, OTHER)},
    "openai.FunctionDefinition": {
        "name": _function("name", "look", "hear"),
        "description": _function("description", "a", "b"),
        "parameters": _function("parameters", SCHEMA, LONGER),
        "strict": _function("strict", False, True),
    },
    "openai.ToolChoice": {
        "type": _choose(NAMED, {**NAMED, "type": "allowed_tools"}),
        "function": _choose(NAMED, {**NAMED, "function": {"name": "hear"}}),
        "allowed_tools": _choose(_allow(), _allow(mode="required")),
    },
    "openai.ChosenFunction": {"name": _choose(NAMED, {**NAMED, "function": {"name": "hear"}})},
    "openai.AllowedTools": {
        "mode": _choose(_allow(), _allow(mode="required")),
        "tools": _choose(_allow(mode="required"), _allow(mode="required", tools=[OTHER_NAMED])),
    },
    "openai.AllowedTool": {
        "type": _choose(_allow(), _allow(tools=[{**NAMED, "type": "custom"}])),
        "function": _choose(_allow(mode="required"), _allow(mode="required", tools=[OTHER_NAMED])),
    },
    "responses.ToolChoice": {
        "type": _pick({"name": "look"}, {"type": "custom", "name": "look"}),
        "name": _pick({"name": "look"}, {"name": "hear"}),
        "mode": _pick(FREELY, {**FREELY, "mode": "required"}),
        "tools": _pick({**FREELY, "mode": "required"}, {**FREELY, "mode": "required", "tools": [HEAR]}),
    },
    "responses.AllowedTool": {
        "type": _pick(FREELY, {**FREELY, "tools": [{"type": "custom", "name": "look"}]}),
        "name": _pick({**FREELY, "mode": "required"}, {**FREELY, "mode": "required", "tools": [HEAR]}),
    },
    "responses.Item": {
        "type": _item({"type": "message", **USER}, {"type": "reasoning", **USER, "content": []}),
        "role": _item(USER, {**USER, "role": "system"}),
        "content": _item(USER, {**USER, "content": "Ho"}),
        "name": _item(ITEM_CALL, {**ITEM_CALL, "name": "hear"}),
        "arguments": _item(ITEM_CALL, {**ITEM_CALL, "arguments": '{"a":1}'}),
        "call_id": _item(ITEM_CALL, {**ITEM_CALL, "call_id": "c2"}),
        "output": _item(
            {"type": "function_call_output", "call_id": "c1", "output": "a"},
            {"type": "function_call_output", "call_id": "c1", "output": "b"},
            ITEM_CALL,
        ),
        "encrypted_content": _item(
            {"type": "compaction", "encrypted_content": "a"}, {"type": "compaction", "encrypted_content": "b"}
        ),
    },
    "responses.ConversationName": {
        "id": (
            RESPONSES,
            {"conversation": {"id": "conv_x"}, "input": "a"},
            {"conversation": {"id": "no"}, "input": "a"},
        )
    },
    "responses.Part": {
        "type": _part({"type": "input_text", "text": "a"}, {"type": "input_image", "text": "a"}),
        "text": _part({"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}),
        "refusal": _part({"type": "refusal", "refusal": "a"}, {"type": "refusal", "refusal": "b"}),
    },
    "responses.Reasoning": {
        "effort": (RESPONSES, {"input": "Hi", "reasoning": {}}, {"input": "Hi", "reasoning": {"effort": "low"}})
    },
    "responses.Text": {"format": (RESPONSES, {"input": "Hi", "text": {}}, {"input": "Hi", "text": {"format": JSON}})},
    "responses.Format": {
        "type": (
            RESPONSES,
            {"input": "Hi", "text": {"format": {"type": "text"}}},
            {"input": "Hi", "text": {"format": {"type": "json_object"}}},
        ),
        "schema": (
            RESPONSES,
            {"input": "Hi", "text": {"format": JSON}},
            {"input": "Hi", "text": {"format": {**JSON, "schema": LONGER}}},
        ),
    },
    "responses.Tool": {
        "type": _responses_tool(type="web_search"),
        "name": _responses_tool(name="hear"),
        "description": _responses_tool(description="b"),
        "parameters": _responses_tool(parameters=LONGER),
        "strict": _responses_tool(strict=True),
    },
    "anthropic.Turn": {
        "role": _asked({}, {"messages": [{**USER, "role": "assistant"}]}),
        "content": _asked({}, {"messages": [{**USER, "content": "Ho"}]}),
    },
    "anthropic.Block": {
        "type": _said({"type": "text", "text": "a"}, {"type": "thinking", "text": "a"}),
        "text": _said({"type": "text", "text": "a"}, {"type": "text", "text": "b"}),
        "thinking": _said({"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": "b"}, "assistant"),
        "id": _said(USE, {**USE, "id": "c2"}, "assistant"),
        "name": _said(USE, {**USE, "name": "hear"}, "assistant"),
        "input": _said(USE, {**USE, "input": {"a": 2}}, "assistant"),
        "tool_use_id": _said(RESULT, {**RESULT, "tool_use_id": "c2"}),
        "content": _said(RESULT, {**RESULT, "content": "y"}),
    },
    "anthropic.ResultPart": {
        "type": _said(
            {**RESULT, "content": [{"type": "text", "text": "a"}]},
            {**RESULT, "content": [{"type": "image", "text": "a"}]},
        ),
        "text": _said(
            {**RESULT, "content": [{"type": "text", "text": "a"}]},
            {**RESULT, "content": [{"type": "text", "text": "b"}]},
        ),
    },
    "anthropic.Tool": {
        name: _asked({"tools": [ANTHROPIC_TOOL]}, {"tools": [{**ANTHROPIC_TOOL, name: value}]})
        for name, value in {"name": "hear", "description": "b", "input_schema": LONGER, "strict": True}.items()
    },
    "anthropic.ToolChoice": {
        "type": _asked(
            {"tools": [ANTHROPIC_TOOL], "tool_choice": ANY},
            {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "auto"}},
        ),
        "name": _asked(
            {
                "tools": [ANTHROPIC_TOOL, {**ANTHROPIC_TOOL, "name": "hear"}],
                "tool_choice": {"type": "tool", "name": "look"},
            },
            {
                "tools": [ANTHROPIC_TOOL, {**ANTHROPIC_TOOL, "name": "hear"}],
                "tool_choice": {"type": "tool", "name": "hear"},
            },
        ),
        "disable_parallel_tool_use": _asked(
            {"tools": [ANTHROPIC_TOOL], "tool_choice": ANY},
            {"tools": [ANTHROPIC_TOOL], "tool_choice": {**ANY, "disable_parallel_tool_use": True}},
        ),
    },
    "anthropic.Thinking": {
        "type": _asked({"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}),
        "budget_tokens": _asked(
            {"thinking": {"type": "enabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 3}}
        ),
    },
    "anthropic.OutputConfig": {
        "effort": _asked({"output_config": {"effort": "low"}}, {"output_config": {"effort": "high"}}),
        "format": _asked({}, {"output_config": {"format": JSON}}),
    },
    "anthropic.OutputFormat": {
        "type": _asked({"output_config": {"format": JSON}}, {"output_config": {"format": {**JSON, "type": "regex"}}}),
        "schema": _asked(
            {"output_config": {"format": JSON}}, {"output_config": {"format": {**JSON, "schema": LONGER}}}
        ),
    },
    "ollama.Message": {
        "role": _ollama(USER, {**USER, "role": "system"}),
        "content": _ollama(USER, {**USER, "content": "Ho"}),
        "thinking": _ollama(SAID, {**SAID, "thinking": "hm"}),
        "tool_calls": _ollama(SAID, {**SAID, "tool_calls": [OLLAMA_CALL]}),
        "tool_name": _ollama(USER, {**USER, "tool_name": "look"}),
        "tool_call_id": _ollama({**USER, "role": "tool"}, {**USER, "role": "tool", "tool_call_id": "c1"}),
    },
    "ollama.StoredMessage": {
        name: (
            "/api/create",
            {"model": "mine", "from": "weights", "stream": False, "messages": [USER]},
            {"model": "mine", "from": "weights", "stream": False, "messages": [{**USER, name: value}]},
        )
        for name, value in {"role": "assistant", "content": "Ho"}.items()
    },
    "ollama.Call": {
        "id": _ollama(
            {**SAID, "tool_calls": [{**OLLAMA_CALL, "id": "a"}]}, {**SAID, "tool_calls": [{**OLLAMA_CALL, "id": "b"}]}
        ),
        "function": _ollama(
            {**SAID, "tool_calls": [OLLAMA_CALL]}, {**SAID, "tool_calls": [{"function": {"name": "hear"}}]}
        ),
    },
    "ollama.Function": {
        "name": _ollama(
            {**SAID, "tool_calls": [{"function": {"name": "look"}}]},
            {**SAID, "tool_calls": [{"function": {"name": "hear"}}]},
        ),
        "arguments": _ollama(
            {**SAID, "tool_calls": [OLLAMA_CALL]}, {**SAID, "tool_calls": [{"function": {"name": "look"}}]}
        ),
    },
    "ollama.Tool": {
        "type": _ollama(USER, USER, tools=[TOOL])[:1]
        + (
            {"model": "fake", "stream": False, "messages": [USER], "tools": [TOOL]},
            {"model": "fake", "stream": False, "messages": [USER], "tools": [{**TOOL, "type": "custom"}]},
        ),
        "function": _ollama_tool({"name": "hear"}),
    },
    "ollama.FunctionDefinition": {
        name: _ollama_tool({name: value})
        for name, value in {"name": "hear", "description": "b", "parameters": LONGER, "strict": True}.items()
    },
    "tgi.Grammar": {
        name: (
            "/generate",
            {"inputs": "Hi", "parameters": {"grammar": {"type": "regex", "value": "a"}}},
            {"inputs": "Hi", "parameters": {"grammar": {"type": "regex", "value": "a", name: value}}},
        )
        for name, value in {"type": "json", "value": "b"}.items()
    },
    "scoring.Document": {
        "text": ("/rerank", {"query": "a", "documents": [{"text": "a"}]}, {"query": "a", "documents": [{"text": "b"}]})
    },
    "llamacpp.TextObject": {
        "prompt_string": (
            "/completion",
            {"prompt": {"prompt_string": "Hi"}},
            {"prompt": {"prompt_string": "Hello"}},
        )
    },
    "llamacpp.Snippet": {name: _infill({name: "a"}, {name: "b"}) for name in ("text", "filename")},
    "llamacpp.Scaled": {
        name: ("/completion", {"prompt": "Hi", "lora": [first]}, {"prompt": "Hi", "lora": [second]})
        for name, first, second in (
            ("id", {"id": 0}, {"id": 1}),
            ("scale", {"id": 0, "scale": 1.0}, {"id": 0, "scale": 0.0}),
        )
    },
    "scoring.Sentences": {
        name: ("/similarity", _near({}), _near({name: value}))
        for name, value in {"source_sentence": "c", "sentences": ["b", "c"]}.items()
    },
    "kserve.Tensor": {
        "name": _infer({}, {"name": "seed"}),
        "datatype": _infer({}, {"datatype": "INT32"}),
        "data": _infer({}, {"data": ["Ho"]}),
    },
    "kserve.Output": {
        "name": (
            "/v2/models/fake/infer",
            _infer({}, {})[1],
            {**_infer({}, {})[1], "outputs": [{"name": "finish_reason"}]},
        )
    },
    "responses.StreamOptions": {},
}
