"""The Responses API over a WebSocket, with a published client of the protocol; and frames by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import struct
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai.types.responses as responses
import pytest
from openai.types.responses import ResponsesServerEvent
from openai.types.responses.responses_server_event import ResponseWsError

from tests.pure.server.conftest import until
from tests.pure.server.listening import Listening
from tests.pure.server.listening import answer as http_answer
from tests.pure.server.server_strict_types_helpers import strictly, typed
from tokenmill.core.config import make_server_config
from tokenmill.server.bodies import Bodies, Parcel
from tokenmill.server.responses.kept_responses import RecentResponse
from tokenmill.server.websockets.frames import (
    BAD_TEXT,
    BAD_TYPE,
    CLOSE,
    GOING_AWAY,
    MOST_FRAGMENTS,
    PING,
    POLICY,
    TOO_LARGE,
    WRONG,
    Begun,
    BrokenError,
    Control,
    Ended,
    Frames,
    accept_key,
    unmasked,
)
from tokenmill.server.websockets.socket import MOST_WAITING, Patience, WebSocket
from tokenmill.testing.fake_generator import FakeOptions

PATH = "/v1/responses"
HI: dict[str, Any] = {"type": "response.create", "model": "fake", "input": "Hi", "max_output_tokens": 8}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@contextlib.asynccontextmanager
async def connected(server: Listening, **headers: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"ws://127.0.0.1:{server.port}{PATH}", headers=headers, autoping=False) as socket,
    ):
        yield socket


async def answer(socket: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
    """Events up to the end of one response."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while not found or found[-1]["type"] not in ENDS:
            found.append(json.loads(await socket.receive_str()))
    return found


async def say(socket: aiohttp.ClientWebSocketResponse, **body: Any) -> list[dict[str, Any]]:
    await socket.send_json({**HI, **body})
    return await answer(socket)


