"""Bodies that cost more to read than to send: any shape in any field of any POST route stays within its budget."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import threading
import time
import tracemalloc
from typing import Any

import pytest

from tests.cpu_time import TRIES, cpu_time
from tests.pure.server.conftest import Served, Starter
from tokenmill.server.bodies import SMALL
from tokenmill.server.loop_lag import watch_lag
from tokenmill.testing.fake_generator import FakeOptions
from tokenmill.testing.hostile import SHAPES, VALID, body, path_of

TALK = [{"role": "user", "content": "a"}]
CHAT_BODY = {"model": "fake", "max_tokens": 2}
JSON = {"content-type": "application/json"}
SIZE = 1 << 17
CPU_S = 1.0
"""Of one request of 128 KiB; it was 0.8 s."""


EACH = 1 if os.environ.get("TOKENMILL_FAMILIES") else 5
"""Of the pairs of a field and a shape, one in so many: a field meets every fifth shape, a shape every fifth field."""
SAME = (
    "/v1/rerank",
    "/v2/rerank",
    "/reranking",
    "/v1/reranking",
    "/v1/score",
    "/",
    "/generate_stream",
    "/v2/models/{model}/generate_stream",
)
"""Routes that read what another one reads."""


def post_routes(served: Served) -> dict[str, Any]:
    """Paths of all routes that take a POST, with the schema of their body."""
    found = {}
    for route in served.app.app.routes:
        if "POST" in getattr(route, "methods", None) or ():
            extra = route.openapi_extra or {}
            content = extra.get("requestBody", {}).get("content", {})
            found[route.path] = content.get("application/json", {}).get("schema", {})
    return found


async def hit(served: Served, route: str, data: bytes) -> tuple[int, float]:
    """Send it, again while it takes too long; -> status and CPU time. No answer of a refusal is long."""
    bodies = served.context.bodies
    pools = bodies.threads, bodies.slow, served.context.text.threads
    for _ in range(TRIES):
        with cpu_time(*pools) as spent:
            response = await served.client.post(path_of(route), content=data, headers=JSON)
        if spent.seconds < CPU_S:
            break
    assert response.status_code < 500 or response.status_code in (501, 503), (response.status_code, response.text[:300])
    if response.status_code >= 400:
        assert len(response.content) < 4096
        assert b"error" in response.content
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests
    assert served.context.bodies.room == 16 * served.context.config.limits.max_body_bytes
    return response.status_code, spent.seconds


async def test_every_post_route_is_attacked(start: Starter) -> None:
    served = await start()
    assert post_routes(served).keys() == VALID.keys()
    for route, (valid, _) in VALID.items():
        response = await served.post(path_of(route), valid)
        refused = 501 if route.startswith("/api/") else 404
        assert response.status_code == (200 if valid else refused), (route, response.text)


def fields_of(route: str) -> tuple[str, ...]:
    return (*VALID[route][1], *(["unknown"] if route == "/v1/completions" else []))


@pytest.mark.parametrize("shape", SHAPES)
async def test_no_shape_of_a_value_is_a_weapon(start: Starter, shape: str) -> None:
    served = await start()
    value = SHAPES[shape](SIZE)
    pairs = [(route, field) for route in VALID if route not in SAME for field in fields_of(route)]
    for route, field in pairs[list(SHAPES).index(shape) % EACH :: EACH]:
        _, spent = await hit(served, route, body(VALID[route][0], field, value))
        assert spent < CPU_S, (route, field, shape, spent)


@pytest.mark.parametrize("route", VALID)
async def test_every_field_of_every_schema_stands_bulk(start: Starter, route: str) -> None:
    served = await start()
    values = [SHAPES[name](60_000) for name in ("ones", "objects", "names")]
    for number, field in enumerate(post_routes(served)[route].get("properties", {})):
        for value in values[number % EACH :: EACH]:
            _, spent = await hit(served, route, body(VALID[route][0], field, value))
            assert spent < CPU_S, (route, field, value[:20], spent)


def lists_of(schema: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Every array in a JSON schema."""
    found = [(path, schema)] if isinstance(schema, dict) and schema.get("type") == "array" else []
    inner = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    return found + [each for name, part in inner for each in lists_of(part, f"{path}.{name}")]


async def test_the_collector_stays_as_it_was(start: Starter) -> None:
    """Reading a body does without it for a while; whoever has turned it off for good has his way."""
    served = await start()
    for on in (False, True):
        (gc.enable if on else gc.disable)()
        try:
            response = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "unknown": "a" * SMALL})
            assert response.status_code == 200 and gc.isenabled() is on
        finally:
            gc.enable()


