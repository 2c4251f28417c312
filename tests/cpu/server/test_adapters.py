"""Adapters as models of a served engine: in every API, loaded and unloaded meanwhile, and after an engine's death."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cpu.server.conftest import Running

NAMES = ("q_proj", "v_proj", "down_proj")


def write_adapter(folder: Path, base: Path, seed: int) -> Path:
    """A small adapter of the served model."""
    made, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(NAMES):
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=made) * 0.2
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=made) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(NAMES)}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., Running]) -> Running:
    """A server with two adapters, and a folder with a third one; beside it lies what nobody may name."""
    root = tmp_path_factory.mktemp("lora")
    one, two = (write_adapter(root / name, tiny, seed) for seed, name in enumerate(("one", "two"), 1))
    write_adapter(root / "open" / "three", tiny, 3)
    write_adapter(root / "open" / "broken", tiny, 4)
    (root / "open" / "broken" / "adapter_config.json").write_text("{")
    write_adapter(root / "open" / "four", tiny, 5)
    (root / "open" / "out").symlink_to(one)
    return launch(
        "--enable-lora", "--lora-modules", f"one={one},two={two}", "--lora-folder", str(root / "open"),
        "--max-loras", "2",
    )  # fmt: skip


def tokens(served: Running, model: str, **more: Any) -> list[int]:
    """What this model continues with."""
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = served.post("/v1/completions", {**body, "ignore_eos": True, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_adapters_are_models(served: Running) -> None:
    cards = {card["id"]: card for card in served.get("/v1/models").json()["data"]}
    assert {"tiny", "one", "two"} <= cards.keys()
    assert cards["one"]["parent"] == "tiny" and cards["tiny"]["parent"] is None
    said = [tokens(served, name) for name in ("tiny", "one", "two")]
    assert len({str(each) for each in said}) == 3
    talk = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": talk, "max_tokens": 2}),
        ("/v1/messages", {"messages": talk, "max_tokens": 2}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
        ("/api/chat", {"messages": talk, "stream": False, "options": {"num_predict": 2}}),
    ):
        answer = served.post(path, {"model": "one", **body})
        assert answer.status_code == 200 and answer.json()["model"] == "one", path
    vectors = [served.post("/v1/embeddings", {"model": name, "input": "Hello"}).json() for name in ("tiny", "one")]
    assert vectors[0]["data"][0]["embedding"] != vectors[1]["data"][0]["embedding"]
    kserve = {"text_input": "Hello", "parameters": {"max_tokens": 4, "temperature": 0.0}}
    texts = [served.post(f"/v2/models/{name}/generate", kserve).json()["text_output"] for name in ("tiny", "one")]
    assert texts[0] != texts[1]
    assert served.post("/v1/completions", {"model": "none", "prompt": "x"}).status_code == 404


def test_llama_cpp_s_way_to_choose_one(served: Running) -> None:
    listed = {each["path"]: each["id"] for each in served.get("/lora-adapters").json()}

    def said(**more: Any) -> Any:
        body = {"prompt": [5, 6, 7, 8], "n_predict": 8, "temperature": 0, "ignore_eos": True}
        answer = served.post("/completion", {**body, **more})
        return answer.json()["content"] if answer.status_code == 200 else answer.json()["error"]["message"]

    names = ("tiny", "one", "two")
    plain = {name: said(model=name) for name in names}
    assert len(set(plain.values())) == 3
    one, two = listed["one"], listed["two"]
    assert said() == said(lora=[]) == said(lora=[{"id": one, "scale": 0.0}]) == plain["tiny"]
    assert said(lora=[{"id": one}]) == said(lora=[{"id": one, "scale": 1}], model="one") == plain["one"]
    assert said(lora=[{"id": one, "scale": 0}, {"id": two, "scale": 1.0}]) == plain["two"]
    for wrong, words in (
        ([{"id": 99}], "no adapter of this id"),
        ([{"id": one}, {"id": two}], "Only one adapter can be used at a time"),
        ([{"id": one, "scale": 0.5}], "at scale 1"),
        ([{"id": -1}], "lora.0.id"),
        (["one"], "lora.0"),
        ({"id": one}, "lora"),
    ):
        assert words in said(lora=wrong), wrong
    assert "names another one" in said(lora=[{"id": one}], model="tiny")
    infill = {"input_prefix": "a", "n_predict": 8, "temperature": 0, "ignore_eos": True}
    refused = served.post("/infill", {**infill, "lora": [{"id": 99}]})
    assert refused.status_code == 400


def test_loaded_and_unloaded_while_it_runs(served: Running) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert served.post(load, {"lora_name": "three", "lora_path": "three"}).status_code == 200
    before = tokens(served, "three")
    assert before not in [tokens(served, name) for name in ("tiny", "one", "two")]
    absent = [
        served.post(load, {"lora_name": "x", "lora_path": path})
        for path in (
            "nowhere",
            "../one",
            "../nowhere",
            "/etc/passwd",
            "/etc/nowhere",
            "out",
            "..",
            ".",
            "three/../../one",
        )
    ]
    assert {(answer.status_code, answer.text) for answer in absent} == {(404, absent[0].text)}
    for body, status in (
        ({"lora_name": "three", "lora_path": "three"}, 400),
        ({"lora_name": "tiny", "lora_path": "three"}, 400),
        ({"lora_name": "../x", "lora_path": "three"}, 400),
        ({"lora_name": "x", "lora_path": "broken"}, 400),
        ({"lora_name": "x"}, 400),
        ({"lora_name": 7, "lora_path": "three"}, 400),
    ):
        answer = served.post(load, body)
        assert answer.status_code == status, body
        assert "/lora" not in answer.text, "no way on this machine is told"
    assert served.post(unload, {"lora_name": "nobody"}).status_code == 404
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.append(tokens(served, "three", max_tokens=200)))
    reader.start()
    while not served.metric("vllm:num_requests_running") and reader.is_alive():
        pass
    assert served.post(unload, {"lora_name": "three"}).status_code == 200
    reader.join()
    assert found[0][:8] == before and len(found[0]) == 200, "open requests end first"
    assert served.post("/v1/completions", {"model": "three", "prompt": "x"}).status_code == 404
    assert served.post(load, {"lora_name": "three", "lora_path": "three"}).status_code == 200
    assert tokens(served, "three") == before


def test_a_name_may_come_again_while_its_last_adapter_is_used(served: Running) -> None:
    """Open requests go on with what they began with, whoever has the name now; nobody is refused meanwhile."""
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    wanted = {}
    for name in ("three", "four"):
        assert served.post(load, {"lora_name": f"plain {name}", "lora_path": name}).status_code == 200
        wanted[name] = tokens(served, f"plain {name}", max_tokens=200)
    assert wanted["three"][:8] != wanted["four"][:8]
    served.post(load, {"lora_name": "again", "lora_path": "three"})
    found: list[tuple[str, list[int]]] = []

    def read(which: str) -> threading.Thread:
        ran = served.metric("vllm:num_requests_running")
        reader = threading.Thread(target=lambda: found.append((which, tokens(served, "again", max_tokens=200))))
        reader.start()
        while served.metric("vllm:num_requests_running") == ran and reader.is_alive():
            pass
        return reader

    readers = [read("three")]
    assert served.post(unload, {"lora_name": "again"}).status_code == 200
    for which in ("three", "four"):  # the same files, and others
        assert served.post(load, {"lora_name": "again", "lora_path": which, "load_inplace": True}).status_code == 200
        readers.append(read(which))
    for bad, status in (("broken", 400), ("nowhere", 404)):
        body = {"lora_name": "again", "lora_path": bad, "load_inplace": True}
        assert served.post(load, body).status_code == status
        assert tokens(served, "again") == wanted["four"][:8], "what it was to replace goes on"
    for reader in readers:
        reader.join()
    assert len(found) == 3 and all(ids == wanted[which] for which, ids in found)
    for name in ("again", "plain three", "plain four"):
        assert served.post(unload, {"lora_name": name}).status_code == 200


def test_a_name_that_stands_for_another_is_refused(served: Running) -> None:
    answer = served.post("/v1/load_lora_adapter", {"lora_name": "tiny:latest", "lora_path": "three"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_name"


def test_an_engines_death(served: Running) -> None:
    assert served.post("/v1/load_lora_adapter", {"lora_name": "later", "lora_path": "three"}).status_code == 200
    names = ("tiny", "one", "later")
    before = {name: tokens(served, name, max_tokens=150) for name in names}
    found: dict[str, list[int]] = {}
    readers = [
        threading.Thread(target=lambda name=name: found.update({name: tokens(served, name, max_tokens=150)}))
        for name in names
    ]
    for reader in readers:
        reader.start()
    while not served.metric("vllm:num_requests_running") and any(reader.is_alive() for reader in readers):
        pass
    os.kill(served.children()[0], signal.SIGKILL)
    for reader in readers:
        reader.join()
    assert found == before
    assert tokens(served, "two") != before["one"][:8]