async def ended(socket: aiohttp.ClientWebSocketResponse) -> int | None:
    """The code with which the server closes."""
    async with asyncio.timeout(60):
        while (message := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
            pass
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return socket.close_code


async def test_responses_follow_each_other_on_one_connection(listen: Any) -> None:
    server = await listen(FakeOptions(script="Blue."))
    async with connected(server) as socket:
        first = await say(socket)
        assert [e["sequence_number"] for e in first] == list(range(len(first)))
        for event in first:
            strictly(responses.ResponseStreamEvent, event)
            typed(ResponsesServerEvent, event)
        plain = (await server.served.post(PATH, {"input": "Hi", "max_output_tokens": 8})).json()
        whole = first[-1]["response"]
        assert whole["output"][0]["content"] == plain["output"][0]["content"]
        second = await say(socket, input="Why?", previous_response_id=whole["id"], stream_id="s", stream=True)
        assert {e["stream_id"] for e in second} == {"s"}
        assert second[-1]["response"]["usage"]["input_tokens"] > whole["usage"]["input_tokens"]
        kept = await server.served.client.get(f"{PATH}/{second[-1]['response']['id']}")
        assert kept.json() == second[-1]["response"]
        talk = (await server.served.post("/v1/conversations", {})).json()["id"]
        assert (await say(socket, conversation=talk))[-1]["response"]["conversation"] == {"id": talk}
    await server.idle(60)


async def test_what_is_not_kept_can_be_gone_on_with_here_alone(listen: Any) -> None:
    server = await listen(FakeOptions(script="Blue."))
    async with connected(server) as socket, connected(server) as other:
        name = (await say(socket, store=False))[-1]["response"]["id"]
        lost = (await say(other, previous_response_id=name))[-1]
        assert lost["error"]["code"] == "previous_response_not_found" and lost["status"] == 404
        assert (await server.served.client.get(f"{PATH}/{name}")).status_code == 404
        more = (await say(socket, previous_response_id=name, store=False))[-1]["response"]
        assert more["previous_response_id"] == name and more["status"] == "completed"
        assert (await say(socket, previous_response_id=name))[-1]["status"] == 404
        store = server.served.context.store
        held = store.all(RecentResponse, "anonymous")
        assert [recent.name for recent in held] == [more["id"]] and store.size >= len(held[0].messages)
        store.drop(held[0])  # others needed the room
        assert (await say(socket, previous_response_id=more["id"]))[-1]["status"] == 404
    await until(lambda: not store.all(RecentResponse, "anonymous"))


async def test_a_prompt_may_be_read_before_it_is_answered(listen: Any) -> None:
    server = await listen(FakeOptions(script="Blue."))
    async with connected(server) as socket:
        ready = await say(socket, generate=False, instructions="Be brief.")
        assert [e["type"] for e in ready] == ["response.created", "response.in_progress", "response.completed"]
        made = ready[-1]["response"]
        assert made["output"] == [] and made["status"] == "completed" and made["usage"]["output_tokens"] == 0
        more = (await say(socket, input="Why?", previous_response_id=made["id"]))[-1]["response"]
        assert more["output"][0]["content"][0]["text"] == "Blue."


WRONG_MESSAGES: list[tuple[str, str | None]] = [
    ("{", None), ("[]", None), ('"x"', None), ("{}", "type"), ('{"type": "response.steer"}', "type"),
    (json.dumps({**HI, "input": []}), "input"), (json.dumps({**HI, "background": True}), "background"),
    (json.dumps({**HI, "temperature": "hot"}), "temperature"), (json.dumps({**HI, "stream_id": 3}), "stream_id"),
    (json.dumps({**HI, "generate": 1}), "generate"), (json.dumps({**HI, "mirostat": 2}), "mirostat"),
    (json.dumps({**HI, "model": "nope"}), "model"), ('{"type":"response.create","input":' + "[" * 300, None),
    (json.dumps({**HI, "previous_response_id": "x" * 3000}), "previous_response_id"),
]  # fmt: skip


async def test_what_is_wrong_is_an_event_and_the_talk_goes_on(listen: Any) -> None:
    server = await listen(FakeOptions(script="Blue."))
    async with connected(server) as socket:
        for text, param in WRONG_MESSAGES:
            await socket.send_str(text)
            (error,) = await answer(socket)
            typed(ResponseWsError, error)
            assert 400 <= error["status"] < 500 and error["error"]["param"] == param, (text[:80], error)
        assert (await say(socket))[-1]["type"] == "response.completed"
    await server.idle(60)


async def test_a_key_and_an_origin_are_needed_as_for_requests(listen: Any) -> None:
    server = await listen(api_key=["k", "other"])
    for headers, status in (({}, 401), ({"authorization": "Bearer k", "origin": "http://evil.example"}, 403)):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with connected(server, **headers):
                pass
        assert refused.value.status == status
    async with connected(server, authorization="Bearer k") as socket:
        name = (await say(socket))[-1]["response"]["id"]
    async with connected(server, authorization="Bearer other") as socket:
        assert (await say(socket, previous_response_id=name))[-1]["status"] == 404


async def test_rates_count_every_message(listen: Any) -> None:
    server = await listen(FakeOptions(script="a"), requests_per_minute=2)
    async with connected(server) as socket:
        kinds = [(await say(socket))[-1] for _ in range(3)]
        assert [e["type"] for e in kinds] == ["response.completed", "response.completed", "error"]
        assert kinds[-1]["status"] == 429
        server.served.context.gate.draining = True
        assert (await say(socket))[-1]["status"] == 503
    with pytest.raises(aiohttp.WSServerHandshakeError):
        async with connected(server):
            pass


async def test_a_dead_socket_ends_its_response(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.005))
    async with connected(server) as socket:
        await socket.send_json({**HI, "max_output_tokens": 3000})
        await socket.receive_str()
        assert server.served.context.gate.open == 1
        for _ in range(3):
            await socket.send_json(HI)
        connection: Any = socket._response.connection
        connection.transport.abort()
    await server.idle(60)
    await until(lambda: server.served.context.bodies.room == 16 * server.served.context.config.limits.max_body_bytes)


async def test_a_client_may_close_in_the_middle(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.005))
    async with connected(server) as socket:
        await socket.send_json({**HI, "max_output_tokens": 3000})
        await socket.receive_str()
        await socket.close()
    await server.idle(60)


async def test_few_messages_wait(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.01))
    async with connected(server) as socket:
        for _ in range(MOST_WAITING + 3):
            await socket.send_json({**HI, "max_output_tokens": 3000})
        assert await ended(socket) == POLICY
    await server.idle(60)


async def test_messages_have_a_ceiling_and_a_deadline(listen: Any) -> None:
    server = await listen(max_body_bytes=100_000, read_timeout=0.2)
    async with connected(server) as socket:
        assert (await say(socket, input="x", instructions="y" * 300))[-1]["type"] in ENDS
        await socket.send_str("x" * 100_001)
        assert await ended(socket) == TOO_LARGE
    reader, writer = await server.connect()
    writer.write(HANDSHAKE + client_frame(1, b"a", last=False))
    await writer.drain()
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(60):
        head = await reader.readexactly(4)
    assert head[0] & 15 == CLOSE and struct.unpack("!H", head[2:])[0] == POLICY
    writer.close()