async def test_every_list_has_a_ceiling(start: Starter) -> None:
    served = await start()
    found = [(route, where, part) for route, schema in post_routes(served).items() for where, part in lists_of(schema)]
    assert len(found) > 50
    assert not [(route, where) for route, where, part in found if "maxItems" not in part]


def core_lists(schema: Any) -> list[dict[str, Any]]:
    """Every list in a core schema of pydantic."""
    found = [schema] if isinstance(schema, dict) and schema.get("type") == "list" else []
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
    return found + [each for part in inner for each in core_lists(part)]


def test_every_list_ends_at_its_first_finding() -> None:
    from tokenmill.server.anthropic.schemas import MessagesRequest
    from tokenmill.server.kserve.schemas import InferRequest
    from tokenmill.server.llamacpp import schemas as llamacpp
    from tokenmill.server.ollama import schemas as ollama
    from tokenmill.server.openai import schemas as openai
    from tokenmill.server.responses.schemas import ResponsesRequest
    from tokenmill.server.scoring import schemas as scoring
    from tokenmill.server.scoring.schemas import ClassifyRequest, RerankRequest, ScoreRequest
    from tokenmill.server.tgi.schemas import TgiRequest

    models = [MessagesRequest, InferRequest, ResponsesRequest, ClassifyRequest, RerankRequest, ScoreRequest, TgiRequest]
    models += [ollama.GenerateRequest, ollama.ChatRequest, ollama.EmbedRequest, openai.ChatRequest]
    models += [openai.CompletionRequest, openai.EmbeddingRequest, openai.TokenizeRequest, openai.DetokenizeRequest]
    models += [llamacpp.CompletionRequest, llamacpp.InfillRequest, llamacpp.TemplateRequest, llamacpp.EmbeddingRequest]
    models += [scoring.EmbedRequest, scoring.SimilarityRequest, scoring.TeiRerankRequest, openai.PoolingRequest]
    for model in models:
        for each in core_lists(model.__pydantic_core_schema__):
            assert each.get("fail_fast") and each.get("max_length"), (model, each)


async def test_memory_stays_in_proportion(start: Starter) -> None:
    """What reading holds at its peak, for the shapes that make the most objects of the fewest bytes."""
    served = await start(max_body_bytes=16 << 20)
    for route, field in (
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "metadata"),
    ):
        for shape in (
            "ones",
            "objects",
            "lists",
            "texts",
            "names of objects",
            "messages",
            "a content of ones",
            "deep lists",
        ):
            data = body(VALID[route][0], field, SHAPES[shape](8 << 20))
            tracemalloc.start()
            try:
                await hit(served, route, data)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < 4 * len(data), (route, field, shape, peak / len(data))


@pytest.mark.parametrize(
    "number",
    [
        "18446744073709551616",
        "-9223372036854775809",
        "1e999",
        "-1e999",
        "1E+400",
        "9" * 400,
        "9" * 5000,
        "1" + "0" * 309 + ".5",
    ],
    ids=lambda text: text[:22],
)
async def test_numbers_that_no_message_can_carry(start: Starter, number: str) -> None:
    """Anywhere: at the top, nested in free values, in fields that nobody knows."""
    served = await start()
    for route, (valid, _) in VALID.items():
        if not valid or route in SAME:
            continue
        for field in ("metadata", "tools", "unknown"):
            for value in (number, f'{{"a":{{"b":[1,{number}]}}}}'):
                response = await served.client.post(
                    path_of(route), content=body(valid, field, value.encode()), headers=JSON
                )
                assert response.status_code == 400, (route, field, value[:60], response.text)
                assert len(response.content) < 1000 and "error" in response.text


@pytest.mark.parametrize(
    "number", ["18446744073709551615", "-9223372036854775808", "1e308", "0." + "1" * 400, "1e-999"]
)
async def test_numbers_that_can_be_carried(start: Starter, number: str) -> None:
    served = await start()
    for value in (number, f'"{"9" * 400} 1e999"', f'{{"a \\\\":{number},"1e999":[{number}]}}'):
        data = body(VALID["/v1/completions"][0], "unknown", value.encode())
        response = await served.client.post("/v1/completions", content=data, headers=JSON)
        assert response.status_code == 200, response.text


async def test_a_number_in_a_text_that_is_a_schema(start: Starter) -> None:
    served = await start()
    for field in ("guided_json", "json_schema"):
        wrong = {"prompt": "a", field: json.dumps({"const": 2**64})}
        assert (await served.post("/v1/completions", wrong)).status_code == 400


