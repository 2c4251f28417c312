"""Every path that clients of other servers know is here, or an error says why it is not."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI
from tools.compatibility import verdict_of_path
from tools.peer_paths import PATHS

from tests.pure.server.conftest import Starter
from tokenmill.server.absent import ABSENT, why_absent
from tokenmill.server.app import APIS

KNOWN = sorted({line for lines in PATHS.values() for line in lines})


def test_every_known_path_is_done_or_refused_with_a_reason() -> None:
    verdicts = {line: verdict_of_path(line) for line in KNOWN}
    assert [line for line, verdict in verdicts.items() if verdict is None] == []


def test_the_list_names_nothing_that_is_here() -> None:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for api in APIS:
        api.add(app, MagicMock())
    here = {getattr(route, "path", "") for route in app.routes}
    assert {path for path in ABSENT if path.startswith("/")} & here <= {"/slots"}
    asked = {line.partition(" ")[2].replace("/{id}", "") for line in KNOWN}
    unasked = {path for path in ABSENT if not any(line.startswith(path.rpartition(" ")[2]) for line in asked)}
    assert unasked == set()


@pytest.mark.parametrize("line", [line for line in KNOWN if why_absent(*line.split(" "))][::7])
async def test_clients_are_told_why(start: Starter, line: str) -> None:
    method, path = line.replace("{id}", "x").split(" ")
    served = await start()
    answer = await served.client.request(method, path, json={} if method == "POST" else None)
    told: Any = answer.json()["error"]
    assert answer.status_code in (404, 405, 501), answer.text
    assert (why_absent(method, path) or "-") in (told if isinstance(told, str) else told["message"])


async def test_health_and_models_under_every_name(start: Starter) -> None:
    served = await start(api_key=["k"])
    paths = ("/health", "/v1/health", "/models")
    assert [(await served.client.get(path)).status_code for path in paths] == [200, 200, 401]
    headers = {"authorization": "Bearer k"}
    names = [(await served.client.get(path, headers=headers)).json()["data"] for path in ("/models", "/v1/models")]
    assert names[0] == names[1]
    body = {"query": "a", "documents": ["b", "c"]}
    ranked = [(await served.client.post(path, json=body, headers=headers)) for path in ("/rerank", "/v1/reranking")]
    assert ranked[0].json()["results"] == ranked[1].json()["results"]
