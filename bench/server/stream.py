"""What a streamed token costs the server, without a model: chunks per second of one core, encoding, and TTFT added.

    python bench/server/stream.py [--json OUT] [--streams 32] [--tokens 2000]

The server runs in a process of its own over fake engines; its CPU time is measured, so a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def server(pipe: Connection, step_s: float) -> None:
    """Serve until the pipe closes; answers each message with the CPU seconds used so far."""
    import uvloop

    async def main() -> None:
        from tokenmill.core.config import make_server_config
        from tokenmill.server.app import make_app, make_context
        from tokenmill.server.listener import HttpServer
        from tokenmill.server.run import _bind
        from tokenmill.testing.fake_generator import FakeOptions, fake_fleet

        config = make_server_config({}, port=0, log_level="error")
        fake = await fake_fleet(FakeOptions(step_s=step_s, max_model_len=1 << 20))
        sock = _bind(config)
        http = HttpServer(make_app(make_context(fake.fleet, config)), config, sock)
        await http.start()
        pipe.send(sock.getsockname()[1])
        while True:
            if pipe.poll():
                pipe.recv()
                pipe.send(time.process_time())
            await asyncio.sleep(0.001)

    uvloop.run(main())


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(data) + data


def read_streams(port: int, streams: int, tokens: int) -> int:
    """Open the streams, read all to their end; -> events seen."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": tokens, "stream": True}
    sockets = []
    for _ in range(streams):
        made = socket.create_connection(("127.0.0.1", port))
        made.sendall(request(body))
        sockets.append(made)
    events = 0
    tails = [b""] * streams
    left = set(range(streams))
    while left:
        for i in list(left):
            data = sockets[i].recv(1 << 20)
            events += data.count(b"data: ")
            tails[i] = (tails[i] + data)[-64:]
            if b"[DONE]" in tails[i] or not data:
                left.discard(i)
    for made in sockets:
        made.close()
    return events


def first_tokens(port: int, count: int) -> list[float]:
    """Seconds from sending a request to its first content event, one at a time."""
    found = []
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "stream": True}
    made = socket.create_connection(("127.0.0.1", port))
    for _ in range(count):
        began = time.perf_counter()
        made.sendall(request(body))
        data = b""
        while b'"content":"' not in data.replace(b'"content":""', b""):
            data += made.recv(1 << 16)
        found.append(time.perf_counter() - began)
        while b"0\r\n\r\n" not in data:
            data += made.recv(1 << 16)
    made.close()
    return found


def encode_cost() -> float:
    """Microseconds per encoded chunk."""
    from tokenmill.server.sse import PlainChunks

    plain = PlainChunks({"id": "chatcmpl-x", "choices": [{"index": 0, "delta": {"content": "\u0000"}}]})
    count = 200_000
    began = time.process_time()
    for _ in range(count):
        plain.chunk(" token")
    return (time.process_time() - began) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=server, args=(theirs, 0.0), daemon=True)
    process.start()
    port = ours.recv()

    def cpu() -> float:
        ours.send(None)
        return ours.recv()

    read_streams(port, 4, 50)
    runs = []
    for _ in range(3):
        before, began = cpu(), time.perf_counter()
        events = read_streams(port, options.streams, options.tokens)
        runs.append((events / (cpu() - before), events / (time.perf_counter() - began)))
    waits = first_tokens(port, 300)
    result = {
        "chunks_per_cpu_s": round(statistics.median(r[0] for r in runs)),
        "chunks_per_s": round(statistics.median(r[1] for r in runs)),
        "encode_us": round(encode_cost(), 3),
        "ttft_added_ms_p50": round(statistics.median(waits) * 1e3, 3),
        "ttft_added_ms_p99": round(sorted(waits)[int(len(waits) * 0.99)] * 1e3, 3),
        "streams": options.streams,
        "tokens": options.tokens,
    }
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + os.linesep)
    process.terminate()
    sys.exit(0)


if __name__ == "__main__":
    main()
