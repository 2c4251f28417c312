"""The OpenAPI document is right, and what it forbids is refused: schemathesis against a server over fake engines.

TOKENMILL_FUZZ_EXAMPLES raises the number of examples per operation (`make test-reliability` takes 500).
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, status_code_conformance

from tests.pure.server.conftest import Starter
from tokenmill.core.config import make_server_config
from tokenmill.server.app import make_app, make_context
from tokenmill.server.listener import HttpServer
from tokenmill.server.run import _bind
from tokenmill.testing.fake_generator import FakeOptions, fake_fleet

EXAMPLES = int(os.environ.get("TOKENMILL_FUZZ_EXAMPLES", "6"))
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback")


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server in a thread with an event loop of its own."""
    ready: list[str] = []
    begun = threading.Event()
    ended = threading.Event()

    async def main() -> None:
        config = make_server_config({}, port=0, log_level="error")
        fake = await fake_fleet(FakeOptions(max_model_len=512))
        context = make_context(fake.fleet, config)
        sock = _bind(config)
        http = HttpServer(make_app(context), config, sock)
        await http.start()
        ready.append(f"http://127.0.0.1:{sock.getsockname()[1]}")
        begun.set()
        while not ended.is_set():
            await asyncio.sleep(0.05)
        context.text.close()  # whoever is still connected after the last test is not waited for

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert begun.wait(120)
    yield ready[0]
    ended.set()
    thread.join(60)


@pytest.fixture(scope="session")
def document(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
STORES = (
    *("/v1/responses/compact", "/v1/responses/input_tokens", "/v1/chat/completions/{completion_id}"),
    *("/v1/conversations", "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"),
)
LISTS = (
    *("/v1/chat/completions", "/v1/chat/completions/{completion_id}", "/v1/responses/{response_id}/input_items"),
    *("/v1/conversations/{conversation_id}/items/{item_id}", "/v1/conversations/{conversation_id}/items"),
)
OTHERS = (
    *("/api/chat", "/api/embed", "/api/embeddings", "/api/generate", "/api/show"),
    *("/generate", "/generate_stream", "/classify", "/rerank", "/score"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/v2/models/{model}/generate", "/v2/models/{model}/infer"),
)
"""Other APIs word their errors in ways of their own."""
OPERATIONS = [
    *(("POST", path) for path in OPENAI + OTHERS),
    *(("POST", path) for path in STORES),
    *(("GET", path) for path in LISTS),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{name}", "/metrics")),
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_document_holds(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and operation.body is not None and method == "GET":
        pytest.skip("nothing in this request can be wrong")

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        response = case.call()
        assert not LEAK.search(response.text)
        if response.status_code == 413:
            return  # more items than are allowed, in more bytes than are read
        case.validate_response(response, checks=[not_a_server_error, negative_data_rejection, status_code_conformance])
        if response.status_code >= 400 and path not in OTHERS:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()


async def test_the_document_names_every_route_and_field(start: Starter) -> None:
    served = await start()
    found = (await served.client.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/tokenize"} <= found[
        "paths"
    ].keys()
    text = (await served.client.get("/openapi.json")).text
    for reference in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert reference in found["components"]["schemas"]
    message = found["components"]["schemas"]["Message"]["properties"]  # OpenAI's, whoever else has a Message
    assert "tool_call_id" in message and "images" not in message
    chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "stream_options", "logit_bias", "min_p"} <= chat["properties"].keys()


async def test_the_document_names_what_stands_in_addresses(start: Starter) -> None:
    served = await start()
    found = (await served.client.get("/openapi.json")).json()["paths"]
    for path, operations in found.items():
        for method, operation in operations.items():
            places = {(each["name"], each["in"]): each["required"] for each in operation["parameters"]}
            inner = {name for name, kind in places if kind == "path"}
            assert inner == set(re.findall(r"\{(\w+)\}", path)), (method, path)
            assert len(places) == len(operation["parameters"]) and all(places[name, "path"] for name in inner)
            assert not operation["parameters"] or {"400", "404"} <= operation["responses"].keys(), (method, path)
    for path, method, names in (
        ("/v1/chat/completions", "get", {"after", "limit", "model", "order"}),
        ("/v1/chat/completions", "post", {"model"}),
        ("/v2/models/{model}/infer", "post", {"model"}),
        ("/v1/card", "get", {"model"}),
        ("/sleep", "post", {"level", "mode", "model"}),
    ):
        assert {each["name"] for each in found[path][method]["parameters"]} == names, (method, path)
    assert "501" in found["/api/pull"]["post"]["responses"]
