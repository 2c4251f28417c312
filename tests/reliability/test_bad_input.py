"""Prompts that are too long, malformed requests without end, wrong keys, words in logs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cpu.server.conftest import Running
from tests.reliability.reliability_helpers import percentile
from tokenmill.server.access import digest, shown_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
Launch = Callable[..., Running]
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"")
KEYS = ("key-number-one-0123456789", "key-number-two-0123456789")


def test_prompts_beyond_the_context(launch: Launch) -> None:
    running = launch("--log-level", "warning")
    port = urlsplit(running.url).port
    short, long, health = [], [], []
    for i in range(100):
        body = {"prompt": [5] * 2048, "max_tokens": 1} if i % 2 else {"prompt": "x", "max_tokens": 10**6}
        short.append(timed(port, json.dumps(body).encode(), 400))
    text = json.dumps({"prompt": "The mill grinds grain. " * 25_000, "max_tokens": 1}).encode()
    for _ in range(10):
        long.append(timed(port, text, 400))
        began = time.monotonic()
        assert running.get("/health").status_code == 200
        health.append(time.monotonic() - began)
    found = {"ms_p99": percentile(short, 0.99) * 1e3, "long_text_ms_max": max(long) * 1e3, "bytes": len(text)}
    print(json.dumps(found, indent=2))
    assert percentile(short, 0.99) <= 0.05 and max(long) <= 1 and running.metric("vllm:num_requests_waiting") == 0


def timed(port: int | None, data: bytes, status: int) -> float:
    """Seconds until the answer, which must have this status."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == status, answer.read()[:300]
    connection.close()
    return time.monotonic() - began


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
GOOD: list[dict[str, Any]] = [
    {"model": "tiny", "prompt": "The mill", "max_tokens": 2, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}},
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "n": 1, "logprobs": True, "top_logprobs": 1},
    {"input": ["a", "b"], "dimensions": 8},
    {"prompt": "The mill", "return_token_strs": True},
    {"tokens": [5, 6, 7]},
]
ODD = [
    *(
        "null",
        "true",
        "-1",
        "0",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "1.5",
        '""',
        "[]",
        "{}",
        '"\\ud800"',
        '"\\u0000"',
    ),
    *("9" * 400, "[" * 1000 + "]" * 1000, '{"a":' * 500 + "1" + "}" * 500, '"' + "x" * 5000 + '"', "2e308", "-0"),
    *('"a"', "[null]", "[[]]", "[1,2]", '["a",1]', "18446744073709551616", "-9223372036854775809", '{"": ""}'),
]


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that is probably wrong."""
    which = rng.randrange(len(PATHS))
    body = dict(GOOD[which])
    fields = {name: json.dumps(value) for name, value in body.items()}
    for _ in range(rng.randint(1, 3)):
        fields[rng.choice([*fields, "seed", "stream", "user", "tools", "response_format"])] = rng.choice(ODD)
    text = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items()) + "}"
    data = text.encode()
    kind = rng.random()
    if kind < 0.1:
        data = text[: rng.randrange(len(text))].encode()
    elif kind < 0.2:
        cut = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            cut[rng.randrange(len(cut))] = rng.randrange(256)
        data = bytes(cut)
    elif kind < 0.25:
        data = rng.choice([b"", b"[]", b"null", b"\xff\xfe{", b"[" * 100_000, b'{"a":' * 100_000, b"{}" * 10])
    elif kind < 0.3:
        data = text.replace("{", '{"prompt": "twice", "prompt": 7, ', 1).encode()
    return PATHS[which], data


def raw(rng: random.Random) -> bytes:
    """Bytes that are hardly HTTP."""
    line = rng.choice(
        [b"POST /v1/completions HTTP/1.1", b"GET / HTTP/1.0", b"PUT * HTTP/1.1", b"\x00\x01\x02", b"POST"]
    )
    parts = [b"host: localhost", b"content-length: -5", b"content-length: 5\r\ncontent-length: 7", b"x: \x00", b": y"]
    parts += [b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"expect: 100-continue", b"a" * 3000]
    chosen = rng.sample(parts, rng.randint(0, 4))
    tail = rng.choice([b"", b"zz\r\n", b"5\r\nhello\r\n0\r\n\r\n", rng.randbytes(rng.randint(0, 200))])
    return b"\r\n".join([line, *chosen, b"", b""]) + tail


def test_malformed_requests(launch: Launch, seconds: float) -> None:
    """5,000 cases at least, and then on until half of `seconds` has passed (5 minutes by default)."""
    running = launch("--log-level", "warning", "--read-timeout", "2")
    port = urlsplit(running.url).port
    rng = random.Random(13)
    statuses: Counter[int] = Counter()
    waits: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    began, cases = time.monotonic(), 0
    while cases < 5000 or time.monotonic() - began < seconds / 2:
        cases += 1
        if rng.random() < 0.1:
            answer = socket_answer(port, raw(rng))
            if answer:
                statuses[int(answer.split()[1])] += 1
                assert not LEAK.search(answer.decode("latin-1"))
            continue
        path, data = mutated(rng)
        at = time.monotonic()
        kind = rng.choice(["application/json"] * 9 + ["text/plain", "application/x-www-form-urlencoded", ""])
        try:
            connection.request("POST", path, data, {"content-type": kind})
            answered = connection.getresponse()
            text = answered.read().decode()
        except (http.client.HTTPException, ConnectionError):
            connection.close()
            continue
        statuses[answered.status] += 1
        assert answered.status < 500, (path, data[:500], text)
        assert not LEAK.search(text), text
        if answered.status >= 400:
            waits.append(time.monotonic() - at)
            assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
    found = {
        "cases": cases,
        "seconds": round(time.monotonic() - began),
        "statuses": dict(sorted(statuses.items())),
        "reject_ms_p50": statistics.median(waits) * 1e3,
        "reject_ms_p99": percentile(waits, 0.99) * 1e3,
    }
    print(json.dumps(found, indent=2))
    assert not any(status >= 500 for status in statuses) and running.process.poll() is None
    assert running.metric("tokenmill:engine_restarts") == 0
    assert running.get("/health").status_code == 200 and found["reject_ms_p99"] <= 50


def socket_answer(port: int | None, data: bytes) -> bytes:
    """What comes back for raw bytes, until the connection closes or nothing more comes."""
    with socket.create_connection(("127.0.0.1", port or 0), timeout=5) as made, contextlib.suppress(OSError):
        made.settimeout(0.2)
        made.sendall(data)
        return made.recv(1 << 16)
    return b""


@pytest.fixture(scope="module")
def keyed(launch: Launch) -> Iterator[Running]:
    yield launch("--api-key", KEYS[0], "--api-key", KEYS[1], "--log-level", "debug")


def test_every_path_wants_a_key(keyed: Running) -> None:
    known = keyed.client.get(keyed.url + "/openapi.json", headers={"x-api-key": KEYS[0]}).json()["paths"]
    asked = refused = 0
    for path in [*known, "/openapi.json", "/nowhere", "/v1", "/metrics/../v1/models", "//v1/models", "/v1/models/"]:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": KEYS[0][:-1]}):
                if path in ("/health", "/v1/health", "/ready", "/") or path.startswith("/web"):
                    continue
                answer = keyed.client.request(
                    method, keyed.url + path.replace("{", "").replace("}", ""), headers=headers
                )
                asked += 1
                refused += answer.status_code == 401
    listening = sum(
        line.split()[3] == "0A" and _inode_of(line) in _sockets(keyed.process.pid)
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    )
    rebound = keyed.client.get(keyed.url + "/health", headers={"host": "evil.example"}).status_code
    print(json.dumps({"asked": asked, "refused_401": refused, "listening_sockets": listening, "rebound": rebound}))
    assert asked == refused > 100 and listening == 1 and rebound == 403


def _inode_of(line: str) -> str:
    return line.split()[9]


def _sockets(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return found


def test_comparing_keys_takes_the_same_time() -> None:
    """20,000 samples: a key that shares its beginning with the right one is no slower to refuse."""
    from tokenmill.core.config import make_server_config
    from tokenmill.server.access import Access
    from tokenmill.server.errors import HttpError

    access = Access(make_server_config({}, api_key=list(KEYS)).listen)
    rng = random.Random(1)
    guesses = {size: (KEYS[0][:size] + "#" * (len(KEYS[0]) - size)).encode() for size in (0, 8, 16, 24)}
    times: dict[int, list[int]] = {size: [] for size in guesses}
    for _ in range(20_000):
        size = rng.choice(list(guesses))
        headers = {b"authorization": b"Bearer " + guesses[size]}
        began = time.perf_counter_ns()
        with contextlib.suppress(HttpError):
            access.tenant("/v1/models", headers)
        times[size].append(time.perf_counter_ns() - began)
    medians = {size: statistics.median(values) for size, values in times.items()}
    print(json.dumps({"median_ns_by_common_prefix": medians}))
    assert max(medians.values()) - min(medians.values()) < 1000


def test_a_thousand_canaries(keyed: Running) -> None:
    """Words of prompts, outputs and keys through every path: none is in the log, the metrics or an error."""
    header = {"x-api-key": KEYS[1]}
    answers = []
    for i in range(1000):
        word = f"CANARY{i:04d}x"
        bodies: list[tuple[str, Any]] = [
            ("/v1/completions", {"prompt": word, "max_tokens": 1}),
            ("/v1/completions", {"prompt": "x", "max_tokens": word}),
            ("/v1/completions", {"prompt": "x", "stop": [word] * 99}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": word}], "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": {"t": word}}]}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": word}},
            ),
            ("/v1/embeddings", {"input": word, "encoding_format": word}),
            ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"type": word}}}),
            ("/tokenize", {"prompt": word, "messages": [{"role": word}]}),
            (f"/{word}", {"prompt": word}),
        ]
        path, body = bodies[i % len(bodies)]
        answer = keyed.client.post(keyed.url + path, json=body, headers={**header, "user-agent": word})
        if answer.status_code >= 400:
            answers.append(answer.text)
    metrics = keyed.client.get(keyed.url + "/metrics", headers=header).text
    log = keyed.log.read_text()
    places = {"log": log, "metrics": metrics, "errors": "".join(answers)}
    found = {name: len(re.findall(r"CANARY\d{4}x", text)) for name, text in places.items()}
    found["keys"] = sum(text.count(key) for text in places.values() for key in KEYS)
    print(json.dumps({"found": found, "log_bytes": len(log), "errors": len(answers)}))
    assert not any(found.values()) and shown_key(digest(KEYS[1])) in log and len(answers) > 400
