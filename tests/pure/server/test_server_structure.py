"""Every place of a valid body, in every API, holds something else once: refused or answered, never a 5xx."""

from __future__ import annotations

import copy
import json

import pytest

from tests.pure.server.conftest import Starter
from tests.reliability.fuzz.corpus import MODEL, Case, corpus
from tests.reliability.fuzz.mutate import places
from tests.thinned import WHOLE
from tokenmill.testing.fake_generator import FakeOptions

ODD = (1, "a", [1], {"a": 1}, [[{}]], None)
APIS = sorted({case.api for case in corpus()} - {"server"})
SETTINGS = {"tool_call_parser": "hermes", "log_level": "error"}


def fake(text: str) -> str:
    return text.replace(f'"{MODEL}"', '"fake"').replace(f"/{MODEL}", "/fake")


def bodies(case: Case) -> list[str]:
    """One change each; the value of a place goes through all kinds from place to place."""
    count = len(places(case.body))
    found = []
    for number in range(count):
        for turn in range(3 if WHOLE else 2):
            body = copy.deepcopy(case.body)
            node, name = places(body)[number]
            node[name] = ODD[(2 * number + turn) % len(ODD)]
            found.append(fake(json.dumps(body)))
    return found


@pytest.mark.parametrize("api", APIS)
async def test_any_place_may_hold_anything(start: Starter, api: str) -> None:
    served = await start(FakeOptions(script="Just this."), **SETTINGS)
    head = {"content-type": "application/json"}
    asked = set()
    for case in corpus():
        if case.api != api or not case.body:
            continue
        for body in bodies(case):
            path = fake(case.path)
            answer = await served.client.post(path, content=body, headers=head)
            assert answer.status_code < 500, (path, body, answer.text)
            assert "Internal error" not in answer.text, (path, body, answer.text)
            asked.add(answer.status_code)
    assert asked >= {200, 400}


@pytest.mark.parametrize("part", [5, "text", True, {"text": "a"}, [1], ["a"], [None], [[]]], ids=repr)
@pytest.mark.parametrize("field", ["content", "tools"])
async def test_lists_in_items_of_responses(start: Starter, part: object, field: str) -> None:
    served = await start(FakeOptions(script="Just this."), **SETTINGS)
    thought = {"type": "reasoning", "content": part if field == "content" else []}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": part if field == "tools" else []}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    asked = {"input": [thought, {"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
    answer = await served.post("/v1/responses", asked if field == "tools" else {"input": asked["input"]})
    assert answer.status_code == 400 and field in answer.json()["error"]["param"]


@pytest.mark.parametrize("name", [1, [], {}, [["a"]], None, ""], ids=repr)
async def test_names_of_wanted_outputs(start: Starter, name: object) -> None:
    served = await start(FakeOptions(script="Just this."))
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}
    answer = await served.post("/v2/models/fake/infer", {"inputs": [tensor], "outputs": [{"name": name}]})
    assert answer.status_code == 400 and "outputs" in answer.json()["error"]
