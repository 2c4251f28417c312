"""TLS, client certificates, unix sockets and path prefixes, against a real server process."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cpu.server.conftest import Running
from tokenmill.core.config import ListenOptions, ServerConfig
from tokenmill.core.errors import UserError
from tokenmill.server.protocol import RESERVE
from tokenmill.server.run import _bind

Launch = Callable[..., Running]
BODY = {"prompt": "The mill", "max_tokens": 3}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    folder = tmp_path_factory.mktemp("tls")
    asked = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    asked += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    asked += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(asked, check=True, capture_output=True)
    return folder


def flags_of(folder: Path) -> list[str]:
    return ["--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem")]


MOST = 8
"""Connections to `secure`."""


@pytest.fixture(scope="module")
def secure(launch: Launch, certificates: Path) -> Running:
    return launch(*flags_of(certificates), "--max-connections", str(MOST), "--read-timeout", "3")


@pytest.fixture(scope="module")
def prefixed(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Its folder holds modules of somebody else's."""
    folder = tmp_path_factory.mktemp("modules")
    for name in ("types", "json", "struct", "socket", "re", "random"):
        (folder / f"{name}.py").write_text("raise SystemExit('another module of this name')")
    return launch("--root-path", "/llm/", "--api-key", "k", folder=folder)


def test_tls_answers_and_plain_http_does_not(secure: Running, certificates: Path) -> None:
    running = secure
    assert running.url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cafile=str(certificates / "cert.pem"))
    with httpx.Client(verify=context, timeout=120) as client:
        answer = client.post(running.url + "/v1/completions", json={**BODY, "stream": True})
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.TransportError):
        httpx.get(running.url.replace("https", "http") + "/health", timeout=120)
    assert running.process.poll() is None


def test_handshakes_are_counted_and_have_a_deadline(secure: Running, certificates: Path) -> None:
    """Connections that never say a word of TLS are connections: no more than the ceiling stay, and none for long."""
    running = secure
    context = ssl.create_default_context(cafile=str(certificates / "cert.pem"))
    address = ("127.0.0.1", urlsplit(running.url).port)
    dumb = [socket.create_connection(address) for _ in range(MOST + RESERVE + 40)]
    ended = 0
    for sock in dumb:
        sock.settimeout(60)
        try:
            ended += sock.recv(100) == b""
        except ConnectionResetError:
            ended += 1
    assert ended == len(dumb)
    with httpx.Client(verify=context, timeout=120) as client:
        assert client.post(running.url + "/v1/completions", json=BODY).status_code == 200
    slow = socket.create_connection(address)  # its first words come in pieces
    slow.settimeout(60)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    side = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    while True:
        try:
            side.do_handshake()
            break
        except ssl.SSLWantReadError:
            hello = outgoing.read()
            for at in range(0, len(hello), 100):
                slow.sendall(hello[at : at + 100])
            heard = slow.recv(1 << 16)
            assert heard, "the server has closed"
            incoming.write(heard)
    side.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    slow.sendall(outgoing.read())
    while data := slow.recv(1 << 16):
        incoming.write(data)
    assert side.read(1 << 16).startswith(b"HTTP/1.1 200")
    assert running.process.poll() is None
    for sock in (*dumb, slow):
        sock.close()


def test_clients_must_show_a_certificate_when_a_ca_is_given(launch: Launch, certificates: Path) -> None:
    running = launch(*flags_of(certificates), "--ssl-ca-certs", str(certificates / "cert.pem"))
    bare = ssl.create_default_context(cafile=str(certificates / "cert.pem"))
    with pytest.raises(httpx.TransportError):
        httpx.get(running.url + "/health", verify=bare, timeout=120)
    bare.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    assert httpx.get(running.url + "/health", verify=bare, timeout=120).status_code == 200


def test_a_unix_socket_is_for_its_owner_and_survives_a_stale_file(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "mill.sock"
    with socket.socket(socket.AF_UNIX) as dead:  # left by a server that was killed
        dead.bind(str(path))
    running = launch("--uds", str(path))
    assert running.url == f"unix:{path}"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=120) as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["finish_reason"] == "length"
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 403
    again = subprocess.run(
        [*running.process.args[:3], "serve", running.process.args[4], "--uds", str(path)],  # type: ignore[index,list-item]
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
        check=False,
    )
    assert again.returncode == 2 and "Cannot listen" in again.stderr


def test_an_address_that_is_no_socket_stays_what_it_is(tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("dear miller")
    for listen, advice in (
        (ListenOptions(uds=str(letter)), "--uds"),
        (ListenOptions(uds=str(tmp_path / "no" / "where")), "--uds"),
        (ListenOptions(host="999.1.1.1"), "--host"),
    ):
        with pytest.raises(UserError, match=f"another with {advice}"):
            _bind(ServerConfig(listen=listen))
    assert letter.read_text() == "dear miller"


def test_it_starts_in_a_folder_with_modules_of_somebody_elses(prefixed: Running) -> None:
    """Neither the engine's process nor any other imports what lies there."""
    answer = httpx.post(prefixed.url + "/v1/completions", json=BODY, headers={"x-api-key": "k"}, timeout=120)
    assert answer.status_code == 200
    assert "another module" not in prefixed.log.read_text()


def test_behind_a_proxy_that_strips_a_prefix(prefixed: Running) -> None:
    running = prefixed

    def counted() -> float:
        with_key = httpx.get(running.url + "/metrics", headers={"x-api-key": "k"}, timeout=120).text
        found = re.search(
            r'http_requests_total\{handler="/v1/completions",method="POST",status="2xx"\} (\S+)', with_key
        )
        return float(found[1]) if found else 0.0

    before = counted()
    assert running.get("/health").status_code == 200
    assert running.post("/v1/completions", BODY).status_code == 401
    with_key = httpx.post(running.url + "/v1/completions", json=BODY, headers={"x-api-key": "k"}, timeout=120)
    assert with_key.status_code == 200
    assert counted() == before + 1


def test_a_proxy_that_keeps_the_prefix(prefixed: Running) -> None:
    running = prefixed
    headers = {"x-api-key": "k"}
    for root in ("", "/llm"):
        assert running.get(f"{root}/health").status_code == 200
        assert running.post(f"{root}/v1/completions", BODY).status_code == 401
        answer = httpx.post(f"{running.url}{root}/v1/completions", json=BODY, headers=headers, timeout=120)
        assert answer.status_code == 200
        error = httpx.post(f"{running.url}{root}/api/chat", json={}, headers=headers, timeout=120).json()["error"]
        assert isinstance(error, str)
    assert httpx.get(running.url + "/llmx/health", headers=headers, timeout=120).status_code == 404
    document = httpx.get(running.url + "/llm/openapi.json", headers=headers, timeout=120).json()
    assert document["servers"] == [{"url": "/llm"}]
