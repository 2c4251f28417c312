"""Chats with `store: true`: kept as they were sent, listed, changed, forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.pure.server.conftest import Served, Starter, until
from tokenmill.server.openai.stored.kept_chats import KeptChat
from tokenmill.server.openai.stored.streamed import completion_of
from tokenmill.testing.fake_generator import FakeOptions

PATH = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "seed": 3, "store": True}
CALL = '<think>It asks.</think>Well.<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


async def fetch(served: Served, path: str) -> Any:
    answer = await served.client.get(f"{PATH}{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_stored_chat_is_what_was_answered(start: Starter) -> None:
    served = await start(FakeOptions(script="Blue."))
    made = (await served.post(PATH, {**HI, "metadata": {"a": "b"}})).json()
    assert await fetch(served, f"/{made['id']}") == {**made, "metadata": {"a": "b"}}
    changed = await served.post(f"{PATH}/{made['id']}", {"metadata": {"c": "d"}})
    assert changed.json()["metadata"] == {"c": "d"} == (await fetch(served, f"/{made['id']}"))["metadata"]
    asked = await fetch(served, f"/{made['id']}/messages")
    assert [(m["role"], m["content"], m["content_parts"]) for m in asked["data"]] == [("user", "Hi", None)]
    gone = (await served.client.delete(f"{PATH}/{made['id']}")).json()
    assert gone == {"id": made["id"], "object": "chat.completion.deleted", "deleted": True}
    for path in (f"/{made['id']}", f"/{made['id']}/messages"):
        assert (await served.client.get(PATH + path)).status_code == 404
    unkept = (await served.post(PATH, {**HI, "store": False})).json()
    assert (await served.client.get(f"{PATH}/{unkept['id']}")).status_code == 404


async def test_a_stream_is_kept_as_it_was_sent(start: Starter) -> None:
    served = await start(FakeOptions(script=CALL), **PARSERS)
    body = {**HI, "max_tokens": 200, "tools": [TOOL], "logprobs": True, "n": 2, "temperature": 1.0}
    whole = (await served.post(PATH, body)).json()
    text = (await served.post(PATH, {**body, "stream": True})).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    kept = await fetch(served, f"/{chunks[0]['id']}")
    assert kept["object"] == "chat.completion" and kept["usage"] == whole["usage"]
    for mine, other in zip(kept["choices"], whole["choices"], strict=True):
        calls, others = mine["message"].pop("tool_calls"), other["message"].pop("tool_calls")
        assert [call["function"] for call in calls] == [call["function"] for call in others]
        sent = [call["id"] for c in chunks for ch in c["choices"] for call in ch["delta"].get("tool_calls", ())
                if call.get("id") and ch["index"] == mine["index"]]  # fmt: skip
        assert [call["id"] for call in calls] == sent
        assert mine["message"] == other["message"] and mine["finish_reason"] == other["finish_reason"]
        assert [row["token"] for row in mine["logprobs"]["content"]] == [
            row["token"] for row in other["logprobs"]["content"]
        ]


async def test_lists_come_in_pages(start: Starter) -> None:
    served = await start()
    served.context.store.delete(KeptChat, "chatcmpl-x", "anonymous")
    names = [
        (await served.post(PATH, {**HI, "metadata": {"even": str(i % 2 == 0), "x": "y"}})).json()["id"]
        for i in range(5)
    ]
    first = await fetch(served, "?limit=2")
    assert [c["id"] for c in first["data"]] == names[:2] and first["has_more"] and first["object"] == "list"
    assert (first["first_id"], first["last_id"]) == (names[0], names[1])
    rest = await fetch(served, f"?after={names[1]}&limit=100")
    assert [c["id"] for c in rest["data"]] == names[2:] and not rest["has_more"]
    newest = await fetch(served, f"?order=desc&limit=3&after={names[4]}")
    assert [c["id"] for c in newest["data"]] == names[3:0:-1] and newest["has_more"]
    even = await fetch(served, "?metadata[even]=True&metadata[x]=y")
    assert [c["id"] for c in even["data"]] == names[::2]
    assert (await fetch(served, "?model=other"))["data"] == [] and len(
        (await fetch(served, "?model=fake"))["data"]
    ) == 5
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "limit=" + "9" * 400):
        assert (await served.client.get(f"{PATH}?{query}")).status_code == 400, query
    for after in ("nobody", "%00", "x" * 3000):
        assert (await served.client.get(f"{PATH}?after={after}")).status_code == 404


async def test_other_keys_see_nothing_and_may_choose_the_same_id(start: Starter) -> None:
    served = await start(api_key=["one", "two"])
    mine, yours = ({"authorization": f"Bearer {key}", "x-request-id": "same"} for key in ("one", "two"))
    name = (await served.client.post(PATH, json=HI, headers=mine)).json()["id"]
    assert name == "chatcmpl-same"
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/messages")):
        assert (await served.client.request(method, f"{PATH}/{name}{path}", headers=yours)).status_code == 404
    assert (await served.client.get(PATH, headers=yours)).json()["data"] == []
    for _ in range(2):
        assert (await served.client.post(PATH, json=HI, headers=yours)).json()["id"] == name
    assert len((await served.client.get(PATH, headers=yours)).json()["data"]) == 1
    assert (await served.client.delete(f"{PATH}/{name}", headers=yours)).status_code == 200
    assert (await served.client.get(f"{PATH}/{name}", headers=mine)).status_code == 200
    odd = await served.client.post(PATH, json=HI, headers={**mine, "x-request-id": "a/b?c"})
    assert (await served.client.get(f"{PATH}/{odd.json()['id']}", headers=mine)).status_code == 200


async def test_what_is_not_whole_is_not_kept(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.01))
    before = len(served.context.store)
    late = {**HI, "max_tokens": 2000, "timeout": 0.05}
    assert (await served.post(PATH, late)).status_code == 408
    assert "deadline" in (await served.post(PATH, {**late, "stream": True})).text
    await until(lambda: not served.context.gate.open)
    assert len(served.context.store) == before


async def test_what_does_not_fit_is_refused_before_any_work(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=1 << 15))
    served.context.store.most_bytes = 10_000
    large = {**HI, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 9000}]}
    refused = await served.post(PATH, large)
    assert (
        refused.status_code == 400
        and "too large to be stored; 10,000 are kept" in refused.text
        and not served.fake.fleet.open_requests
    )
    assert (await served.post(PATH, {**large, "store": False})).status_code == 200
    for _ in range(20):
        assert (await served.post(PATH, HI)).status_code == 200
    assert served.context.store.size <= 10_000


@pytest.mark.parametrize("data", [b"", b"data: [DONE]\n\n", b'data: {"error": {}}\n\n'])
def test_a_stream_without_an_answer_is_nothing(data: bytes) -> None:
    assert completion_of(data) is None


@pytest.mark.parametrize(
    "metadata", [{str(i): "x" for i in range(17)}, {"a": 1}, {"x" * 65: "y"}, {"x": "y" * 513}, "x"]
)
async def test_metadata_has_ceilings(start: Starter, metadata: Any) -> None:
    served = await start()
    for path, body in ((PATH, HI), (f"{PATH}/chatcmpl-x", {})):
        refused = await served.post(path, {**body, "metadata": metadata})
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("metadata")
    assert (await served.post(f"{PATH}/chatcmpl-x", {})).status_code == 400


@pytest.mark.parametrize(("path", "body"), [
    (PATH, HI), ("/v1/responses", {"input": "Hi"}), ("/v1/responses", {"input": "Hi", "conversation": "conv_x"}),
])  # fmt: skip
async def test_a_stream_that_never_began_leaves_nothing_unfinished(start: Starter, path: str, body: Any) -> None:
    served = await start()
    data = json.dumps({**body, "stream": True}).encode()

    async def receive() -> dict[str, Any]:
        nonlocal data
        if data is None:
            await asyncio.get_running_loop().create_future()
        sent, data = data, None  # type: ignore[assignment]
        return {"type": "http.request", "body": sent, "more_body": False}

    async def send(message: Any) -> None:
        raise OSError("gone")

    scope = {
        **{"type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b"", "scheme": "http"},
        **{"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "http_version": "1.1"},
    }
    with contextlib.suppress(OSError):
        await served.app(scope, receive, send)
    shelves = served.context.store.shelves.values()
    assert not [kept for shelf in shelves for kept in shelf.kept.values() if kept.busy]
    await until(lambda: not served.context.gate.open)
