"""Odd heads, odd numbers in paths and queries, and odd starts: never a 5xx, never a server that stands still."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pure.server.conftest import Starter, until
from tokenmill.core.config import ListenOptions, ServeOptions, ServerConfig
from tokenmill.core.errors import UserError
from tokenmill.server.listener import allow_restart
from tokenmill.server.log_writer import LogWriter
from tokenmill.server.logs import NAMES, JsonFormatter, set_up_logs
from tokenmill.server.run import _bind
from tokenmill.testing.hostile import ITEM, STANDING

HI = {"prompt": "abc", "max_tokens": 1}
ODD = [
    "",
    " ",
    "-1",
    "-0",
    "x",
    "1.5",
    "1e5",
    "nan",
    "inf",
    "-inf",
    "9" * 30,
    "9" * 5000,
    "\u0663",
    "\u00b2",
    "0x1",
    "1_0",
    "%00",
    "+1",
]


HOSTS = ["[::1]evil.com", "[::1", "::1]", "[]", "[::1]:x", "localhost:x", "a b", "local host", "user@localhost",
         "localhost/x", "localhost:80:80", "http://localhost", "localhost#", "\u00e9.com", "[localhost]",
         "localhost:999999", "x" * 300]  # fmt: skip


async def test_hosts_that_are_none(start: Starter) -> None:
    for flags in ({}, {"allowed_hosts": ["*"]}):
        served = await start(**flags)
        for host in HOSTS:
            answer = await served.client.get("/v1/models", headers={"host": host.encode("latin-1")})
            assert answer.status_code == 400 and "Host" in answer.json()["error"]["message"], host


async def test_hosts_that_are_ours(start: Starter) -> None:
    served = await start()
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]", "[::1]:8000", "localhost:"):
        assert (await served.client.get("/v1/models", headers={"host": host})).status_code == 200, host


ORIGINS = ["http://[::1", "http://[", "http://]", "http://[x]", "//", "http://\u2100.com", "null", "", "x",
           "http://localhost.evil", "http://localhost\u00e9", "http://" + "a" * 5000, "http://evil@localhost",
           "http://localhost/x", "javascript:1"]  # fmt: skip


async def test_origins_that_are_none_of_ours(start: Starter) -> None:
    """Each on every third path and each path with every third one: who judges them knows no paths."""
    served, anybody = await start(), await start(allowed_origins=["*"])
    paths = sorted(path for path in served.app.routes if "{" not in path)
    for number, origin in enumerate(ORIGINS):
        headers = {"origin": origin.encode()}
        for path in paths[number % 3 :: 3]:
            answer = await served.client.get(path, headers=headers)
            assert answer.status_code == 403, (origin, path, answer.status_code)
            assert (await anybody.client.get(path, headers=headers)).status_code < 500, (origin, path)
        asked = {**headers, "access-control-request-method": "POST"}
        assert (await served.client.options("/v1/models", headers=asked)).status_code == 403, origin


async def test_headers_that_come_twice(start: Starter) -> None:
    served = await start(api_key=["k"])
    for name, value in (
        ("host", "localhost"),
        ("authorization", "Bearer k"),
        ("x-api-key", "k"),
        ("origin", "http://a"),
    ):
        headers = [("authorization", "Bearer k"), ("host", "localhost")]
        headers = [pair for pair in headers if pair[0] != name] + [(name, value), (name, value)]
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 400


@pytest.mark.parametrize("value", ODD, ids=lambda v: repr(v)[:12])
async def test_odd_values_in_queries_paths_and_headers(start: Starter, value: str) -> None:
    """Every GET and DELETE route, every query parameter and every header that any of them reads."""
    served = await start(api_key=["k"])
    key = {"x-api-key": "k"}
    made = await served.client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2}, headers=key)
    talk = (await served.client.post("/v1/conversations", json={"items": [ITEM]}, headers=key)).json()["id"]
    item = (await served.client.get(f"/v1/conversations/{talk}/items", headers=key)).json()["last_id"]
    known = {**STANDING, "response_id": made.json()["id"], "id": made.json()["id"], "name": "fake"}
    known |= {"conversation_id": talk, "item_id": item}
    names = ("starting_after", "stream", "since", "limit", "include", "after", "before", "order", "model")
    for route in served.app.app.routes:
        for method in route.methods & {"GET", "HEAD", "DELETE"}:
            right = re.sub(r"{(\w+)(:path)?}", lambda found: known[found[1]], route.path)
            for path in {right, re.sub(r"{(\w+)(:path)?}", lambda _: value.replace("%", "%25") or "%20", route.path)}:
                params = {**dict.fromkeys(names, value), **({"stream": "true"} if path == right else {})}
                if method == "DELETE" and path == right:
                    continue
                answer = await served.client.request(method, path, params=params, headers=key)
                assert answer.status_code in (200, 304, 400, 404, 405, 426, 501), (method, path, answer.text)
    for header in (
        "x-vllm-priority",
        "x-data-parallel-rank",
        "x-session-id",
        "x-request-id",
        "traceparent",
        "tracestate",
    ):
        if value.isascii():
            answer = await served.post("/v1/completions", HI, **key, **{header: value})
            assert answer.status_code in (200, 400), (header, answer.text)
    length = {**key, "content-length": value, "content-type": "application/json"}
    if value.isascii():
        assert (await served.client.post("/v1/completions", content=b"{}", headers=length)).status_code in (400, 413)


async def test_a_path_names_all_methods_that_it_takes(start: Starter) -> None:
    served = await start()
    taken: dict[str, set[str]] = {}
    for route in served.app.app.routes:
        path = re.sub(r"{(\w+)(:path)?}", "x", route.path)
        taken.setdefault(path, set()).update(route.methods | ({"HEAD"} if "GET" in route.methods else set()))
    assert sum(len(methods - {"HEAD"}) > 1 for methods in taken.values()) > 4
    for path, methods in taken.items():
        answer = await served.client.request("PROPFIND", path)
        assert answer.status_code == 405 and methods <= set(answer.headers["allow"].split(", ")), path


async def test_starting_after_is_a_number(start: Starter) -> None:
    served = await start()
    made = (await served.client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2})).json()
    for after in (*ODD, "1-", "--1"):
        asked = {"stream": "true", "starting_after": after}
        answer = await served.client.get(f"/v1/responses/{made['id']}", params=asked)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "starting_after", after
    rest = await served.client.get(f"/v1/responses/{made['id']}", params={"stream": "true", "starting_after": "1"})
    assert rest.status_code == 200 and '"sequence_number":2' in rest.text and '"sequence_number":1,' not in rest.text


# ---------------------------------------------------------------- starts


def listening(**given: Any) -> ServerConfig:
    return ServerConfig(listen=ListenOptions(**given))


def test_two_servers_on_one_port_while_the_first_one_loads() -> None:
    with _bind(listening(port=0)) as first:
        port = first.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(UserError, match=f"Cannot listen on .*{port}.*--port"):
                _bind(listening(port=port, host=host))


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_machines_is_the_hosts_fault(host: str) -> None:
    with pytest.raises(UserError, match="Choose another with --host") as refused:
        _bind(listening(port=0, host=host))
    assert refused.value.param == "host"


def test_a_port_is_free_again_at_once() -> None:
    """Connections that ended a moment ago do not keep a server from starting again."""
    with _bind(listening(port=0)) as first:
        port = first.getsockname()[1]
        allow_restart(first)
        first.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            taken, _ = first.accept()
            taken.close()  # this end waits now
            assert client.recv(1) == b""
    with _bind(listening(port=port)) as again:
        allow_restart(again)
        again.listen()


def test_two_servers_on_one_unix_socket(tmp_path: Path) -> None:
    where = str(tmp_path / "socket")
    with _bind(listening(uds=where)), pytest.raises(UserError, match="--uds"):
        _bind(listening(uds=where))
    with _bind(listening(uds=where)):  # what is left of one that has ended is taken over
        pass


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_holes(closed: str) -> None:
    """No file and no socket gets the number of a stream that people print to."""
    code = (
        "import os, sys; from tokenmill.cli.missing_streams import open_missing_streams; open_missing_streams(); "
        "import socket; "
        "print('out'); print('err', file=sys.stderr); sys.stdin.read(); "
        "made = socket.socket(); sys.exit(0 if made.fileno() > 2 and all(os.fstat(i) for i in range(3)) else 9)"
    )
    found = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], timeout=60, stdin=subprocess.DEVNULL
    )
    assert found.returncode == 0


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_the_command_ends_as_it_should_without_streams(closed: str) -> None:
    code = "from tokenmill.cli.main import main; main()"
    words = ["serve", "/no/such/model", "--port", "0"]
    command = ["bash", "-c", f'exec "$0" -c "$@" {closed}', sys.executable, code, *words]
    assert subprocess.run(command, timeout=120, stdin=subprocess.DEVNULL, capture_output=True).returncode == 2


async def test_a_log_that_nobody_reads_stops_nobody(start: Starter) -> None:
    reading, writing = os.pipe()
    handler = LogWriter(writing, most=50)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("tokenmill.access")
    before = logger.handlers, logger.level, logger.propagate
    others = {name: logging.getLogger(name).handlers for name in NAMES if name != logger.name}
    for name in others:  # the figure is of all writers, and other tests may have left some
        logging.getLogger(name).handlers = []
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        served = await start()
        for _ in range(700):  # a pipe holds about 317 lines
            assert (await served.client.get("/v1/models", headers={"x-request-id": "x" * 128})).status_code == 200
        await until(lambda: handler.dropped > 0)
        metrics = (await served.client.get("/metrics")).text
        assert float(re.search(r"^tokenmill:dropped_log_lines (\S+)", metrics, re.M)[1]) == handler.dropped > 0
        taken = os.read(reading, 1 << 20)
        assert taken.count(b"\n") > 100  # what was written is whole, and goes on when somebody reads
    finally:
        logger.handlers, logger.level, logger.propagate = before
        for name, handlers in others.items():
            logging.getLogger(name).handlers = handlers
        os.close(reading)  # the thread finds nobody, and counts


async def test_a_log_whose_reader_has_left(start: Starter) -> None:
    reading, writing = os.pipe()
    handler = LogWriter(writing)
    os.close(reading)
    handler.emit(logging.makeLogRecord({"msg": "x"}))
    await until(lambda: handler.dropped == 1)


def test_logs_go_to_an_outlet() -> None:
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in NAMES}
    try:
        set_up_logs(ServeOptions())
        assert all(isinstance(handler, LogWriter) for name in NAMES for handler in logging.getLogger(name).handlers)
    finally:
        for name, (handlers, propagate) in before.items():
            logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate
