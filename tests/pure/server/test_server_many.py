"""Many models behind one address, over fake engines: every API reaches the right one, waits for it, and lists it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest
from fastapi import Request

from tests.pure.server.conftest import until
from tests.pure.server.server_many_helpers import LONG, SAYS
from tests.pure.server.server_many_helpers import build as shared_build
from tokenmill.core.config import make_config
from tokenmill.core.errors import UserError
from tokenmill.server import model_lookup
from tokenmill.server.access import Rights, digest, shown_key
from tokenmill.server.bodies import Parcel
from tokenmill.server.errors import HttpError
from tokenmill.server.many_models.entry import Spec, State
from tokenmill.server.request_job import Job

build = shared_build

TALK = [{"role": "user", "content": "Who are you?"}]


ASKED: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": ({"messages": TALK}, lambda a: a["choices"][0]["message"]["content"]),
    "/v1/completions": ({"prompt": "x", "max_tokens": 40}, lambda a: a["choices"][0]["text"]),
    "/invocations": ({"messages": TALK}, lambda a: a["choices"][0]["message"]["content"]),
    "/v1/responses": ({"input": "Hi", "store": False}, lambda a: a["output"][0]["content"][0]["text"]),
    "/v1/messages": ({"messages": TALK, "max_tokens": 40}, lambda a: a["content"][0]["text"]),
    "/api/chat": ({"messages": TALK, "stream": False}, lambda a: a["message"]["content"]),
    "/api/generate": ({"prompt": "Hi", "stream": False}, lambda a: a["response"]),
    "/generate?model={name}": ({"inputs": "Hi", "parameters": {"max_new_tokens": 40}}, lambda a: a["generated_text"]),
    "/v2/models/{name}/generate": ({"text_input": "x", "parameters": {"max_tokens": 40}}, lambda a: a["text_output"]),
    "/completion": ({"prompt": "x", "n_predict": 40}, lambda a: a["content"]),
    "/v1/responses/input_tokens": ({"input": "Hi"}, None),
    "/v1/messages/count_tokens": ({"messages": TALK}, None),
    "/v1/embeddings": ({"input": "Hi"}, None),
    "/tokenize": ({"prompt": "Hi"}, None),
    "/detokenize": ({"tokens": [70]}, None),
    "/api/embed": ({"input": "Hi"}, None),
    "/api/show": ({}, None),
    "/apply-template?model={name}": ({"messages": TALK}, None),
    "/rerank": ({"query": "a", "documents": ["b"]}, None),
    "/embed?model={name}": ({"inputs": "a"}, None),
}
LENGTHS = {
    "/tokenize": lambda a: a["max_model_len"],
    "/api/show": lambda a: next(v for k, v in a["model_info"].items() if k.endswith("context_length")),
}


async def test_every_api_reaches_the_model_that_it_names(build: Any) -> None:
    city = build(memory=None)
    for path, (body, said) in ASKED.items():
        for name in SAYS:
            before = city.entry(name).life.used
            named = {} if "{name}" in path else {"model": f"{name}-alias"}
            answer = await city.post(path.format(name=name), named | body)
            assert answer.status_code == 200, (path, answer.text)
            assert city.entry(name).life.used > before, path
            if said is not None:
                assert said(answer.json()) == SAYS[name], path
            if path in LENGTHS:
                assert LENGTHS[path](answer.json()) == LONG[name]
    for path in ("/props", "/slots", "/info", "/tokenizer_info", "/v1/engine", "/v1/card"):
        told = [json.dumps(await city.get(f"{path}?model={name}")) for name in SAYS]
        assert all(str(LONG[name]) in each for name, each in zip(SAYS, told, strict=True)), path


WITHOUT_MODEL = {
    *("/health", "/v1/health", "/ready", "/ping", "/version", "/load", "/metrics", "/openapi.json"),
    *("/v1/models", "/models", "/v1/models/{name:path}", "/models/load", "/models/unload", "/api/tags", "/api/ps"),
    *("/sleep", "/wake_up", "/is_sleeping"),
    *("/api/version", "/api/generate", "/api/chat", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/{model}"),
    *("/v2/models/{model}/versions/1", "/v2/models/{model}/versions/1/ready"),
    *("/v2/models/{model}/ready", "/v1/engine", "/v1/card", "/v1/requests", "/v1/requests/{id}"),
    *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items"),
    *("/v1/responses/{response_id}/cancel", "/v1/chat/completions"),
}
"""Paths on which nothing is loaded before they look: they list, tell, keep, or choose a model themselves."""
KEPT = ("/v1/conversations", "/v1/chat/completions/", "/static/", "/api/")


def test_every_route_is_of_a_model_or_of_the_server(build: Any) -> None:
    about = {}
    for route in build().app.app.routes:
        endpoint = getattr(route, "endpoint", None)
        inner = getattr(endpoint, "__wrapped__", endpoint)
        for method in route.methods - {"HEAD"}:
            about[method, route.path] = hasattr(inner, "about_model")
    without = {path for (_, path), of_model in about.items() if not of_model}
    assert {p for p in without if p not in WITHOUT_MODEL and not p.startswith(KEPT)} <= {"/"}
    assert about["POST", "/v1/chat/completions"] and not about["GET", "/v1/chat/completions"]
    assert about["POST", "/"] and about["POST", "/v1/responses"] and sum(about.values()) >= 35


async def test_nothing_is_loaded_before_it_is_asked_for(build: Any) -> None:
    city = build(held_up=True)
    assert (await city.client.get("/health")).status_code == 200
    cards = (await city.get("/v1/models"))["data"]
    assert [card["id"] for card in cards] == [each for name in SAYS for each in (name, f"{name}-alias")]
    assert {card["status"]["value"] for card in cards} == {"unloaded"}
    assert next(each["name"] for each in (await city.get("/api/tags"))["models"]) == "red:latest"
    assert (await city.get("/api/ps"))["models"] == []
    assert (await city.get("/v2/models/blue"))["name"] == "blue"
    assert (await city.get("/v1/engine?model=blue"))["catalogue"][0]["status"] == {"value": "unloaded"}
    card = await city.get("/v1/card?model=blue")
    assert card["model"] == "blue" and card["can"]["chat"] and not city.loaded()
    waiting = [asyncio.ensure_future(city.post("/v1/completions", {"model": "red", "prompt": "x"})) for _ in range(3)]
    await until(lambda: city.entry("red").life.waiting == 3)
    assert (await city.get("/v1/models/red"))["tokenmill"]["state"] == "loading"
    city.gate.set()
    assert {(await each).json()["choices"][0]["text"] for each in waiting} == {SAYS["red"]}
    assert city.entry("red").life.loads == 1 and city.loaded() == ["red"]
    assert (await city.get("/v1/models/red"))["status"] == {"value": "loaded"}
    assert 'tokenmill:model_state{model="red",state="ready"} 1.0' in (await city.client.get("/metrics")).text


async def test_an_unknown_model_is_each_apis_own_404(build: Any) -> None:
    city = build()
    shapes = {}
    for path, (body, _) in ASKED.items():
        answer = await city.post(path.format(name="nope"), {"model": "nope", **body})
        assert answer.status_code == 404 and any(
            f"'nope' {words}" in answer.text for words in ("does not exist here", "not found")
        ), path
        assert all(repr(name) in answer.text for name in city.shared.models.entries), path
        shapes[path] = answer.json()
    assert not city.loaded()
    assert (
        shapes["/api/chat"]["error"].startswith("model 'nope' not found") and shapes["/v1/messages"]["type"] == "error"
    )
    assert shapes["/v1/completions"]["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/chat/completions", {"messages": TALK}, b"data: [DONE]\n\n"),
        ("/v1/completions", {"prompt": "x"}, b"data: [DONE]\n\n"),
        ("/v1/messages", {"messages": TALK, "max_tokens": 40}, b"message_stop"),
        ("/v1/responses", {"input": "Hi"}, b"response.completed"),
        ("/completion", {"prompt": "x", "n_predict": 40}, b'"stop":true'),
    ],
)
async def test_streams_are_kept_alive_while_a_model_loads(
    build: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], last: bytes
) -> None:
    monkeypatch.setattr(model_lookup, "FIRST_COMMENT_S", 0.001)
    monkeypatch.setattr(model_lookup, "COMMENT_S", 0.001)
    city = build(held_up=True)
    asked = asyncio.ensure_future(city.post(f"{path}?model=green", {"model": "green", "stream": True, **body}))
    await until(lambda: city.entry("green").life.waiting)
    await asyncio.sleep(0.02)
    city.gate.set()
    answer = await asked
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content.startswith(b": loading\n\n: loading\n\n") and last in answer.content
    assert b"green" in answer.content
    city.errors["blue"] = UserError("The folder is empty.")
    city.gate.clear()
    asked = asyncio.ensure_future(city.post(f"{path}?model=blue", {"model": "blue", "stream": True, **body}))
    await until(lambda: city.entry("blue").life.waiting)
    await asyncio.sleep(0.02)
    city.gate.set()
    said = (await asked).content
    assert said.startswith(b": loading") and b"'blue' could not be loaded: The folder is empty." in said
    assert b"error" in said and said.endswith(b"\n\n")


async def test_a_failed_load_is_honest_and_touches_no_other(build: Any) -> None:
    city = build()
    city.errors["blue"] = UserError("There is no config.json in it.")
    assert (await city.post("/v1/completions", {"model": "red", "prompt": "x"})).status_code == 200
    for path in ("/v1/completions", "/api/generate"):
        answer = await city.post(path, {"model": "blue", "prompt": "x"})
        assert answer.status_code == 503 and "There is no config.json in it." in answer.text
        assert int(answer.headers["retry-after"]) >= 1
    assert (await city.get("/v1/models/blue"))["status"] == {"value": "unloaded", "failed": True}
    assert city.loaded() == ["red"] and (await city.client.get("/health")).status_code == 200


async def test_an_address_and_a_body_that_name_two_models_are_told_so(build: Any) -> None:
    """Both models are there: to say that one of them does not exist would send people looking for it."""
    city = build(memory=None)
    answer = await city.post("/v1/completions?model=red", {"model": "blue", "prompt": "x"})
    assert answer.status_code == 400 and "'red'" in answer.text and "'blue'" in answer.text and not city.loaded()
    assert (await city.post("/v1/completions?model=red", {"model": "red-alias", "prompt": "x"})).status_code == 200
    assert (await city.post("/v1/completions?model=red", {"model": "nope", "prompt": "x"})).status_code == 404
    said = (await city.post("/v2/models/red/generate?model=blue", {"text_input": "x"})).json()["error"]
    assert said == "The path names the model 'red', and the query names 'blue': name one of them."
    assert (await city.post("/v2/models/red/generate?model=red", {"text_input": "x"})).status_code == 200


@pytest.mark.parametrize("room", [True, False])
async def test_requests_that_wait_for_a_model_get_it_when_it_is_made_again(build: Any, room: bool) -> None:
    """Stored models are replaced under their name. Whoever waits for one, or for its room, waits for the new one."""
    city = build(held_up=room, memory=None if room else 10)
    models, old = city.shared.models, city.entry("blue")
    if not room:
        await models.enter(city.entry("red"))
    body = {"model": "blue", "prompt": "x", "keep_alive": 7, "stream": False}
    waiting = asyncio.ensure_future(city.post("/api/generate", body))
    await until(lambda: old.life.waiting and old.state is State.LOADING)
    going = asyncio.ensure_future(models.remove("blue"))
    await asyncio.sleep(0)
    models.add(old.spec)
    if not room:
        models.leave(city.entry("red"))
    city.gate.set()
    answer = await waiting
    assert answer.status_code == 200 and answer.json()["response"] == SAYS["blue"]
    await going
    assert city.entry("blue") is not old and city.entry("blue").life.keep == 7 and city.entry("blue").life.open == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_deadline_holds_while_a_model_loads(build: Any, path: str) -> None:
    city = build(held_up=True)
    body = {"model": "blue", "prompt": "x"} if path == "/v1/completions" else {"model": "blue", "input": "x"}
    answer = await asyncio.wait_for(city.post(path, {**body, "timeout": 0.1}), 60)
    assert answer.status_code == 408 and answer.json()["error"]["param"] == "timeout"
    city.gate.set()
    assert (await city.post(path, {**body, "timeout": -1})).status_code == 400


async def test_the_wait_for_a_model_counts_for_the_deadline(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    city = build(held_up=True)
    jobs: list[Job] = []
    inner = Job.set_deadline

    def dated(job: Job, seconds: float | None) -> None:
        jobs.append(job)
        inner(job, seconds)

    monkeypatch.setattr(Job, "set_deadline", dated)
    body = {"model": "blue", "prompt": "x", "timeout": 60}
    waiting = asyncio.ensure_future(city.post("/v1/completions", body))
    await until(lambda: city.entry("blue").state is State.LOADING)
    loading = time.monotonic()
    city.gate.set()
    assert (await waiting).status_code == 200
    assert [job.deadline is not None and job.deadline <= loading + 60 for job in jobs] == [True]


async def test_what_does_not_fit_is_507_and_what_cannot_go_is_503(build: Any) -> None:
    city = build(memory=15, pin="red", patience_s=0.0)
    await city.shared.models.start()
    answer = await city.post("/v1/completions", {"model": "blue", "prompt": "x"})
    assert answer.status_code == 507 and "does not fit" in answer.json()["error"]["message"]
    city = build(memory=15, patience_s=0.0)
    await city.shared.models.enter(city.entry("red"))
    answer = await city.post("/v1/completions", {"model": "blue", "prompt": "x"})
    assert answer.status_code == 503 and "no room for 'blue'" in answer.text and answer.headers["retry-after"]


async def test_two_hundred_requests_of_eight_clients_reach_the_right_model(build: Any) -> None:
    city = build(memory=20)
    names = list(SAYS)

    async def ask(number: int) -> None:
        for turn in range(25):
            name = names[(number * 7 + turn * (1 + number % 2)) % 3]
            answer = await city.post("/v1/completions", {"model": name, "prompt": f"{number} {turn}"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == SAYS[name] and answer.json()["model"] == name

    await asyncio.gather(*(ask(number) for number in range(8)))
    text = (await city.client.get("/metrics")).text
    done = [line for line in text.splitlines() if line.startswith("vllm:request_success_total") and "stop" in line]
    assert sum(float(line.rpartition(" ")[2]) for line in done) == 200
    assert len(city.loaded()) <= 2 and city.shared.gate.open == 0
    assert sum(entry.life.loads for entry in city.shared.models.entries.values()) > 3


async def test_a_dying_engine_disturbs_no_other_model(build: Any) -> None:
    city = build(memory=None)
    for name in ("red", "green"):
        await city.shared.models.load(city.entry(name))
    city.links["red"][0].options.step_s = city.links["green"][0].options.step_s = 0.005
    asked = [asyncio.ensure_future(city.post("/v1/completions", {"model": n, "prompt": "x"})) for n in ("red", "green")]
    await until(lambda: city.links["red"][0].output_tokens > 1)
    city.links["red"][0].die()
    for name, each in zip(("red", "green"), asked, strict=True):
        assert (await each).json()["choices"][0]["text"] == SAYS[name]
    assert len(city.links["red"]) == 2 and len(city.links["green"]) == 1


async def test_loading_and_unloading_by_hand(build: Any) -> None:
    closed = build()
    assert (await closed.post("/models/load", {"model": "red"})).status_code == 404
    city = build(models_control=True, pin="blue")
    answer = await city.post("/models/load", {"model": "red-alias"})
    assert answer.status_code == 200 and answer.json()["status"] == {"value": "loaded"}
    assert (await city.post("/models/unload", {"model": "red"})).json()["tokenmill"]["state"] == "unloaded"
    assert (await city.post("/models/unload", {"model": "blue"})).status_code == 400
    assert (await city.post("/models/load", {"model": "nope"})).status_code == 404
    assert not city.loaded()


async def test_unloading_drains(build: Any) -> None:
    city = build(models_control=True)
    await city.shared.models.load(city.entry("red"))
    city.links["red"][0].options.step_s = 0.005
    asked = asyncio.ensure_future(city.post("/v1/completions", {"model": "red", "prompt": "x"}))
    await until(lambda: city.links["red"][0].output_tokens > 1)
    going = asyncio.ensure_future(city.post("/models/unload", {"model": "red"}))
    await until(lambda: city.entry("red").state is State.DRAINING)
    assert (await asked).json()["choices"][0]["text"] == SAYS["red"]
    assert (await going).status_code == 200 and not city.loaded()


async def test_a_background_response_keeps_its_model(build: Any) -> None:
    city = build(models_control=True)
    await city.shared.models.load(city.entry("red"))
    city.links["red"][0].options.step_s = 0.005
    body = {"model": "red", "input": "Hi", "background": True}
    made = (await city.post("/v1/responses", body)).json()
    assert city.entry("red").life.open == 0
    await city.post("/models/unload", {"model": "red"})
    kept = await city.get(f"/v1/responses/{made['id']}")
    assert kept["status"] == "completed" and kept["model"] == "red"
    assert kept["output"][0]["content"][0]["text"] == SAYS["red"]
    follow = {"model": "green", "input": "And you?", "previous_response_id": made["id"]}
    assert (await city.post("/v1/responses", follow)).json()["output"][0]["content"][0]["text"] == SAYS["green"]


async def test_ollama_drives_what_is_loaded(build: Any) -> None:
    city = build(ttl=1000.0)
    ask = {"model": "red", "stream": False}
    said = (await city.post("/api/generate", ask)).json()
    assert said["done_reason"] == "load" and city.loaded() == ["red"]
    (shown_red, _) = (await city.get("/api/ps"))["models"]
    assert shown_red["name"] == "red:latest" and shown_red["expires_at"] < "2999" and "size" in shown_red
    for keep, left in (("5m", 300), (90, 90), ("1h30m", 5400), ("-1", None), (None, None), (-1, None)):
        body = {"prompt": "Hi", **ask} if keep is None else {"prompt": "Hi", "keep_alive": keep, **ask}
        assert (await city.post("/api/generate", body)).status_code == 200
        found = city.entry("red").expires_in
        assert found == left or (left is not None and found is not None and left - 60 < found <= left), keep
    bad = await city.post("/api/generate", {**ask, "prompt": "Hi", "keep_alive": "soon"})
    assert bad.status_code == 400 and "keep_alive" in bad.json()["error"]
    assert (await city.post("/v1/completions", {"model": "red", "prompt": "x"})).status_code == 200
    assert city.entry("red").expires_in is None, "as in Ollama, who says nothing changes nothing"
    assert (await city.post("/api/chat", {**ask, "messages": TALK, "keep_alive": 0})).json()["message"]["content"]
    await until(lambda: not city.loaded())
    await city.post("/api/embed", {"model": "green:latest", "input": "x"})
    gone = (await city.post("/api/generate", {"model": "green", "keep_alive": 0})).json()
    assert gone["done_reason"] == "unload"
    await until(lambda: not city.loaded())
    again = (await city.post("/api/chat", {"model": "green", "keep_alive": "0s", "messages": []})).json()
    assert again["done_reason"] == "unload" and not city.loaded()
    await city.post("/api/generate", ask)
    assert (left := city.entry("red").expires_in) is not None and 900 < left <= 1000, "the next load begins anew"


async def test_keys_may_be_restricted_to_models(build: Any) -> None:
    keys = ["key-of-all-0123456789", "key-of-green-012345678"]
    city = build(api_key=keys, rights={shown_key(digest(keys[1])): Rights(frozenset({"green"}))}, models_control=True)
    own = {"authorization": f"Bearer {keys[1]}"}
    refused = await city.post("/v1/completions", {"model": "red", "prompt": "x"}, **own)
    unknown = await city.post("/v1/completions", {"model": "nop", "prompt": "x"}, **own)
    assert refused.status_code == unknown.status_code == 404
    assert refused.text.replace("red", "nop") == unknown.text and "green" in refused.text
    assert "blue" not in refused.text
    assert (await city.post("/models/load", {"model": "red"}, **own)).status_code == 404
    assert (await city.client.get("/v1/models/red", headers=own)).status_code == 404
    assert [card["id"] for card in (await city.get("/v1/models", **own))["data"]] == ["green", "green-alias"]
    default = await city.post("/v1/completions", {"prompt": "x"}, **own)
    assert default.json()["choices"][0]["text"] == SAYS["green"] and city.loaded() == ["green"]
    every = {"authorization": f"Bearer {keys[0]}"}
    assert (await city.post("/v1/completions", {"model": "red", "prompt": "x"}, **every)).status_code == 200
    assert len((await city.get("/v1/models", **every))["data"]) == 6
    series = (await city.client.get("/metrics", headers=own)).text
    assert 'model="green"' in series and 'model_name="green"' in series and "red" not in re.findall(r'="(\w+)"', series)
    assert 'model="red"' in (await city.client.get("/metrics", headers=every)).text
    claude = {**own, "anthropic-version": "2023-06-01"}
    assert [card["id"] for card in (await city.get("/v1/models", **claude))["data"]] == ["green", "green-alias"]
    routes = json.loads((await city.client.get("/openapi.json", headers=every)).text)["paths"]
    for path, methods in routes.items():  # whether red is there or not, every path says the same
        for method in methods:
            said = []
            for name in ("red", "nop"):
                full = re.sub(r"\{\w+\}", name, path)
                body = {"model": name, "lora_name": name, "lora_path": "x", "name": name, "from": name, "source": name}
                for query in ("", f"?model={name}"):
                    found = await city.client.request(
                        method.upper(), full + query, headers=own, json=None if method == "get" else body
                    )
                    timeless = re.sub(r'"samples":\[(\[[^]]*\],?)*\]', "", found.text)  # a second may have gone by
                    text = re.sub(r'[0-9a-f]{32}|"id":"[^"]*"|[\d.:]+', "", re.sub(rf"\b{name}\b", "NAME", timeless))
                    said.append((query != "", found.status_code, text))
            assert said[:2] == said[2:], (method, path)


async def test_a_message_over_a_socket_chooses_its_model(build: Any) -> None:
    city = build()
    for name in (*SAYS, "nope"):
        parcel = Parcel(city.shared.bodies)
        parcel.add(json.dumps({"type": "response.create", "model": name, "input": "Hi"}).encode())
        request = Request({"type": "http", "state": {"body": parcel}, "query_string": b"", "path_params": {}})
        if name == "nope":
            with pytest.raises(HttpError, match="'nope' does not exist"):
                await model_lookup.asked_model(city.shared, request).__aenter__()
            continue
        async with model_lookup.asked_model(city.shared, request) as context:
            assert context.backend.info.names[0] == name and city.entry(name).life.open == 1
        assert city.entry(name).life.open == 0


async def test_a_client_that_leaves_while_a_model_loads_leaves_nothing(build: Any) -> None:
    city = build(held_up=True)
    asked = asyncio.ensure_future(city.post("/v1/completions", {"model": "red", "prompt": "x", "stream": True}))
    await until(lambda: city.entry("red").life.waiting)
    asked.cancel()
    await until(lambda: not city.entry("red").life.waiting)
    city.gate.set()
    await until(lambda: city.loaded() == ["red"])
    assert city.entry("red").life.open == 0 and city.shared.gate.open == 0


async def test_series_of_models_that_are_gone_go(build: Any) -> None:
    city = build(memory=None)
    for name in SAYS:
        assert (await city.post("/v1/completions", {"model": name, "prompt": "x"})).status_code == 200
    text = (await city.client.get("/metrics")).text
    assert text.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1
    assert all(f'model_name="{name}"' in text and f'model="{name}"' in text for name in SAYS)
    await city.shared.models.remove("blue")
    text = (await city.client.get("/metrics")).text
    assert "blue" not in text and 'model_name="green"' in text


async def test_series_do_not_grow_with_the_models_of_the_past(build: Any) -> None:
    city = build(memory=None, models_control=True)
    models = city.shared.models

    async def series() -> set[str]:
        text = (await city.client.get("/metrics")).text
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    async def visit(name: str) -> None:
        models.add(Spec(make_config({}, model=name), city.shared.config))
        asked = {"model": name, "prompt": "x", "max_tokens": 2}
        assert (await city.post("/v1/completions", asked)).status_code == 200
        assert any(f'"{name}"' in each for each in await series())
        assert (await city.post("/models/unload", {"model": name})).status_code == 200
        left = [each for each in await series() if f'"{name}"' in each]
        assert left and not any("vllm:num_requests_running" in each for each in left), "an unloaded model has no gauges"
        assert (await city.post("/v1/completions", {**asked, "prompt": []})).status_code == 400
        await models.remove(name)

    await visit("first")
    before = await series()
    for number in range(30):
        await visit(f"guest-{number}")
    assert await series() == before


async def test_models_come_and_go(build: Any) -> None:
    city = build(memory=None)
    models = city.shared.models
    assert (await city.post("/v1/completions", {"model": "blue", "prompt": "x"})).status_code == 200
    await models.remove("blue")
    assert (await city.post("/v1/completions", {"model": "blue", "prompt": "x"})).status_code == 404
    models.add(Spec(make_config({}, model="blue"), city.shared.config))
    answer = await city.post("/v1/completions", {"model": "blue", "prompt": "x"})
    assert answer.json()["choices"][0]["text"] == SAYS["blue"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x", "max_tokens": 2}), ("/v1/chat/completions", {"messages": TALK}),
     ("/v1/messages", {"messages": TALK, "max_tokens": 4}), ("/v1/responses", {"input": "x"}),
     ("/tokenize", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})],
)  # fmt: skip
async def test_the_tag_latest_may_follow_a_name_in_every_api(path: str, body: dict[str, Any], build: Any) -> None:
    """The model was loaded, and then told not to exist."""
    city = build()
    answer = await city.post(path, {"model": "green:latest", **body})
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "green") == "green" and city.loaded() == ["green"]
    unknown = await city.post(path, {"model": "green:8b", **body})
    assert unknown.status_code == 404 and "green:8b" in unknown.text


async def test_a_client_that_leaves_while_comments_end_is_not_forgotten() -> None:
    late = model_lookup.LateStream(None, lambda found: b"")
    stopping = asyncio.ensure_future(late.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
