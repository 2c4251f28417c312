"""A value that a client sent and nobody would read is refused or told: names that come twice, bodies and queries that a
path does not read."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.pure.server.conftest import Starter
from tokenmill.core.errors import ParameterError
from tokenmill.server.bodies import parse
from tokenmill.server.ceilings import check_ceilings
from tokenmill.server.doubled_names import refuse_doubled_names
from tokenmill.server.inputs.headers import PROBES
from tokenmill.server.openai.schemas import AnyRequest
from tokenmill.testing.hostile import VALID, path_of

# ---------------------------------------------------------------- names that come twice


async def test_no_body_may_have_a_name_twice(start: Starter) -> None:
    served = await start()
    for path, (valid, _) in VALID.items():
        name = next(iter(valid), "unknown")
        once = json.dumps(valid)[1:-1] or '"unknown":1'
        body = "{" + once + f',"{name}":' + json.dumps(valid.get(name, 1)) + "}"
        answer = await served.client.post(path_of(path), content=body, headers={"content-type": "application/json"})
        absent = answer.status_code in (403, 404, 405, 501)  # the path is off, or reads no fields
        assert absent or (answer.status_code == 400 and "twice" in answer.text), (path, answer.text)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":1}',
        '{"a":{"b":[{"c":1,"c":2}]}}',
        '{"a":1,"\\u0061":2}',
        '{"":0,"":0}',
        '{"a:b":":","a\\\\":{":":1,":":2}}',
        '{"a":[1,[2,{"x":{},"x":{}}]],"b":[[]]}',
    ],
)
def test_doubled_names_are_found_wherever_they_are(text: str) -> None:
    with pytest.raises(ParameterError, match="twice"):
        parse(text.encode(), AnyRequest)


def test_a_doubled_name_is_found_exactly_where_there_is_one() -> None:
    rng = random.Random(5)

    def value(depth: int) -> str:
        if depth and rng.random() < 0.5:
            names = [rng.choice(["a", "b:", '\\"c', "d\\\\", "é"]) for _ in range(rng.randrange(3))]
            return "{" + ",".join(f'"{name}":{value(depth - 1)}' for name in names) + "}"
        if depth and rng.random() < 0.5:
            return "[" + ",".join(value(depth - 1) for _ in range(rng.randrange(4))) + "]"
        return rng.choice(["1", '"a:{[b"', "null", '"\\\\\\":"'])

    found = {True: 0, False: 0}
    for _ in range(2000):
        text, doubled = value(4), []
        json.loads(text, object_pairs_hook=lambda pairs, d=doubled: d.append(len({n for n, _ in pairs}) < len(pairs)))
        found[any(doubled)] += 1
        try:
            refuse_doubled_names(text, json.loads(text), check_ceilings(text.encode()))
        except ParameterError:
            assert any(doubled), text
        else:
            assert not any(doubled), text
    assert min(found.values()) > 100


async def test_a_schema_in_a_text_has_no_name_twice_either(start: Starter) -> None:
    served = await start()
    schema = '{"type":"object","type":"string"}'
    answer = await served.post("/v1/completions", {"prompt": "a", "guided_json": schema})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_json"


# ---------------------------------------------------------------- what a path does not read


async def test_a_parameter_of_the_query_counts_once(start: Starter) -> None:
    served = await start()
    for query in ("limit=1&limit=2", "order=asc&order=desc", "metadata[a]=1&metadata[a]=2", "model=fake&model=fake"):
        answer = await served.client.get(f"/v1/chat/completions?{query}")
        assert answer.status_code == 400 and "more than once" in answer.text, query
    answer = await served.post("/v1/completions?model=x&model=fake", {"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 400


async def test_every_get_tells_parameters_that_it_does_not_read(start: Starter) -> None:
    served, strict = await start(), await start(strict_fields=True)
    pages = {"/", "/static/{name:path}"}
    for route in served.app.app.routes:
        if "GET" not in route.methods or route.path in pages or "static" in route.path:
            continue
        path = path_of(route.path).replace("{name:path}", "fake").replace("{id}", "x")
        answer = await served.client.get(f"{path}?zork=1")
        if route.path in PROBES:
            assert (await strict.client.get(f"{path}?zork=1")).status_code == answer.status_code
        elif answer.status_code == 200:
            assert answer.headers.get("x-tokenmill-ignored") == "zork", path
            assert (await strict.client.get(f"{path}?zork=1")).status_code == 400, path


@pytest.mark.parametrize("query", ["stream=1", "stream=yes", "starting_after=1", "stream=false&starting_after=1"])
async def test_a_response_is_not_streamed_by_halves(start: Starter, query: str) -> None:
    served = await start()
    made = (await served.post("/v1/responses", {"input": "a", "max_output_tokens": 2})).json()["id"]
    assert (await served.client.get(f"/v1/responses/{made}?{query}")).status_code == 400
    assert (await served.client.get(f"/v1/responses/{made}?stream=false")).json()["id"] == made


async def test_bodies_that_nobody_reads_are_told(start: Starter) -> None:
    served = await start(models_control=True)
    asked: Any = served.client.request
    made = (await served.post("/v1/responses", {"input": "a", "max_output_tokens": 2})).json()["id"]
    answer = await asked("DELETE", f"/v1/responses/{made}", json={"zork": 1})
    assert (answer.status_code, answer.headers["x-tokenmill-ignored"]) == (200, "zork")
    body = {"input": "a", "max_output_tokens": 2, "background": True}
    run = (await served.post("/v1/responses", body)).json()["id"]
    answer = await served.post(f"/v1/responses/{run}/cancel", {"reason": "none", "zork": [1]})
    assert (answer.status_code, answer.headers["x-tokenmill-ignored"]) == (200, "reason, zork")
    for path, name in (("/sleep", "level"), ("/sleep", "mode"), ("/wake_up", "tags"), ("/sleep", "model")):
        answer = await served.post(path, {name: "x"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    served_as = (await served.client.get("/v1/models")).json()["data"][0]["id"]
    for name in (served_as, "another"):  # who says a thing twice, and alike, has said it: this model cannot sleep
        answer = await served.post(f"/wake_up?model={served_as}", {"model": name})
        assert answer.status_code == (404 if name == served_as else 400), name
    assert "x-tokenmill-ignored" not in (await served.post("/sleep", {})).headers