async def test_errors_do_not_send_back_what_came(start: Starter) -> None:
    served = await start()
    long = "x" * 300_000
    cases: list[tuple[str, Any]] = [
        ("/v1/chat/completions", {"messages": TALK, "tool_choice": {"type": "function", "function": {"name": long}}}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {long: 1}}),
        ("/v1/completions", {"prompt": "a", "model": long[:1000]}),
        ("/v1/responses", {"input": [{"type": long}]}),
        ("/v1/responses", {"input": "a", "include": [long]}),
        ("/v1/responses", {"input": "a", "tools": [{"type": long}]}),
        ("/v1/responses", {"input": "a", "metadata": {long: 1}}),
        ("/v1/messages", {**CHAT_BODY, "messages": [{"role": "user", "content": [{"type": long}]}]}),
        ("/api/chat", {"model": long, "messages": TALK}),
        (
            "/v2/models/fake/infer",
            {"inputs": [{"name": long[:256], "shape": [1], "datatype": "BYTES", "data": [1, 2]}]},
        ),
        ("/generate", {"prompt": "a", long: 1, "logit_bias": {long: 1}}),
        ("/v1/responses", {"input": "a", "previous_response_id": long[:256]}),
    ]
    for path, given in cases:
        response = await served.post(path, given)
        assert 400 <= response.status_code < 500, (path, response.text[:200])
        assert len(response.content) < 2000, (path, len(response.content))


async def test_bodies_that_are_held_have_a_ceiling_together(start: Starter) -> None:
    served = await start(max_body_bytes=100_000)
    bodies = served.context.bodies
    bodies.room = 50_000  # others hold the rest
    large = {"prompt": "a", "max_tokens": 1, "unknown": "x" * 60_000}
    refused = await served.post("/v1/completions", large)
    assert refused.status_code == 503 and "retry-after" in refused.headers and bodies.room == 50_000
    assert (await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})).status_code == 200
    bodies.room = 1_600_000
    assert (await served.post("/v1/completions", large)).status_code == 200 and bodies.room == 1_600_000


async def test_prompts_times_parameters_have_a_ceiling(start: Starter) -> None:
    served = await start()
    many = {"prompt": ["a"] * 512, "max_tokens": 1, "bad_words": [f"w{i}" for i in range(512)]}
    status, spent = await hit(served, "/v1/completions", json.dumps(many).encode())
    assert status == 400 and spent < CPU_S
    allowed = {"prompt": ["a"] * 512, "max_tokens": 1, "allowed_token_ids": list(range(250)) * 400}
    assert (await served.post("/v1/completions", allowed)).status_code == 400
    assert (await served.post("/v1/completions", {"prompt": ["a"] * 64, "max_tokens": 1})).status_code == 200


async def test_outputs_that_repeat_the_prompt_have_a_ceiling(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=1 << 20))
    long, ids = "a" * 300_000, [97] * 300_000
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": long}]}
    more: dict[str, Any] = {"max_tokens": 1, "n": 100, "temperature": 1}
    chat, complete = "/v1/chat/completions", "/v1/completions"
    going = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    for path, asked in (
        (complete, {"prompt": long, "echo": True}),
        (complete, {"prompt": ids, "return_token_ids": True}),
        (chat, {**talk, **going}),
        (chat, {**talk, "return_token_ids": True, "stream": True}),
        (chat, {**talk, "return_prompt_text": True, "stream": True}),
    ):
        refused = await served.post(path, {**asked, **more})
        assert refused.status_code == 400 and "repeat" in refused.json()["error"]["message"], asked.keys()
        assert (await served.post(path, {**asked, **more, "n": 2})).status_code == 200
    assert (await served.post(complete, {"prompt": long, **more})).status_code == 200  # nothing is repeated


async def test_what_takes_time_is_done_in_threads(start: Starter) -> None:
    bodies = (await start()).context.bodies
    assert await bodies.run_in_thread(SMALL, threading.current_thread) is threading.current_thread()
    assert (await bodies.run_in_thread(SMALL + 1, threading.current_thread)).name.startswith("tokenmill-body")


async def test_the_lag_of_the_loop_is_seen(start: Starter) -> None:
    metrics = (await start()).context.shared.metrics
    watcher = asyncio.create_task(watch_lag(metrics.saw_lag, 0.01))
    await asyncio.sleep(0)  # it begins
    time.sleep(0.3)  # what must never happen
    await asyncio.sleep(0.05)  # timers end in their order: the watcher's was first
    watcher.cancel()
    (worst,) = re.findall(rb"^tokenmill:event_loop_worst_lag_seconds (\S+)", metrics.render(), re.M)
    assert float(worst) > 0.25
    assert b"tokenmill:event_loop_worst_lag_seconds 0.0\n" in metrics.render()  # since the last look
    assert b"tokenmill:event_loop_lag_seconds_bucket" in metrics.render()
