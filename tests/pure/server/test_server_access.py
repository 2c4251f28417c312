"""Keys on every route, Host and Origin, nothing secret in logs or answers."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
from typing import Any

import pytest

from tests.pure.server.conftest import Starter
from tests.thinned import WHOLE
from tokenmill.core.config import ListenOptions
from tokenmill.server.access import Access
from tokenmill.server.errors import HttpError
from tokenmill.server.logs import JsonFormatter

KEYS = ["first-key-aaaaaaaaaaaaaaaaaaaa", "second-key-bbbbbbbbbbbbbbbbbb"]
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")


async def test_every_route_and_method_needs_a_key(start: Starter) -> None:
    served = await start(api_key=KEYS)
    paths = {
        *served.app.routes,
        "/",
        "/nope",
        "/docs",
        "/redoc",
        "/static/x",
        "/v1/models/fake",
        "//health",
        "/v1/models/",
    }
    assert len(paths) >= 15
    none: dict[str, str] = {}
    wrong = [{"authorization": "Bearer wrong"}, {"x-api-key": KEYS[0][:-1]}, {"authorization": KEYS[0]}]
    pairs = itertools.product(sorted(paths - {"/health", "/v1/health", "/ready"}), METHODS)
    for number, (path, method) in enumerate(pairs):
        for headers in [none, *(wrong if WHOLE else [wrong[number % 3]])]:
            response = await served.client.request(method, f"http://localhost{path}", headers=headers)
            open_file = path in served.app.keyless and method in ("GET", "HEAD")
            assert response.status_code == (200 if open_file else 401), (method, path, headers)
    for path in ("/health", "/v1/health", "/ready", "/health/"):
        assert (await served.client.get(path)).status_code == 200
    assert all(path == "/" or path.startswith("/static/") for path in served.app.keyless)


async def test_each_key_opens_in_both_headers(start: Starter) -> None:
    served = await start(api_key=KEYS)
    for key in KEYS:
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"authorization": f"bearer {key}"}):
            response = await served.client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert response.status_code == 200
    refused = await served.client.get("/v1/models")
    assert refused.json()["error"]["type"] == "AuthenticationError" and refused.headers["www-authenticate"] == "Bearer"


def test_every_key_is_compared_whatever_the_others_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time by its digest and in constant time: how long that takes tells nothing of a key."""
    keys, compared, honest = ["first-key", "second-key", "third"], list[int](), hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append(len(a) - len(b)), honest(a, b))[1])
    access = Access(ListenOptions(api_key=keys))
    for key in (*keys, "first-kex", "f", "x" * 500):
        with contextlib.nullcontext() if key in keys else pytest.raises(HttpError):
            access.tenant("/v1/models", {b"authorization": b"Bearer " + key.encode()})
    assert compared == [0, 0, 0] * 6


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]:80"])
async def test_foreign_hosts_are_refused(start: Starter, host: str) -> None:
    served = await start()
    response = await served.client.get("/v1/models", headers={"host": host})
    assert response.status_code == 403 and response.json()["error"]["code"] == 403


async def test_a_host_is_asked_for_where_names_are_told_apart(start: Starter) -> None:
    for flags, status in (({}, 400), ({"host": "0.0.0.0"}, 200)):
        served = await start(**flags)
        request = served.client.build_request("GET", "/v1/models")
        del request.headers["host"]
        answer = await served.client.send(request)
        assert answer.status_code == status and (status == 200 or "Host" in answer.json()["error"]["message"])


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"])
async def test_local_hosts_are_served(start: Starter, host: str) -> None:
    served = await start()
    assert (await served.client.get("/v1/models", headers={"host": host})).status_code == 200


async def test_hosts_that_are_listed_or_a_public_address(start: Starter) -> None:
    listed = await start(allowed_hosts=["API.example:443"])
    assert (await listed.client.get("/v1/models", headers={"host": "api.example:80"})).status_code == 200
    assert (await listed.client.get("/v1/models", headers={"host": "other.example"})).status_code == 403
    public = await start(host="0.0.0.0")
    assert (await public.client.get("/v1/models", headers={"host": "any.example"})).status_code == 200


async def test_origins(start: Starter) -> None:
    closed = await start()
    foreign = {"origin": "http://evil.example"}
    assert (await closed.client.post("/v1/chat/completions", json=HELLO, headers=foreign)).status_code == 403
    own = await closed.client.post("/v1/chat/completions", json=HELLO, headers={"origin": "http://localhost"})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers
    asks = {**foreign, "access-control-request-method": "POST"}
    assert (await closed.client.options("/v1/chat/completions", headers=asks)).status_code == 403
    opened = await start(allowed_origins=['["https://a.example", "HTTP://Evil.example:80/"]'], api_key=KEYS)
    flight = await opened.client.options("/v1/chat/completions", headers=asks)
    assert flight.status_code == 204 and flight.headers["access-control-allow-origin"] == "http://evil.example"
    for method, names in (("DELETE", "authorization"), ("POST", "X-Stainless-OS,anthropic-version, anthropic-beta")):
        asks = {**foreign, "access-control-request-method": method, "access-control-request-headers": names}
        flight = await opened.client.options("/v1/responses/a", headers=asks)  # as the APIs' own clients do in a page
        assert method in flight.headers["access-control-allow-methods"].split(", ")
        assert names in flight.headers["access-control-allow-headers"]
    odd = {**asks, "access-control-request-headers": "a: b"}
    flight = await opened.client.options("/v1/responses/a", headers=odd)
    assert "a: b" not in flight.headers["access-control-allow-headers"]
    without = await opened.client.post("/v1/chat/completions", json=HELLO, headers=foreign)
    assert without.status_code == 401 and without.headers["access-control-allow-origin"] == "http://evil.example"


async def test_nothing_sensitive_is_logged_or_echoed(start: Starter, caplog: pytest.LogCaptureFixture) -> None:
    served = await start(api_key=[KEYS[0]])
    secret = "CANARY-7f3a"
    auth = {"authorization": f"Bearer {KEYS[0]}"}
    bodies: list[Any] = [
        {"prompt": secret, "max_tokens": 3},
        {"prompt": secret, "temperature": secret},
        {"prompt": secret, "stop": [secret] * 20},
        {"prompt": [secret]},
        {"prompt": secret, "max_tokens": 3, "stream": True},
        {"prompt": secret, "structured_outputs": {"regex": secret}},
        {"prompt": secret, "max_tokens": 10**6},
        {"messages": [{"role": secret, "content": secret}], "max_tokens": 1},
    ]
    texts = []
    with caplog.at_level(logging.DEBUG):
        for name in ("tokenmill.access", "tokenmill.server"):
            logging.getLogger(name).propagate = True
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"):
            for body in bodies:
                response = await served.client.post(path, json=body, headers=auth)
                if response.status_code >= 400:
                    texts.append(response.text)
        await served.client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
        await served.client.get(f"/{secret}?key={secret}", headers=auth)
    lines = [JsonFormatter().format(record) for record in caplog.records if record.name.startswith("tokenmill")]
    texts += [*lines, (await served.client.get("/metrics", headers=auth)).text]
    assert len(lines) > 20
    assert not [t for t in texts if secret in t or KEYS[0] in t]