async def test_pings_are_answered_while_a_response_is_made(listen: Any) -> None:
    server = await listen(FakeOptions(step_s=0.002))
    async with connected(server) as socket:
        await socket.send_json({**HI, "max_output_tokens": 300})
        await socket.ping(b"there?")
        async with asyncio.timeout(60):
            while (message := await socket.receive()).type is not aiohttp.WSMsgType.PONG:
                assert message.type is aiohttp.WSMsgType.TEXT
        assert message.data == b"there?"
        assert (await answer(socket))[-1]["type"] == "response.incomplete"


HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize(("change", "status"), [
    ((b"upgrade: websocket", b"upgrade: h2c"), 426), ((b"version: 13", b"version: 8"), 400),
    ((b"dGhlIHNhbXBsZSBub25jZQ==", b"short"), 400), ((b"/v1/responses", b"/v1/models"), 200),
    ((b"connection: keep-alive, Upgrade\r\n", b""), 426), ((b"", b""), 101),
])  # fmt: skip
async def test_only_a_handshake_opens_a_socket(listen: Any, change: tuple[bytes, bytes], status: int) -> None:
    server = await listen()
    reader, writer = await server.connect()
    writer.write(HANDSHAKE.replace(*change))
    head = await reader.readuntil(b"\r\n\r\n")
    assert int(head.split()[1]) == status, head
    if status == 101:
        assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head.lower().replace(
            b"s3pplmbitxaq9kygzzhzrbk+xoo=", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        )
        writer.write(client_frame(3, b""))
        frame = await reader.readexactly(4)
        assert frame[0] & 15 == CLOSE and struct.unpack("!H", frame[2:])[0] == WRONG
    writer.close()


async def test_frames_may_come_with_the_handshake(listen: Any) -> None:
    server = await listen(FakeOptions(script="Blue."))
    reader, writer = await server.connect()
    writer.write(HANDSHAKE + client_frame(1, json.dumps(HI).encode()))
    async with asyncio.timeout(60):
        await reader.readuntil(b"response.completed")
    writer.close()
    await server.idle(60)


async def test_what_follows_a_refused_handshake_is_dropped(listen: Any) -> None:
    server = await listen()
    for path in (b"/v1/models", b"/v1/responses"):
        reader, writer = await server.connect()
        writer.write(HANDSHAKE.replace(b"/v1/responses", path).replace(b"version: 13", b"version: 8") + b"x" * 300_000)
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
        assert int(head.split()[1]) in (200, 400, 426)
        writer.close()
    await until(lambda: not server.connections)


# ---------------------------------------------------------------- frames


def client_frame(opcode: int, payload: bytes, *, last: bool = True, mask: bytes = b"\x01\x02\x03\x04") -> bytes:
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = struct.pack("!BH", 0x80 | 126, size) if size < 1 << 16 else struct.pack("!BQ", 0x80 | 127, size)
    return bytes([(0x80 if last else 0) | opcode]) + length + mask + unmasked(payload, mask)


def read(data: bytes, cuts: list[int], most: int = 1 << 20) -> list[bytes | Control]:
    """Messages and control frames of these bytes, which come in pieces."""
    said: list[bytes] = []
    found: list[bytes | Control] = []
    frames = Frames(most, said.append)
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        for each in frames.feed(data[start:end]):
            if isinstance(each, Begun):
                said.clear()
            elif isinstance(each, Ended):
                found.append(b"".join(said))
            else:
                found.append(each)
    return found


def test_frames_are_read_however_they_are_cut() -> None:
    rng = random.Random(7)
    for _ in range(60):
        expected: list[bytes | Control] = []
        data = b""
        for _ in range(rng.randrange(1, 5)):
            text = "é🙂a".encode() * rng.choice((0, 1, 15, 18, 40, 9000))
            parts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(3)))
            pieces = [text[a:b] for a, b in zip([0, *parts], [*parts, len(text)], strict=True)]
            for number, piece in enumerate(pieces):
                mask = rng.randbytes(4)
                data += client_frame(1 if number == 0 else 0, piece, last=number == len(pieces) - 1, mask=mask)
                if number < len(pieces) - 1 and rng.random() < 0.5:
                    expected.append(Control(PING, b"p"))
                    data += client_frame(PING, b"p")
            expected.append(text)
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(12)))
        assert read(data, cuts) == expected
        if len(data) < 400:
            assert read(data, list(range(1, len(data)))) == expected


