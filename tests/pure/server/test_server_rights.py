"""Keys that the file of models restricts: they use their models, and only those that may manage change them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.pure.server.conftest import until
from tests.pure.server.server_many_helpers import City, build  # noqa: F401
from tokenmill.core.config import make_server_config
from tokenmill.core.errors import ParameterError
from tokenmill.server.access import Rights, digest, shown_key
from tokenmill.server.many_models.models_file import read_models

KEYS = {"all": "key-of-all-0123456789", "user": "key-of-user-012345678", "keeper": "key-of-keeper-0123456"}
GREEN = frozenset({"green"})
RIGHTS = {"user": Rights(GREEN), "keeper": Rights(GREEN, manage=True)}
SWITCHES = ("/models/load", "/models/unload", "/sleep", "/wake_up")
ABLE = {"enable_sleep_mode": True, "enable_lora": True}


def start(make: Any, **server: Any) -> City:
    rights = {shown_key(digest(KEYS[who])): right for who, right in RIGHTS.items()}
    city: City = make(
        api_key=list(KEYS.values()), rights=rights, models_control=True, engine=ABLE, lora_folder="/", **server
    )
    return city


def auth(who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[who]}"}


@pytest.mark.parametrize("path", SWITCHES)
async def test_switching_needs_a_right_of_its_own(build: Any, path: str) -> None:  # noqa: F811
    city = start(build)
    await city.post("/v1/completions", {"model": "green", "prompt": "x"}, **auth("user"))
    green = city.entry("green")
    told = []
    for name in ("green", "red", "nop"):
        found = await city.post(f"{path}?model={name}", {"model": name}, **auth("user"))
        told.append((found.status_code, found.text.replace(name, "NAME")))
    assert told[0][0] == 403 and "may use models" in told[0][1] and told[1] == told[2] and told[1][0] == 404
    assert green.state.value == "ready" and (await city.get("/is_sleeping?model=green", **auth("user")))
    for who in ("keeper", "all"):
        found = await city.post(f"{path}?model=green", {"model": "green"}, **auth(who))
        assert found.status_code == 200, (who, found.text)
    assert (await city.post(f"{path}?model=red", {"model": "red"}, **auth("keeper"))).status_code == 404


async def test_the_page_has_switches_for_those_who_may_use_them(build: Any) -> None:  # noqa: F811
    city = start(build)
    for who, may in {"user": False, "keeper": True, "all": True}.items():
        assert (await city.get("/v1/engine?model=green", **auth(who)))["memory"]["control"] is may


async def test_adapters_need_it_too(build: Any) -> None:  # noqa: F811
    city = start(build)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = {"model": "green", "lora_name": "green" if "unload" in path else "own", "lora_path": "nowhere"}
        refused = await city.post(f"{path}?model=green", body, **auth("user"))
        assert refused.status_code == 403 and "may use models" in refused.text
        for who in ("keeper", "all"):
            assert (await city.post(f"{path}?model=green", body, **auth(who))).status_code == 404  # there is none


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/embed", "/api/embeddings"])
async def test_how_long_a_model_stays_is_not_its_users_to_say(build: Any, path: str) -> None:  # noqa: F811
    city, strict = start(build), start(build, strict_fields=True)
    asked = {"model": "green", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    fields = {"/api/generate": "prompt", "/api/chat": "messages", "/api/embed": "input", "/api/embeddings": "prompt"}
    body = {"model": "green", fields[path]: asked[fields[path]], "keep_alive": -1}
    if path in ("/api/generate", "/api/chat"):
        body["stream"] = False
    keep = city.entry("green").spec.keep
    answered = await city.post(path, body, **auth("user"))
    assert answered.status_code == 200 and answered.headers["x-tokenmill-ignored"] == "keep_alive", answered.text
    assert city.entry("green").life.keep == keep
    assert "x-tokenmill-ignored" not in (await city.post(path, body, **auth("keeper"))).headers
    assert city.entry("green").life.keep < 0
    refused = await strict.post(path, body, **auth("user"))
    assert refused.status_code == 403 and "keep_alive" in refused.text
    assert "x-tokenmill-ignored" not in (await city.post(path, {**body, "keep_alive": None}, **auth("user"))).headers


async def test_nothing_that_a_user_sends_takes_a_model_from_others(build: Any) -> None:  # noqa: F811
    """Every path of every API, in the forms that ask for most."""
    city = start(build)
    await city.post("/v1/completions", {"model": "green", "prompt": "x"}, **auth("all"))
    green = city.entry("green")
    keep, loads = green.life.keep, green.life.loads
    paths = json.loads((await city.client.get("/openapi.json", headers=auth("all"))).text)["paths"]
    assert set(SWITCHES) < set(paths)
    for path, methods in paths.items():
        full = re.sub(r"\{\w+\}", "green", path)
        for method in methods:
            for keep_alive in (0, -1):
                body = {"model": "green", "lora_name": "green", "lora_path": "x", "name": "green", "from": "green",
                        "source": "green", "keep_alive": keep_alive, "level": 2}  # fmt: skip
                await city.client.request(
                    method.upper(), f"{full}?model=green&level=2&mode=abort", headers=auth("user"),
                    json=None if method == "get" else body,
                )  # fmt: skip
                assert green.state.value == "ready" and green.life.keep == keep, (method, path, keep_alive)
    assert green.life.loads == loads and not green.book.by_name
    gone = await city.post("/api/generate", {"model": "green", "keep_alive": 0}, **auth("keeper"))
    assert gone.json()["done_reason"] == "unload"
    await until(lambda: not city.loaded())


def test_the_file_says_who_manages(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    head = "models: {a: demo, b: {model: demo, aliases: [c]}}\nkeys: "

    def read(keys: str) -> list[Rights]:
        path.write_text(head + keys)
        return list(read_models(path, {}, make_server_config({}))[1].values())

    assert read("{one: [a], two: {models: [c]}, three: {models: a, manage: true}, four: {models: []}}") == [
        Rights(frozenset({"a"})), Rights(frozenset({"b"})), Rights(frozenset({"a"}), manage=True), Rights(frozenset())
    ]  # fmt: skip
    for wrong, said in {
        "{one: {models: [a], manages: true}}": "key 1: there is no 'manages' here. Did you mean 'manage'",
        "{one: {models: [a], manage: yep}}": "key 1: manage must be true or false",
        "{one: {manage: true}}": "key 1 needs a list of models",
        "{one: {models: {a: 1}}}": "key 1 needs a list of models",
        "{one: {1: a}}": "key 1: there is no '1' here",
    }.items():
        with pytest.raises(ParameterError, match=said):
            read(wrong)
