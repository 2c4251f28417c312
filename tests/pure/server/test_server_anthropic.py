"""Anthropic's Messages API over fake engines."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tokenmill.testing.fake_generator import FakeOptions

CALL = '<think>It asks.</think>Well.<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
HI = {"model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


def events(answer) -> list[dict]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for part in answer.text.strip().split("\n\n"):
        head, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {found[-1]['type']}"
    return found


def rebuilt(found: list[dict]) -> list[dict]:
    """Content blocks from a stream, as the client does it."""
    blocks, arguments = [], ""
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            arguments += delta.get("partial_json", "")
            for name in ("text", "thinking"):
                if name in delta:
                    blocks[-1][name] += delta[name]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments)
    return blocks


async def test_streams_and_wholes_have_the_same_blocks_in_anthropics_order(start):
    served = await start(FakeOptions(script=CALL), **PARSERS)
    body = {**HI, "tools": [TOOL]}
    whole = (await served.post("/v1/messages", body)).json()
    found = events(await served.post("/v1/messages", {**body, "stream": True}))
    assert [b["type"] for b in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"at": "sky"} and whole["stop_reason"] == "tool_use"
    assert whole["content"][2]["id"].startswith("toolu_")
    strip = [{k: v for k, v in block.items() if k != "id"} for block in rebuilt(found)]
    assert strip == [{k: v for k, v in block.items() if k != "id"} for block in whole["content"]]
    kinds = [e["type"] for e in found if e["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", "ping", *block, *block, *block, "message_delta", "message_stop"]
    last = found[-2]
    assert (last["delta"]["stop_reason"], last["delta"]["stop_sequence"]) == ("tool_use", None)
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0


async def test_why_it_stopped(start):
    served = await start(FakeOptions(script="abcdef"))
    for change, reason, sequence in (
        ({}, "end_turn", None), ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["d"]}, "stop_sequence", "d"),
    ):  # fmt: skip
        found = (await served.post("/v1/messages", {**HI, **change})).json()
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


async def test_counting_is_what_is_computed(start):
    served = await start(FakeOptions(script="a"))
    body = {**HI, "system": [{"type": "text", "text": "Be brief."}]}
    counted = (await served.post("/v1/messages/count_tokens", body)).json()["input_tokens"]
    usage = (await served.post("/v1/messages", body)).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted > 20


async def test_conversations_with_tools_become_messages(start):
    served = await start(FakeOptions(script="Blue."), **PARSERS)
    talk = [
        {"role": "user", "content": "What do you see?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "blue"}]},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    found = (await served.post("/v1/messages", {**HI, "messages": talk, "tools": [TOOL]})).json()
    assert found["content"] == [{"type": "text", "text": "Blue.", "citations": None}]


@pytest.mark.parametrize(("change", "status", "kind"), [
    ({"max_tokens": 0}, 400, "invalid_request_error"),
    ({"model": "nope"}, 404, "not_found_error"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
    ({"tools": [{"name": "x", "type": "web_search_20250305"}]}, 400, "invalid_request_error"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, 400, "invalid_request_error"),
    ({"output_config": {"format": {"type": "xml"}}}, 400, "invalid_request_error"),
    ({"messages": []}, 400, "invalid_request_error"),
])  # fmt: skip
async def test_errors_have_anthropics_shape(start, change, status, kind):
    served = await start(**PARSERS)
    answer = await served.post("/v1/messages", {**HI, **change})
    assert answer.status_code == status
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert served.context.gate.open == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_calls_and_results_that_do_not_belong_are_refused_in_anthropics_words(start, path):
    served = await start()
    call, result = {"type": "tool_use", "id": "t1", "name": "look"}, {"type": "tool_result", "tool_use_id": "t1"}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [call]}]
    for block, status, word in (
        (result, 200, ""),
        ({**result, "tool_use_id": "t2"}, 400, "messages.2.content.1: unexpected `tool_use_id` found in `tool_result`"),
        ({"type": "tool_result"}, 400, "messages.2.content.1.tool_use_id: Field required"),
    ):
        talk = [*turns, {"role": "user", "content": [{"type": "text", "text": "So?"}, block]}]
        answer = await served.post(path, {**HI, "messages": talk})
        assert answer.status_code == status and word in answer.text, answer.text
    for field in ("id", "name"):
        turns[1] = {"role": "assistant", "content": [{key: call[key] for key in call if key != field}]}
        answer = await served.post(path, {**HI, "messages": [*turns, {"role": "user", "content": [result]}]})
        assert answer.status_code == 400 and f"messages.1.content.0.{field}: Field required" in answer.text


async def test_keys_are_taken_from_its_header_and_refused_in_its_shape(start):
    served = await start(api_key=["secret"])
    refused = await served.post("/v1/messages", HI)
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert (await served.client.post("/v1/messages", json=HI, headers={"x-api-key": "secret"})).status_code == 200


ANTHROPIC = {"anthropic-version": "2023-06-01"}


async def test_models_come_in_the_shape_of_whoever_asks(start):
    served = await start()
    served.fake.fleet._info = dataclasses.replace(served.fake.fleet.info, names=("a", "b", "c"))

    async def asked(query, status=200, **headers):
        answer = await served.client.get(f"/v1/models{query}", headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    usual = await asked("")
    assert usual["object"] == "list" and usual["data"][0]["object"] == "model"
    all_ = await asked("", **ANTHROPIC)
    assert [m["id"] for m in all_["data"]] == ["a", "b", "c"] and all_["data"][0]["type"] == "model"
    assert (all_["first_id"], all_["last_id"], all_["has_more"]) == ("a", "c", False)
    for query, names, more in (
        ("?limit=2", "ab", True), ("?after_id=a", "bc", False), ("?after_id=a&limit=1", "b", True),
        ("?before_id=c&limit=1", "b", True), ("?before_id=c", "ab", False), ("?after_id=c", "", False),
    ):  # fmt: skip
        found = await asked(query, **ANTHROPIC)
        assert "".join(m["id"] for m in found["data"]) == names and found["has_more"] is more, query
    assert await asked("/b", **ANTHROPIC) == all_["data"][1] and (await asked("/b"))["object"] == "model"
    wrong = await asked("/nope", 404, **ANTHROPIC)
    assert wrong["type"] == "error" and wrong["error"]["type"] == "not_found_error"
    assert "code" in (await asked("/nope", 404))["error"]
    for query in ("?limit=0", "?limit=1001", "?after_id=x", "?before_id=x", "?after_id=a&before_id=b"):
        assert (await asked(query, 400, **ANTHROPIC))["error"]["type"] == "invalid_request_error"


async def test_a_missing_key_is_worded_for_whoever_asks(start):
    served = await start(api_key=["k"])
    refused = await served.client.get("/v1/models", headers=ANTHROPIC)
    assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert "code" in (await served.client.get("/v1/models")).json()["error"]
    other = await served.client.get("/v1/chat/completions", headers=ANTHROPIC)
    assert other.status_code == 401 and "code" in other.json()["error"]