@pytest.mark.parametrize(("data", "code"), [
    (b"\x81\x01a", WRONG), (b"\xc1\x80\0\0\0\0", WRONG), (client_frame(3, b""), WRONG), (client_frame(11, b""), WRONG),
    (client_frame(0, b"a"), WRONG), (client_frame(1, b"a", last=False) + client_frame(1, b"a"), WRONG),
    (client_frame(PING, b"", last=False), WRONG), (client_frame(PING, b"a" * 126), WRONG),
    (client_frame(2, b"a"), BAD_TYPE), (client_frame(1, b"\xff"), BAD_TEXT), (client_frame(1, b"\xc3"), BAD_TEXT),
    (client_frame(1, b"a" * 2000), TOO_LARGE), (b"\x81\xff" + b"\xff" * 8 + b"abcd", TOO_LARGE),
    (client_frame(1, b"a" * 900, last=False) + client_frame(0, b"a" * 900), TOO_LARGE),
    (client_frame(1, b"", last=False) + client_frame(0, b"", last=False) * MOST_FRAGMENTS, TOO_LARGE),
])  # fmt: skip
def test_what_is_no_frame_is_refused(data: bytes, code: int) -> None:
    for cuts in ([], list(range(1, min(60, len(data))))):
        with pytest.raises(BrokenError) as broken:
            read(data, cuts, most=1000)
        assert broken.value.code == code


def test_noise_ends_in_a_refusal_or_in_nothing() -> None:
    rng = random.Random(11)
    valid = client_frame(1, b'{"a": 1}') + client_frame(PING, b"p") + client_frame(1, b"x" * 300, last=False)
    for _ in range(2000):
        data = bytearray(valid if rng.random() < 0.7 else rng.randbytes(rng.randrange(60)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(BrokenError):
            read(bytes(data), sorted(rng.randrange(len(data) + 1) for _ in range(3)), most=1000)


def test_keys_are_answered() -> None:
    assert accept_key(b"dGhlIHNhbXBsZSBub25jZQ==") == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    for wrong in (b"", b"x", b"dGhl", b"\xff" * 24, b"dGhlIHNhbXBsZSBub25jZQ==" * 2):
        assert accept_key(wrong) is None


class Paper:
    """A wire that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def unread(self) -> int:
        return 0

    async def drain(self) -> None:
        return

    def end(self) -> None:
        self.closed = True


@pytest.mark.parametrize("patience", [Patience(idle_s=0.01), Patience(life_s=0.01)], ids=["silent", "long"])
async def test_nobody_stays_for_ever(patience: Patience) -> None:
    wire = Paper()
    socket = WebSocket(wire, patience, lambda: Parcel(Bodies(1000, {})))
    assert await socket.receive() is None and socket.over
    assert struct.unpack("!H", wire.written[2:4])[0] == GOING_AWAY


async def test_a_client_that_waits_for_its_answer_need_not_speak() -> None:
    for patience, speaks in ((Patience(idle_s=0.001), True), (Patience(life_s=0.001), False)):
        socket = WebSocket(Paper(), patience, lambda: Parcel(Bodies(1000, {})))
        socket.feed(client_frame(1, b"a"))
        parcel = await socket.receive()
        assert parcel is not None
        parcel.release()
        rings = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, rings.set_result, None)  # behind both timers
        await rings
        assert not socket.over
        socket.feed(client_frame(1, b"b"))
        assert (await socket.receive() is not None) is speaks
        socket.gone()


async def test_an_address_cannot_name_the_model(listen: Any) -> None:
    server = await listen()
    reader, writer = await server.connect()
    writer.write(HANDSHAKE.replace(PATH.encode(), PATH.encode() + b"?model=other"))
    status, body = await http_answer(reader)
    assert status == 400 and json.loads(body)["error"]["param"] == "model"
    writer.close()


async def test_what_waits_is_counted_until_it_is_let_go() -> None:
    wire, bodies = Paper(), Bodies(100_000, {})
    room = bodies.room
    socket = WebSocket(wire, Patience(), lambda: Parcel(bodies))
    socket.feed(client_frame(1, b"a" * 70_000) * 2 + client_frame(1, b"b" * 50, last=False))
    assert bodies.room == room - 140_050
    parcel = await socket.receive()
    assert parcel is not None and parcel.take() == b"a" * 70_000
    parcel.release()
    socket.gone()
    assert bodies.room == room and await socket.receive() is None


def test_the_config_s_ceilings_hold_here() -> None:
    assert Patience().message == make_server_config({}).limits.max_body_bytes
