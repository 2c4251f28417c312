"""The Responses API over fake engines."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from unittest import mock

import msgspec
import pytest

from tests.pure.server.conftest import until
from tokenmill.core.errors import TooLargeError
from tokenmill.server.backend import DeltaStream
from tokenmill.server.errors import HttpError
from tokenmill.server.request_job import Job
from tokenmill.server.responses import runs
from tokenmill.server.responses.conversation_items import messages_of
from tokenmill.server.responses.kept_responses import KeptResponse as Kept
from tokenmill.server.responses.schemas import ResponsesRequest
from tokenmill.server.store import Store
from tokenmill.testing.fake_generator import FakeOptions

CALL = '<think>It asks.</think>Well.<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
HI = {"model": "fake", "input": "Hi"}
LOGPROBS = {"include": ["message.output_text.logprobs"]}
PATH = "/v1/responses"


def events(text: str) -> list[dict]:
    found = []
    for part in text.strip().split("\n\n"):
        head, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {found[-1]['type']}"
    return found


async def test_events_are_numbered_and_add_up_to_the_response(start):
    served = await start(FakeOptions(script=CALL), **PARSERS)
    found = events((await served.post(PATH, {**HI, "tools": [TOOL], "stream": True})).text)
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    assert [e["type"] for e in found[:2]] == ["response.created", "response.in_progress"]
    last = found[-1]
    assert last["type"] == "response.completed" and last["response"]["status"] == "completed"
    output = last["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    for place, item in enumerate(output):
        mine = [e for e in found if e.get("output_index") == place]
        assert mine[0]["type"] == "response.output_item.added" and mine[-1]["type"] == "response.output_item.done"
        assert mine[-1]["item"] == item and item["status"] == "completed"
        said = "".join(e["delta"] for e in mine if e["type"].endswith(".delta"))
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    whole = (await served.post(PATH, {**HI, "tools": [TOOL]})).json()
    texts = [[i.get("content"), i.get("arguments"), i["type"]] for i in output]
    assert [[i.get("content"), i.get("arguments"), i["type"]] for i in whole["output"]] == texts
    assert (
        whole["usage"] == last["response"]["usage"] and whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    )


@pytest.mark.parametrize("held", [False, True])
async def test_a_text_has_the_log_probabilities_of_its_own_tokens(start, held):
    """Neither those of the reasoning before it nor of the call behind it, whether steps come one by one or piled up."""
    served = await start(FakeOptions(script=CALL), **PARSERS)
    if held:  # the loop hears of several steps at once
        inbox = DeltaStream.batch

        async def later(self):
            first = await inbox(self)
            while first[-1].finish_reason is None:
                first += await inbox(self)
            return first

        with mock.patch.object(DeltaStream, "batch", later):
            answer = await served.post(PATH, {**HI, **LOGPROBS, "tools": [TOOL]})
    else:
        answer = await served.post(PATH, {**HI, **LOGPROBS, "tools": [TOOL]})
    (text,) = (item["content"][0] for item in answer.json()["output"] if item["type"] == "message")
    assert text["text"] == "Well." and [row["token"] for row in text["logprobs"]] == [*"Well."]


async def test_what_is_kept_can_be_continued_read_and_forgotten(start):
    served = await start(FakeOptions(script="Blue."))
    first = (await served.post(PATH, {**HI, "instructions": "Be brief."})).json()
    second = (await served.post(PATH, {"input": "Why?", "previous_response_id": first["id"]})).json()
    alone = (await served.post(PATH, {"input": "Why?"})).json()
    assert second["usage"]["input_tokens"] > alone["usage"]["input_tokens"]
    assert (await served.client.get(f"{PATH}/{first['id']}")).json() == first
    asked = (await served.client.get(f"{PATH}/{second['id']}/input_items")).json()["data"]
    assert [part["text"] for item in asked for part in item["content"]] == ["Why?"]
    assert (await served.client.delete(f"{PATH}/{first['id']}")).json()["deleted"]
    assert (await served.client.get(f"{PATH}/{first['id']}")).status_code == 404
    unkept = (await served.post(PATH, {**HI, "store": False})).json()
    assert (await served.client.get(f"{PATH}/{unkept['id']}")).status_code == 404


async def test_background_runs_go_on_are_followed_and_cancelled(start):
    served = await start(FakeOptions(script="a" * 40, step_s=0.005))
    run = (await served.post(PATH, {**HI, "background": True})).json()
    assert run["status"] in ("queued", "in_progress")
    followed = events((await served.client.get(f"{PATH}/{run['id']}?stream=true")).text)
    assert followed[-1]["type"] == "response.completed"
    missed = events((await served.client.get(f"{PATH}/{run['id']}?stream=true&starting_after=5")).text)
    assert missed == followed[6:]
    served.options.step_s = 0.2
    slow = (await served.post(PATH, {**HI, "background": True})).json()
    more = await served.post(PATH, {"input": "Why?", "previous_response_id": slow["id"]})
    assert more.status_code == 400 and more.json()["error"]["param"] == "previous_response_id"  # it has no answer yet
    while not (shown := (await served.client.get(f"{PATH}/{slow['id']}")).json())["output"]:
        await asyncio.sleep(0.01)
    assert shown["output"][0]["status"] == "in_progress"
    ended = (await served.client.post(f"{PATH}/{slow['id']}/cancel")).json()
    assert ended["status"] == "cancelled" and ended["output"][0]["status"] == "incomplete"
    assert (await served.client.post(f"{PATH}/{slow['id']}/cancel")).json()["status"] == "cancelled"
    while served.context.gate.open:  # its place is given back
        await asyncio.sleep(0.01)
    served.options.step_s = 0.0
    wrong = await served.client.post(f"{PATH}/{(await served.post(PATH, HI)).json()['id']}/cancel")
    assert wrong.status_code == 400


@pytest.mark.parametrize("said", ["a" * 40, "<think>" + "a" * 40, CALL])
async def test_what_a_cancelled_response_shows_is_what_the_next_one_continues(start, said):
    """A call that was broken off is shown, and is no call."""
    served = await start(FakeOptions(script=said, step_s=0.05), **PARSERS)
    slow = (await served.post(PATH, {**HI, "background": True, "tools": [TOOL]})).json()["id"]
    wanted = "function_call" if said == CALL else "message" if said[0] == "a" else "reasoning"
    kept = served.context.store.find(Kept, slow, "anonymous")
    await until(lambda: any(i["type"] == wanted for i in json.loads(kept.show())["output"]))
    ended = (await served.client.post(f"{PATH}/{slow}/cancel")).json()
    assert ended["output"][-1]["status"] == "incomplete"
    messages = json.loads(kept.messages)
    assert [m["role"] for m in messages] == ["user", "assistant"] and "tool_calls" not in messages[1]
    texts = {i["type"]: i["content"][0]["text"] for i in ended["output"] if "content" in i}
    assert messages[1]["content"] == texts.get("message", "")
    assert messages[1].get("reasoning", "") == texts.get("reasoning", "")
    served.options.step_s = 0
    more = await served.post(PATH, {"input": "Go on.", "previous_response_id": slow})
    assert more.json()["usage"]["input_tokens"] > (await served.post(PATH, HI)).json()["usage"]["input_tokens"]


@pytest.mark.parametrize("way", ["previous_response_id", "conversation"])
async def test_a_call_that_its_length_broke_off_is_no_call(start, way):
    served = await start(FakeOptions(script=CALL), **PARSERS)
    talk = (await served.post("/v1/conversations", {})).json()["id"]
    more = {"conversation": talk} if way == "conversation" else {}
    cut = (await served.post(PATH, {**HI, **more, "tools": [TOOL], "max_output_tokens": 80})).json()
    last = cut["output"][-1]
    assert (cut["status"], last["type"], last["status"]) == ("incomplete", "function_call", "incomplete")
    going = (await served.post(PATH, {"input": "Go on.", way: talk if more else cut["id"]})).json()
    kept = served.context.store.find(Kept, going["id"], "anonymous")
    said = json.loads(kept.messages)[1]
    assert said["content"] == "Well." and said["reasoning"] == "It asks." and "tool_calls" not in said


@pytest.mark.parametrize("how", ["cancelled", "deleted", "left"])
async def test_followers_hear_that_a_response_was_cancelled(listen, how):
    """By its client, by deleting it, or because the only client that it was for has left."""
    server = await listen(FakeOptions(script="a" * 4000, step_s=0.01))
    reader, writer = await server.ask({**HI, "background": how != "left", "stream": True}, PATH)
    begun = json.loads((await reader.readuntil(b"\n\n")).rpartition(b"data: ")[2])
    name = begun["response"]["id"]
    follower, following = await server.connect()
    following.write(f"GET {PATH}/{name}?stream=true HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await follower.readuntil(b"output_text.delta")
    if how == "left":
        writer.close()
    else:
        ways = {"cancelled": ("POST", "/cancel"), "deleted": ("DELETE", "")}
        await server.served.client.request(ways[how][0], f"{PATH}/{name}{ways[how][1]}")
    for stream in (follower, reader)[: 1 if how == "left" else 2]:
        last = (await stream.readuntil(b"0\r\n\r\n")).decode().rpartition("event: ")[2]
        told = json.loads(last[last.index("{") : last.rindex("}") + 1])
        assert told["type"] == "response.cancelled" == last.split()[0]
        assert told["response"]["status"] == "cancelled" and told["response"]["output"][0]["status"] == "incomplete"


async def test_a_response_cancelled_before_its_first_word_adds_nothing(start):
    served = await start(FakeOptions(step_s=60))
    slow = (await served.post(PATH, {**HI, "background": True})).json()["id"]
    await served.client.post(f"{PATH}/{slow}/cancel")
    kept = served.context.store.find(Kept, slow, "anonymous")
    assert [m["role"] for m in json.loads(kept.messages)] == ["user"]


async def test_a_result_of_no_call_is_refused_in_openais_words(start):
    served = await start(FakeOptions(script=CALL), **PARSERS)
    result = {"type": "function_call_output", "call_id": "call_x", "output": "blue"}
    call = {"type": "function_call", "call_id": "call_x", "name": "look", "arguments": "{}"}
    for path in (PATH, f"{PATH}/input_tokens", f"{PATH}/compact"):
        for items in ([result], [result, call], [{**call, "call_id": "call_y"}, result]):
            refused = await served.post(path, {"model": "fake", "input": items})
            error, said = refused.json()["error"], "No tool call found for function call output with call_id call_x."
            assert refused.status_code == 400 and (error["message"], error["param"]) == (said, "input")
        assert (await served.post(path, {"model": "fake", "input": [call, result]})).status_code == 200
    first = (await served.post(PATH, {**HI, "tools": [TOOL]})).json()
    name = next(item["call_id"] for item in first["output"] if item["type"] == "function_call")
    for call_id, status in ((name, 200), ("call_x", 400)):
        body = {"previous_response_id": first["id"], "input": [{**result, "call_id": call_id}]}
        assert (await served.post(PATH, body)).status_code == status
    talk = (await served.post("/v1/conversations", {"items": [call]})).json()["id"]
    assert (await served.post(PATH, {"conversation": talk, "input": [result]})).status_code == 200


async def test_nothing_stays_of_a_reader_who_leaves(listen):
    """GET has no body, but its answer may take as long as any other."""
    server = await listen(FakeOptions(step_s=0.01))
    client, load = server.served.client, server.served.app.load
    name = (await client.post(PATH, json={**HI, "background": True, "max_output_tokens": 3000})).json()["id"]
    reader, writer = await server.connect()
    writer.write(f"GET {PATH}/{name}?stream=true HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    await reader.readuntil(b"response.in_progress")
    assert load.open == 1
    writer.close()
    await until(lambda: not load.open)
    assert (await client.get(f"{PATH}/{name}")).json()["status"] == "in_progress"
    await client.post(f"{PATH}/{name}/cancel")


async def test_whoever_reads_the_last_event_can_go_on(start):
    """While that event is being sent, the stored response has ended already."""
    served = await start(FakeOptions(script="Blue."))
    run = await runs.open_run(served.context, Job(served.context, "one"), ResponsesRequest(**HI), "x")
    async for told in runs.events(run):
        if b"response.completed" in told[-1]:
            assert not run.kept.busy and b"Blue." in run.kept.messages
    runs.clean_up(run)


async def test_a_cut_answer_is_incomplete(start):
    served = await start(FakeOptions(script="abcdef"))
    found = (await served.post(PATH, {**HI, "max_output_tokens": 3})).json()
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"


async def test_other_keys_see_nothing(start):
    served = await start(FakeOptions(script="a"), api_key=["one", "two"])
    mine, yours = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    name = (await served.client.post(PATH, json=HI, headers=mine)).json()["id"]
    assert (await served.client.get(f"{PATH}/{name}", headers=mine)).status_code == 200
    for method, path in (("GET", name), ("DELETE", name), ("POST", f"{name}/cancel"), ("GET", f"{name}/input_items")):
        assert (await served.client.request(method, f"{PATH}/{path}", headers=yours)).status_code == 404
    continued = await served.client.post(PATH, json={**HI, "previous_response_id": name}, headers=yours)
    assert continued.status_code == 404


@pytest.mark.parametrize(("change", "word"), [
    ({"prompt": {"id": "x"}}, "prompt"), ({"conversation": "x", "previous_response_id": "y"}, "conversation"),
    ({"max_tool_calls": 2}, "max_tool"),
    ({"background": True, "store": False}, "store"), ({"include": ["web_search_call.results"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"), ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
    ({"temperature": -1}, "temperature"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input.0.arguments"), ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": "x", "name": "Bob"}]}, "input.name"),
    ({"input": [{"type": "reasoning", "content": [], "output": "x"}]}, "input.output"),
    ({"input": [{"role": "", "content": "x"}]}, "input.0.role"), ({"input": [{"role": "User"}]}, "input.0.role"),
])  # fmt: skip
async def test_what_cannot_be_honoured_is_refused(start, change, word):
    served = await start()
    answer = await served.post(PATH, {**HI, **change})
    assert answer.status_code == 400 and word in answer.json()["error"]["param"] + answer.json()["error"]["message"]
    assert served.context.gate.open == 0


def test_items_of_one_turn_become_one_message():
    items = [
        {"role": "user", "content": "Look."},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "blue"},
    ]
    user, assistant, tool = messages_of(items)
    assert user == {"role": "user", "content": "Look."} and tool["content"] == "blue"
    assert assistant["content"] == "Well." and assistant["reasoning"] == "Hm." and len(assistant["tool_calls"]) == 1


def kept(owner: str, name: str, *, text: int = 0, ended: bool = True) -> Kept:
    return Kept(owner, name, False, b"[]", b"x" * text, lambda: b"{}", ended=ended)


def names(store: Store, owner: str) -> list[str]:
    return list(store.shelves[owner].kept) if owner in store.shelves else []


def test_the_store_forgets_the_oldest_first():
    store = Store(most=3)
    for i in range(5):
        store.add(kept("me", str(i), ended=i != 1))
    assert names(store, "me") == ["1", "3", "4"]  # 1 has not ended
    with pytest.raises(HttpError):
        store.find(Kept, "4", "you")
    small = Store(most_bytes=6000)
    for i in range(3):
        small.add(kept("me", str(i), text=2000))
    assert names(small, "me") == ["2"] and small.size < 6000


def test_a_key_pushes_out_only_its_own_responses():
    store = Store(most_bytes=100_000)
    store.add(kept("modest", "a", text=10_000))
    for i in range(50):
        store.add(kept("greedy", str(i), text=10_000))
    assert names(store, "modest") == ["a"] and 5 <= len(names(store, "greedy")) <= 8
    many = Store(most=10)
    many.add(kept("modest", "a"))
    for i in range(50):
        many.add(kept("greedy", str(i)))
    assert names(many, "modest") == ["a"] and len(many) == 10
    assert sum(shelf.size for shelf in store.shelves.values()) == sum(
        k.weight or 0 for shelf in store.shelves.values() for k in shelf.kept.values()
    )


def test_what_runs_is_not_pushed_out_and_what_does_not_fit_is_refused():
    store = Store(most_bytes=50_000)
    for i in range(3):
        store.add(kept("me", str(i), text=12_000, ended=False))
    with pytest.raises(HttpError) as busy:
        store.add(kept("you", "late", text=12_000, ended=False))
    assert busy.value.status == 503 and len(store) == 3
    with pytest.raises(TooLargeError):
        store.add(kept("me", "large", text=60_000))


async def test_what_is_kept_weighs_what_it_takes(start):
    """The sum that is compared with the ceiling is the memory of the bytes that are kept."""
    body = {**HI, "metadata": {f"k{i}": "v" * 500 for i in range(16)}, "instructions": "be brief " * 50}
    store = Store(most_bytes=1 << 20)
    served = await start()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        items = msgspec.json.encode([body["metadata"]])
        for i in range(200):
            one = Kept("me", str(i), False, bytes(bytearray(items)), bytes(bytearray(items)), lambda: b"{}")
            store.add(one)
            one.tell([bytes(bytearray(items)) for _ in range(4)])
            one.end()
            store.weigh(one)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert store.size <= 1 << 20 and 10 < len(store) < 200
    assert 0.5 * store.size < grown < 1.3 * store.size
    assert (await served.post(PATH, body)).status_code == 200


@pytest.mark.parametrize(
    "metadata",
    [{str(i): "x" for i in range(17)}, {"a": {}}, {"a": [1]}, {"x" * 65: "y"}, {"x": "y" * 513}, [], "x"],
    ids=["seventeen", "an object", "a list", "a long name", "a long value", "no object", "a text"],
)
async def test_metadata_has_ceilings_of_its_own(start, metadata):
    served = await start()
    refused = await served.post(PATH, {**HI, "metadata": metadata})
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("metadata")


async def test_what_broke_keeps_its_status_while_somebody_waits(start):
    served = await start(FakeOptions(step_s=0.01))
    late = await served.post(PATH, {**HI, "timeout": 0.05, "max_output_tokens": 2000})
    assert late.status_code == 408 and "deadline" in late.json()["error"]["message"]
