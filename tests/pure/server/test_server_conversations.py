"""Conversations, counts and compaction of the Responses API."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

from tests.pure.server.conftest import Served, Starter, until
from tokenmill.server.openai.stored.kept_chats import KeptChat
from tokenmill.server.responses.conversation import Conversation
from tokenmill.server.responses.conversation_items import SUMMARY, full_items, messages_of
from tokenmill.server.store import Kept, Store
from tokenmill.testing.fake_generator import FakeOptions

PATH, RESPONSES = "/v1/conversations", "/v1/responses"


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


async def items_of(served: Served, name: str, query: str = "order=asc") -> list[dict[str, Any]]:
    answer = await served.client.get(f"{PATH}/{name}/items?{query}")
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def texts(items: list[dict[str, Any]]) -> list[str]:
    return ["".join(part["text"] for part in item["content"]) for item in items]


async def test_a_conversation_is_made_changed_and_forgotten(start: Starter) -> None:
    served = await start()
    made = (await served.post(PATH, {"items": [said("One")], "metadata": {"a": "b"}})).json()
    assert made["object"] == "conversation" and made["metadata"] == {"a": "b"} and made["id"].startswith("conv_")
    one = f"{PATH}/{made['id']}"
    assert (await served.client.get(one)).json() == made
    assert (await served.post(one, {"metadata": {}})).json()["metadata"] == {}
    added = (await served.post(f"{one}/items", {"items": [said("Two"), said("Three", "assistant")]})).json()
    assert texts(added["data"]) == ["Two", "Three"] and added["last_id"] == added["data"][-1]["id"]
    item = added["data"][0]
    assert (await served.client.get(f"{one}/items/{item['id']}")).json() == item
    assert (await served.client.delete(f"{one}/items/{item['id']}")).json()["object"] == "conversation"
    assert (await served.client.get(f"{one}/items/{item['id']}")).status_code == 404
    assert texts(await items_of(served, made["id"])) == ["One", "Three"]
    gone = (await served.client.delete(one)).json()
    assert gone == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    for path in (one, f"{one}/items"):
        assert (await served.client.get(path)).status_code == 404
    assert (await served.post(f"{one}/items", {"items": [said("x")]})).status_code == 404


async def test_a_response_goes_on_with_a_conversation_and_adds_to_it(start: Starter) -> None:
    served = await start(FakeOptions(script="Blue."))
    name = (await served.post(PATH, {"items": [said("Be brief.", "system")]})).json()["id"]
    for form in (name, {"id": name}):
        made = (await served.post(RESPONSES, {"input": "Why?", "conversation": form, "store": False})).json()
        assert made["conversation"] == {"id": name} and made["status"] == "completed"
    assert texts(await items_of(served, name)) == ["Be brief.", "Why?", "Blue.", "Why?", "Blue."]
    alone = (await served.post(RESPONSES, {"input": "Why?"})).json()["usage"]["input_tokens"]
    more = (await served.post(RESPONSES, {"conversation": name})).json()["usage"]["input_tokens"]
    assert more > alone
    streamed = (await served.post(RESPONSES, {"input": "So?", "conversation": name, "stream": True})).text
    assert "response.completed" in streamed and texts(await items_of(served, name))[-2:] == ["So?", "Blue."]
    held = served.context.store.find(Conversation, name, "anonymous")
    assert held.told == sum(len(data) + 256 for data in held.items.values()) and not held.busy
    assert held.weight == held.size


async def test_what_fails_adds_nothing_and_what_is_written_to_stays(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.01))
    name = (await served.post(PATH, {"items": [said("One")]})).json()["id"]
    held = served.context.store.find(Conversation, name, "anonymous")
    late = {"input": "x", "conversation": name, "timeout": 0.05, "max_output_tokens": 2000}
    waiting = asyncio.get_running_loop().create_task(served.post(RESPONSES, late))
    await until(lambda: held.busy or waiting.done())
    assert (await waiting).status_code == 408
    assert not held.busy and len(held.items) == 1
    refused = await served.post(RESPONSES, {"conversation": name, "input": [{"type": "item_reference", "id": "x"}]})
    assert refused.status_code == 400 and not held.busy


async def test_items_come_in_pages(start: Starter) -> None:
    served = await start()
    name = (await served.post(PATH, {"items": [said(str(i)) for i in range(5)]})).json()["id"]
    newest = (await served.client.get(f"{PATH}/{name}/items?limit=2")).json()
    assert texts(newest["data"]) == ["4", "3"] and newest["has_more"]
    rest = (await served.client.get(f"{PATH}/{name}/items?after={newest['last_id']}")).json()
    assert texts(rest["data"]) == ["2", "1", "0"] and not rest["has_more"]
    assert (await served.client.get(f"{PATH}/{name}/items?after={'x' * 5000}")).status_code == 404
    response = (await served.post(RESPONSES, {"input": [said("a"), said("b"), said("c")]})).json()["id"]
    page = (await served.client.get(f"{RESPONSES}/{response}/input_items?order=asc&limit=1")).json()
    assert texts(page["data"]) == ["a"] and page["has_more"]
    again = (await served.client.get(f"{RESPONSES}/{response}/input_items?after={page['last_id']}&order=asc")).json()
    assert texts(again["data"]) == ["b", "c"]


async def test_other_keys_see_no_conversation(start: Starter) -> None:
    served = await start(api_key=["one", "two"])
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    name = (await served.client.post(PATH, json={"items": [said("x")]}, headers=mine)).json()["id"]
    for method, path, body in (
        ("GET", name, None), ("DELETE", name, None), ("POST", name, {"metadata": {}}), ("GET", f"{name}/items", None),
        ("POST", f"{name}/items", {"items": [said("x")]}),
    ):  # fmt: skip
        answer = await served.client.request(method, f"{PATH}/{path}", json=body, headers=yours)
        assert answer.status_code == 404
    body = {"input": "x", "conversation": name}
    assert (await served.client.post(RESPONSES, json=body, headers=yours)).status_code == 404
    assert (await served.client.post(RESPONSES, json=body, headers=mine)).status_code == 200


@pytest.mark.parametrize(("path", "body", "param"), [
    (PATH, {"items": [said("x")] * 21}, "items"), (PATH, {"items": [{"type": "web_search_call"}]}, "items.0"),
    (PATH, {"items": [said("x"), {"role": 1}]}, "items.1.role"), (PATH, {"items": [1]}, "items.0"),
    (PATH, {"items": [said("x", "x" * 99)]}, "items.0.role"), (PATH, {"items": [said("x", "")]}, "items.0.role"),
    (f"{PATH}/conv_x/items", {}, "items"), (f"{PATH}/conv_x/items", {"items": []}, "items"),
    (f"{PATH}/conv_x", {}, "metadata"), (PATH, {"metadata": {"a": 1}}, "metadata.a"),
    (RESPONSES, {"conversation": 3, "input": "x"}, "conversation"), (RESPONSES, {"conversation": "conv_e"}, "input"),
    (f"{RESPONSES}/input_tokens", {}, "input"), (f"{RESPONSES}/compact", {}, "input"),
])  # fmt: skip
async def test_what_is_wrong_is_named(start: Starter, path: str, body: Any, param: str) -> None:
    served = await start()
    served.context.store.add(Conversation("anonymous", "conv_e"))
    answer = await served.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text
    assert served.context.gate.open == 0


async def test_a_conversation_has_ceilings(start: Starter) -> None:
    served = await start()
    served.context.store.most_bytes = 40_000
    name = (await served.post(PATH, {"items": [said("x")]})).json()["id"]
    for _ in range(3):
        assert (await served.post(f"{PATH}/{name}/items", {"items": [said("y" * 10_000)]})).status_code == 200
    full = {"items": [said("y" * 10_000)]}
    assert (await served.post(f"{PATH}/{name}/items", full)).status_code == 400
    assert (await served.post(RESPONSES, {"input": "z" * 10_000, "conversation": name})).status_code == 400
    held = served.context.store.find(Conversation, name, "anonymous")
    held.items |= {str(i): b"{}" for i in range(8190)}
    assert (await served.post(f"{PATH}/{name}/items", {"items": [said("a")]})).status_code == 400


async def test_input_is_counted_as_it_is_answered(start: Starter) -> None:
    served = await start()
    name = (await served.post(PATH, {"items": [said("One"), said("Two", "assistant")]})).json()["id"]
    first = (await served.post(RESPONSES, {"input": "Hi", "max_output_tokens": 3})).json()["id"]
    for body in (
        {"input": "Hi"}, {"input": "Hi", "instructions": "Be brief."}, {"input": "So", "conversation": name},
        {"input": [said("a"), said("b", "assistant")]}, {"input": "So", "previous_response_id": first},
    ):  # fmt: skip
        counted = (await served.post(f"{RESPONSES}/input_tokens", body)).json()
        whole = {**body, "store": False, "max_output_tokens": 2}
        answered = (await served.post(RESPONSES, whole)).json()
        assert "usage" in answered, (body, answered)
        assert counted == {"object": "response.input_tokens", "input_tokens": answered["usage"]["input_tokens"]}


async def test_a_long_conversation_becomes_short(start: Starter) -> None:
    served = await start(FakeOptions(script="They like blue."))
    talk = [said("Be brief.", "developer"), said("I like blue." * 20), said("Fine.", "assistant")]
    short = (await served.post(f"{RESPONSES}/compact", {"input": talk, "instructions": "Be kind."})).json()
    assert short["object"] == "response.compaction" and short["usage"]["output_tokens"] > 0
    assert [item["type"] for item in short["output"]] == ["message", "compaction"]
    assert short["output"][0]["role"] == "developer" and short["output"][1]["encrypted_content"] == "They like blue."
    messages = messages_of([*short["output"], said("Which colour?")])
    assert messages[1:] == [{"role": "user", "content": f"{SUMMARY}They like blue.\n\nWhich colour?"}]
    again = await served.post(RESPONSES, {"input": [*short["output"], said("Which colour?")]})
    assert again.status_code == 200
    name = again.json()["id"]
    more = await served.post(f"{RESPONSES}/compact", {"previous_response_id": name})
    assert more.status_code == 200 and more.json()["output"][0]["type"] == "compaction"
    assert (await served.post(f"{RESPONSES}/compact", {"previous_response_id": "no"})).status_code == 404
    await until(lambda: not served.context.gate.open)


def test_full_items_mean_the_same() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "id": "r", "summary": "x", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "blue"}]},
        {"type": "compaction", "encrypted_content": "short"},
    ]
    full = full_items(items)
    assert messages_of(full) == messages_of(items) and len({item["id"] for item in full}) == len(items)
    assert full_items(full)[0]["content"] == full[0]["content"]


@pytest.mark.parametrize("kind", ["conversation", "chat"])
def test_what_is_kept_weighs_what_it_takes(kind: str) -> None:
    """The sum that is compared with the ceiling is the memory of what is kept."""
    store = Store(most_bytes=1 << 20)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(300):
            labels = {f"key {i} {j}": f"{i} {j}".ljust(400) for j in range(8)}
            kept: Kept
            if kind == "chat":
                kept = KeptChat("me", f"chatcmpl-{i}", f"m{i}", bytes(bytearray(3000)), labels, bytes(bytearray(2000)))
            else:
                kept = Conversation("me", f"conv_{i}", metadata=labels)
                kept.add([(f"msg_{i}_{j}", bytes(bytearray(300))) for j in range(10)])
            store.add(kept)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert store.size <= 1 << 20 and 10 < len(store) < 300
    assert 0.5 * store.size < grown < 1.3 * store.size


@pytest.mark.parametrize(("choice", "tools"), [
    ({"type": "bogus"}, True), ({"type": "function"}, True), ({"type": "function", "name": "nope"}, True),
    ("required", False), ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}, True),
])  # fmt: skip
async def test_counting_refuses_a_choice_of_tools_as_answering_does(start: Starter, choice: Any, tools: bool) -> None:
    served = await start()
    body: dict[str, Any] = {"input": "Hi", "tool_choice": choice}
    if tools:
        body["tools"] = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    answered, counted = [await served.post(path, body) for path in (RESPONSES, f"{RESPONSES}/input_tokens")]
    assert answered.status_code == counted.status_code == 400, (answered.text, counted.text)
    assert answered.json()["error"] == counted.json()["error"]
