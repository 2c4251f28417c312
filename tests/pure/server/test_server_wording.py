"""What is wrong is said of the field that it came in, and of the branch that was meant."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.server.conftest import Starter
from tests.pure.server.server_fields_done_helpers import BASES, UNDER
from tokenmill.core.errors import ParameterError
from tokenmill.server.request_rules import ALIASES

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
MCP = {"type": "mcp", "server_label": "a", "server_url": "http://a"}
EMPTY_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ANTHROPIC = {"messages": HELLO, "max_tokens": 4, "model": "fake"}
INFER = "/v2/models/fake/infer"
FORM = {"type": "json_object"}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
CALLS = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
CLAUDE = {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}}

CALLED = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
THOUGHT = {"type": "thinking", "thinking": "a", "signature": ""}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "b"}


def tensor(**more: Any) -> dict[str, Any]:
    return {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once"], **more}


def number(**more: Any) -> dict[str, Any]:
    return {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [3], **more}


SAID = [
    # A union's branch that came furthest is the one that is told.
    (CHAT, {"messages": HELLO, "stop": ["a"] * 17}, "stop: List should have at most 16 items"),
    (CHAT, {"messages": HELLO, "stop": [None]}, "stop.0: Input should be a valid string"),
    (CHAT, {"messages": HELLO, "stop": 5}, "stop: Input should be a valid string, or a valid list"),
    (CHAT, {"messages": HELLO, "stop": ""}, "stop: String should have at least 1 character."),
    (TEXT, {"prompt": []}, "prompt: List should have at least 1 item"),
    (TEXT, {"prompt": [-1]}, "prompt.0: Input should be greater than or equal to 0"),
    (TEXT, {"prompt": ["a", ""]}, "prompt.1: String should have at least 1 character."),
    (TEXT, {"prompt": 5}, "prompt: Input should be a valid string, or a valid list."),
    ("/v1/embeddings", {"input": ["a", 5]}, "input.1: "),
    ("/v1/embeddings", {"input": ["a"] * 3000}, "input: List should have at most 2048 items"),
    # A part without its text would be read as nothing.
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}, "type text needs text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "refusal"}]}]}, "needs refusal"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}]}, "text has no effect with"),
    (MESSAGES, {**ANTHROPIC, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, "type text needs text"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "needs a text"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": {}}]}]}, "needs a text"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "a"}]}, "input.0.output is missing"),
    (RESPONSES, {"input": "a", "conversation": {}}, "conversation.id: Field required."),
    (CHAT, {"n": 0}, " (and 1 more)."),
    ("/v1/embeddings", {"messages": HELLO}, "messages is not supported in this version: a vector is that of a text"),
    # What only the assistant or a tool has would be read as nothing from others.
    *(
        (
            CHAT,
            {"messages": [{"role": role, "content": "a", **more}]},
            f"{next(iter(more))} has no effect in a message of",
        )
        for role, more in (
            ("user", {"tool_calls": CALLED}),
            ("tool", {"reasoning": "b"}),
            ("system", {"reasoning_content": "b"}),
            ("user", {"tool_call_id": "b"}),
            ("assistant", {"tool_call_id": "b"}),
        )
    ),
    (CHAT, {"messages": [{"role": "user", "content": [THOUGHT, {"type": "text", "text": "a"}]}]}, "thinking has no"),
    ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "a", "thinking": "b"}]}, "no effect in"),
    (
        MESSAGES,
        {**ANTHROPIC, "messages": [{"role": "user", "content": [USE]}]},
        "`tool_use` blocks can only be in `ass",
    ),
    (MESSAGES, {**ANTHROPIC, "messages": [{"role": "user", "content": [THOUGHT]}]}, "`thinking` blocks can only be in"),
    (
        MESSAGES,
        {**ANTHROPIC, "messages": [{"role": "assistant", "content": [USE, RESULT]}, *HELLO]},
        "messages.0.content.1: `tool_result` blocks can only be in `user` messages",
    ),
    # What came is named in the words of JSON.
    (RESPONSES, {"input": [{"type": 1}]}, "Items of type a number are not"),
    (RESPONSES, {"input": [{"role": "user", "content": [{}]}]}, "Content of type null is not"),
    (RESPONSES, {"input": "a", "tools": [{"type": []}]}, "Tools of type a list are not"),
    (RESPONSES, {"input": "a", "tools": [{"type": True}]}, "Tools of type a boolean are not"),
    # A tool of another kind is refused by its type, in every API, whatever its other fields are.
    (CHAT, {"messages": HELLO, "tools": [MCP]}, "tools.0: Tools of type 'mcp' are not"),
    (RESPONSES, {"input": "a", "tools": [EMPTY_TOOL, MCP]}, "tools.1: Tools of type 'mcp' are not"),
    ("/api/chat", {"model": "fake", "messages": HELLO, "tools": [MCP]}, "tools.0: Tools of type 'mcp' are not"),
    (MESSAGES, {**ANTHROPIC, "tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]}, "of type 'mcp_toolset' are"),
    (MESSAGES, {**ANTHROPIC, "tools": [{**CLAUDE_TOOL, "type": "bash_20250124"}]}, "of type 'bash_20250124' ar"),
    # The field that asks for many outputs is blamed for them.
    (TEXT, {"prompt": "a", "best_of": 3, "temperature": 0}, "best_of = 3 greedy samples"),
    (CHAT, {"messages": HELLO, "best_of": 3, "n": 2, "temperature": 0}, "best_of = 3 greedy samples"),
    (CHAT, {"messages": HELLO, "best_of": 3, "n": 3, "temperature": 0}, "n = 3 greedy samples"),
    # Fields have their own API's names.
    (RESPONSES, {"input": "a", "text": {"format": {"type": "x"}}}, "text.format.type: "),
    (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}, "tools.0.name: Field required"),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_x"}, "Response with id 'resp_x' not found"),
    (MESSAGES, {**ANTHROPIC, "stop_sequences": ["a"] * 17}, "stop_sequences: List should have at most 16"),
    ("/api/generate", {"model": "fake", "prompt": "a", "options": {"stop": ["a"] * 17}}, "options.stop: List"),
    ("/generate", {"inputs": "a", "parameters": {"stop": ["a"] * 17}}, "parameters.stop: List should"),
    # A wish for tools that are not there is no wish for text.
    (RESPONSES, {"input": "a", "tool_choice": "required"}, "tool_choice needs tools"),
    (RESPONSES, {"input": "a", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice needs tools"),
    (MESSAGES, {**ANTHROPIC, "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    (MESSAGES, {**ANTHROPIC, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice needs tools"),
    # A control token is no part of a name, be the call asked for or not.
    (CHAT, {**CALLS, "tools": [{"type": "function", "function": {"name": "a<|im_end|>"}}]}, "<|im_end|> is a control"),
    (RESPONSES, {"input": "a", "tools": [{**EMPTY_TOOL, "name": "<|im_start|>"}]}, "<|im_start|> is a control"),
    # A call that is asked for leaves no place for another structure.
    (CHAT, {**CALLS, "response_format": FORM}, "response_format has no effect here: tool_choice asks for a call"),
    (CHAT, {**CALLS, "tool_choice": NAMED, "guided_regex": "a"}, "guided_regex has no effect here"),
    (CHAT, {**CALLS, "tool_choice": ALLOWED, "structured_outputs": {"choice": ["a"]}}, "structured_outputs has no"),
    (
        RESPONSES,
        {"input": "a", "tools": [EMPTY_TOOL], "tool_choice": "required", "text": {"format": SCHEMA}},
        "text.format has no effect here",
    ),
    (MESSAGES, {**ANTHROPIC, "output_config": {"effort": "huge"}}, "output_config.effort: Input should be"),
    (MESSAGES, {**ANTHROPIC, "output_config": {"effort": 5}}, "output_config.effort: Input should be"),
    (
        MESSAGES,
        {**ANTHROPIC, **CLAUDE, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_config.format has no effect here",
    ),
    (TEXT, {"prompt": "a", "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern has no effect without"),
    # A tensor holds what it says.
    (INFER, {"inputs": [tensor(shape=[2])]}, "shape"),
    (INFER, {"inputs": [tensor(shape=[10**12])]}, "shape"),
    (INFER, {"inputs": [tensor(datatype="UTF8")]}, "datatype 'UTF8'"),
    (INFER, {"inputs": [tensor(), tensor()]}, "'text_input' twice"),
    (INFER, {"inputs": [tensor(), number(datatype="INT8", data=[300])]}, "not of its datatype INT8"),
    (INFER, {"inputs": [tensor(), number(data=[True])]}, "not of its datatype INT32"),
    (INFER, {"inputs": [tensor()], "outputs": [{"name": "x"}]}, "There is no output 'x'"),
    ("/detokenize", {"tokens": [10**9]}, "out of vocabulary"),
    ("/api/embeddings", {"model": "fake", "prompt": 5}, "prompt: "),
    (CHAT, {"messages": HELLO, "response_format": {"type": "regex"}}, "response_format regex needs a pattern in value"),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json", "value": "a"}},
        "response_format json needs a schema in value",
    ),
    (
        CHAT,
        {"messages": HELLO, "response_format": {"type": "json", "value": {}, "schema": {}}},
        "schema or value, not both",
    ),
    (CHAT, {"messages": HELLO, "response_format": {"type": "text", "value": {"a": 1}}}, "response_format.value"),
    (CHAT, {"messages": HELLO, "tools": [{"function": {"name": "see"}}], "tool_choice": "look"}, "or an object"),
    (MESSAGES, {**ANTHROPIC, "thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens has no"),
    ("/api/generate", {"model": "fake", "prompt": "a", "top_logprobs": 2}, "top_logprobs needs logprobs"),
    *(
        (
            "/api/generate",
            {"model": "fake", "prompt": "a", "raw": True, name: value},
            f"{name} has no effect in raw mode",
        )
        for name, value in (("system", "x"), ("think", True))
    ),
    *(
        ("/api/generate", {"model": "fake", "prompt": "a", "options": {"num_predict": most}}, "num_predict must be")
        for most in (0, -3)
    ),
    # The prompt is called as it came, in the sentence too.
    ("/v1/embeddings", {"input": [10**9]}, "input holds token id"),
    ("/embedding", {"content": [10**9]}, "content holds token id"),
]


@pytest.mark.parametrize(("path", "body", "said"), SAID, ids=str)
async def test_a_refusal_says_what_the_caller_wrote(start: Starter, path: str, body: Any, said: str) -> None:
    served = await start()
    answer = await served.post(path, body)
    assert answer.status_code in (400, 404) and "\n" not in answer.text.strip()
    found = answer.json()["error"]
    message = found if isinstance(found, str) else found["message"]
    assert said in message, message


@pytest.mark.parametrize("object_name", ALIASES)
async def test_a_field_is_called_by_the_spelling_that_came(start: Starter, object_name: str) -> None:
    served = await start()
    path, body = BASES.get(object_name, ("/score", {"text_1": "a", "text_2": "b"}))
    for alias, field in ALIASES[object_name].items():
        asked = {name: value for name, value in body.items() if name not in (alias, field)}
        under = UNDER.get(object_name)
        answer = await served.post(path, {**asked, **({under: {alias: {}}} if under else {alias: {}})})
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert answer.status_code == 400 and alias in message and field not in message.replace(alias, ""), message
        assert isinstance(error, str) or error.get("param", alias) == alias


async def test_limits_of_the_server_are_said_of_the_spelling_that_came(start: Starter) -> None:
    served = await start()
    for path, body, name in (
        ("/completion", {"prompt": "a", "n_predict": -3}, "n_predict"),
        ("/completion", {"prompt": "a", "n_probs": 21}, "n_probs"),
        (TEXT, {"prompt": "a", "stop_sequences": ["a"] * 17}, "stop_sequences"),
    ):
        error = (await served.post(path, body)).json()["error"]
        assert error["message"].startswith(name) and error["param"] == name


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": "a", "conversation": "conv_none"}, "conversation"),
        ({"input": "a", "tools": [{**EMPTY_TOOL, "name": ""}]}, "tools.0.name"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}}, "text.format.schema"),
    ],
    ids=str,
)
async def test_param_is_a_field_of_the_request(start: Starter, body: Any, param: str) -> None:
    served = await start()
    answer = await served.post(RESPONSES, body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param


TREE = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
STRICT = {"type": "function", "name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (TEXT, {"prompt": "a", "guided_regex": "a"}, "guided_regex"),
        (TEXT, {"prompt": "a", "ebnf": "x"}, "ebnf"),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {"messages": HELLO, "guided_choice": ["a"]}, "guided_choice"),
        (CHAT, {"messages": HELLO, "response_format": TREE}, "response_format"),
        (CHAT, CALLS, "tools"),
        (RESPONSES, {"input": "a", "text": {"format": SCHEMA}}, "text.format"),
        (RESPONSES, {"input": "a", "tools": [STRICT], "tool_choice": "required"}, "tools"),
        (MESSAGES, {**ANTHROPIC, **CLAUDE}, "tools"),
        ("/completion", {"prompt": "a", "json_schema": {}}, "json_schema"),
        ("/api/generate", {"model": "fake", "prompt": "a", "format": {}}, "format"),
        (
            "/generate",
            {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "a"}}},
            "parameters.grammar",
        ),
    ],
    ids=str,
)
async def test_a_bad_structure_is_told_of_by_its_field(
    start: Starter, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, said: str
) -> None:
    async def refuse(request: Any, *_: Any) -> None:
        assert request.params.structured_outputs
        raise ParameterError("structured_outputs: it cannot be.", param="structured_outputs")

    served = await start()
    monkeypatch.setattr(served.context.backend, "open", refuse)
    answer = await served.post(path, body)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert answer.status_code == 400 and message == f"{said}: it cannot be."
    assert isinstance(error, str) or error.get("param", said) == said


async def test_what_a_template_refuses_is_wrong_with_the_messages(start: Starter) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    served = await start()
    for path in (CHAT, "/apply-template"):
        answer = await served.post(path, {"messages": talk, "continue_final_message": True})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages", answer.text


async def test_tensors_of_every_kind_are_read(start: Starter) -> None:
    served = await start()
    more = [number(datatype="UINT8"), number(name="temperature", datatype="FP32", data=[0])]
    for given in (tensor(), tensor(shape=[1, 1], data=[["Once"]]), tensor(shape=[])):
        answer = await served.post(INFER, {"inputs": [given, *more], "outputs": [{"name": "finish_reason"}]})
        assert answer.status_code == 200, answer.text
        assert [each["name"] for each in answer.json()["outputs"]] == ["finish_reason"]


async def test_the_log_probabilities_of_a_chat_have_all_their_fields(start: Starter) -> None:
    served = await start()
    answer = await served.post(CHAT, {"messages": HELLO, "max_tokens": 2, "logprobs": True})
    assert answer.json()["choices"][0]["logprobs"].keys() == {"content", "refusal"}


async def test_a_byte_order_mark_is_no_part_of_a_body(start: Starter) -> None:
    served = await start()
    body = b"\xef\xbb\xbf" + b'{"prompt": "a", "max_tokens": 2}'
    answer = await served.client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200


async def test_a_structure_goes_with_tools_where_it_has_an_effect(start: Starter) -> None:
    served = await start(tool_call_parser="hermes")
    assert (await served.post(CHAT, {**CALLS, "tool_choice": "none", "guided_choice": ["ab"]})).status_code == 200
    for more in ({"guided_choice": ["ab"], "tool_choice": "auto"}, {"response_format": {"type": "text"}}, {}):
        answer = await served.post(CHAT, {**CALLS, **more})
        assert "this engine enforces choice only" in answer.text  # it went on to the engine, which is none
