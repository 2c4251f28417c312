"""Stored models through Ollama's API: pulled, created, listed, shown, copied, deleted; files by digest."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from tests.pure.server.conftest import Served, Starter, until
from tokenmill.checkpoint.gguf_write import write_gguf
from tokenmill.checkpoint.pull import Progress, pull_local
from tokenmill.checkpoint.stored import open_store
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.core.request import SamplingParams
from tokenmill.server.context import RequestLimits
from tokenmill.server.errors import HttpError
from tokenmill.server.lora.routes import _check_not_stored
from tokenmill.server.model_lookup import find_by_name
from tokenmill.server.ollama.stated_context import stated_context
from tokenmill.server.ollama.store_changes import OFF, Changes
from tokenmill.server.openai.sampling import sampling_params
from tokenmill.server.openai.schemas import CompletionRequest
from tokenmill.server.opening_messages import check_opening
from tokenmill.server.switch.listing import find_listed

FAKE = ["fake:latest", "other:latest"]
BAD = [
    "",
    ".",
    "..",
    "../weights",
    "/etc/passwd",
    "a/../b",
    "a b",
    "a\0b",
    "x" * 300,
    "weights\u2024gguf",
    "ａbc",
    "a/b/c",
    "-a",
    "a:",
    ":a",
    "a:b:c",
    "~/x",
    "a\\b",
]


@pytest.fixture
async def served(start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    weights = tmp_path / "models" / "weights"
    weights.mkdir(parents=True)
    (weights / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    head = json.dumps({"a": entry}).encode()
    (weights / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(16))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "models" / "way-out").symlink_to(tmp_path / "secret")
    monkeypatch.setattr("tokenmill.server.ollama.create.check_fit", lambda config, adapter: None)  # it imports torch
    return await start(allow_model_changes=True, model_folder=str(tmp_path / "models"))


def steps(answer: Any) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def names(served: Served) -> list[str]:
    return [each["name"] for each in (await served.client.get("/api/tags")).json()["models"]]


async def test_nothing_changes_unless_it_is_allowed(start: Starter, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    served = await start()
    for path in ("pull", "create", "copy", "delete"):
        answer = await served.post(f"/api/{path}", {"model": "x"})
        assert answer.status_code == 501 and answer.json() == {"error": OFF}
    digest = "sha256:" + "0" * 64
    assert (await served.client.post(f"/api/blobs/{digest}", content=b"x")).status_code == 501
    assert (await served.client.head(f"/api/blobs/{digest}")).status_code == 501
    assert not list(tmp_path.iterdir()) and await names(served) == FAKE


async def test_a_model_comes_is_told_of_and_goes(served: Served) -> None:
    said = steps(await served.post("/api/pull", {"model": "weights", "insecure": True}))
    assert said == [{"status": "pulling manifest"}, {"status": "success"}]
    assert (await served.post("/api/pull", {"name": "weights", "stream": False})).json() == {"status": "success"}
    assert await names(served) == [*FAKE, "weights:latest"]
    told = (await served.client.get("/api/tags")).json()["models"][-1]
    assert told["details"]["family"] == "llama" and told["details"]["format"] == "safetensors" and told["size"] > 16
    assert len(told["digest"]) == 64 and told["details"]["quantization_level"] == "F32"
    body = {"model": "mill", "from": "weights", "system": "Be brief.", "parameters": {"temperature": 0.5, "stop": "x"}}
    said = steps(await served.post("/api/create", body))
    assert [each["status"] for each in said] == ["writing manifest", "success"]
    shown = (await served.post("/api/show", {"model": "mill"})).json()
    told = [line.split(maxsplit=1) for line in shown["parameters"].splitlines()]
    assert shown["system"] == "Be brief." and told == [["stop", '"x"'], ["temperature", "0.5"]]
    assert "SYSTEM Be brief." in shown["modelfile"] and shown["model_info"]["llama.context_length"] == 64
    assert (await served.post("/api/copy", {"source": "mill", "destination": "a/b:c"})).status_code == 200
    assert set(await names(served)) == {*FAKE, "weights:latest", "mill:latest", "a/b:c"}
    gone = await served.client.request("DELETE", "/api/delete", json={"model": "mill"})
    assert gone.status_code == 200 and gone.content == b""
    again = await served.client.request("DELETE", "/api/delete", json={"name": "mill"})
    assert again.status_code == 404 and "mill" in again.json()["error"]
    assert (await served.post("/api/show", {"model": "mill"})).status_code == 404
    assert (await served.post("/api/copy", {"source": "mill", "destination": "x"})).status_code == 404
    assert (await served.post("/api/show", {"model": "a/b:c"})).json()["system"] == "Be brief."
    assert [each["name"] for each in (await served.client.get("/api/ps")).json()["models"]] == FAKE


async def test_a_stored_name_has_many_spellings(served: Served) -> None:
    """As in the store, where capitals make no difference: for every path that takes a name."""
    shared = served.context.shared
    await served.post("/api/create", {"model": "Team/Mill", "from": "Demo:latest", "stream": False})
    (entry,) = [each for each in shared.models.entries.values() if each.spec.stored]
    request = Request({"type": "http", "app": served.app, "state": {}, "path_params": {}, "query_string": b""})
    for name in ("Team/Mill", "team/mill", "TEAM/MILL:latest", "team/mill:Latest", "hf.co/team/mill"):
        assert find_by_name(shared, request, name) is entry
        assert find_listed(shared, request, name).entry is entry
        assert (await served.post("/api/show", {"model": name})).status_code == 200, name
        assert (await served.client.get(f"/v1/models/{name}")).json()["id"] == "Team/Mill"
    for name in ("team/mil", "team/mill:v1", "mill"):
        assert (await served.post("/api/show", {"model": name})).status_code == 404, name
    for taken in ("FAKE", "Other:latest"):
        refused = await served.post("/api/copy", {"source": "team/mill", "destination": taken})
        assert refused.status_code == 400 and "choose another name" in refused.json()["error"]
    for name in ("FAKE", "Fake:latest"):  # the server's own names have one spelling
        assert (await served.post("/v1/completions", {"model": name, "prompt": "x"})).status_code == 404
    await served.client.request("DELETE", "/api/delete", json={"model": "team/MILL"})
    assert (await served.post("/api/show", {"model": "team/mill"})).status_code == 404


async def test_a_pull_whose_client_leaves_ends_in_a_model_that_can_be_asked_for(served: Served, tmp_path: Path) -> None:
    changes, go_on = Changes(served.context), threading.Event()

    def work(tell: Any) -> None:
        tell(Progress("pulling manifest"))
        go_on.wait(60)
        pull_local(open_store(), tmp_path / "models" / "weights")

    lines: Any = await changes.lines(work)
    assert json.loads(await anext(lines)) == {"status": "pulling manifest"}
    await lines.aclose()
    go_on.set()
    await until(lambda: served.context.shared.models.find("weights") is not None)
    assert not changes.running


async def test_a_modelfile_makes_one_too(served: Served) -> None:
    text = 'FROM weights\nPARAMETER num_ctx 32\nSYSTEM """a\nb"""\nMESSAGE user Hi\nMESSAGE assistant Ho\n'
    done = await served.post("/api/create", {"name": "mill", "modelfile": text, "stream": False})
    assert done.json() == {"status": "success"}
    entry = open_store().get("mill")
    assert entry.words.system == "a\nb" and entry.parameters == {"num_ctx": 32} and len(entry.words.messages) == 2
    for change, word in {
        "FROM nowhere": "nowhere",
        "SYSTEM a": "FROM",
        "FROM weights\nPARAMETER zzz 1": "zzz",
        "FROM ../secret": "secret",
        "FROM way-out": "way-out",
        "FROM weights\nTEMPLATE {{ .Tools }}": ".Tools",
        "FROM weights\nTEMPLATE {% if %}": "TEMPLATE: the chat template cannot be compiled",
        "FROM weights\nADAPTER lora": "lora",
    }.items():
        answer = await served.post("/api/create", {"name": "bad", "modelfile": change, "stream": False})
        assert answer.status_code == 400 and word in answer.json()["error"], answer.text
    assert open_store().find("bad") is None
    answer = await served.post("/api/create", {"name": "bad", "from": "nowhere"})  # wrong before the first line
    assert answer.status_code == 400 and "nowhere" in answer.json()["error"]


async def test_what_keeps_the_store_from_changing_is_nobodys_fault(served: Served, monkeypatch: Any) -> None:
    """A full disk, and too many changes at once: to be tried again, and no path is told; in streams, too."""
    blob = f"/api/blobs/sha256:{hashlib.sha256(b'a').hexdigest()}"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def asked() -> list[Any]:
        made = [{"name": "b", "from": "weights", "stream": stream} for stream in (False, True)]
        answers = [await served.client.post(blob, content=b"a")]
        answers += [await served.post("/api/create", body) for body in made]
        return [*answers, await served.post("/api/copy", {"source": "mill", "destination": "c"})]

    await served.post("/api/create", {"name": "mill", "from": "weights", "stream": False})
    with monkeypatch.context() as patched:
        patched.setattr("tokenmill.checkpoint.store.os.fsync", full)
        answers = await asked()
        (last,) = steps(answers.pop(2))[1:]  # the stream had begun
        for answer in answers:
            assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
        for said in (last, *(answer.json() for answer in answers)):
            assert "No space" in said["error"] and str(open_store().home) not in said["error"]
    monkeypatch.setattr("tokenmill.server.ollama.store_changes.AT_ONCE", 0)
    assert [answer.status_code for answer in await asked()] == [201, 503, 503, 200]


async def test_a_model_that_goes_is_at_no_moment_the_servers_own(served: Served, tmp_path: Path) -> None:
    changes, store = Changes(served.context), open_store()
    pull_local(store, tmp_path / "models" / "weights", "mill")
    await changes.sync()
    assert changes.stored("mill") is not None
    store.remove("mill")
    going = asyncio.create_task(changes.sync())
    while not going.done():
        changes.check_free("mill")  # whoever asks meanwhile may have the name
        await asyncio.sleep(0)
    assert served.context.shared.models.find("mill") is None and changes.stored("mill") is None
    with pytest.raises(HttpError):
        changes.check_free("fake")


async def test_hostile_names_say_nothing_of_this_machine(served: Served) -> None:
    for name in BAD:
        for path, body in {
            "/api/pull": {"model": name, "stream": False},
            "/api/create": {"model": name, "from": "weights", "stream": False},
            "/api/copy": {"source": "weights", "destination": name},
            "/api/delete": {"model": name},
        }.items():
            answer = await served.post(path, body)
            assert answer.status_code in (400, 404), (path, answer.text)
    for path, body in {"pull": {"model": "fake"}, "create": {"model": "fake", "from": "weights"},
                       "copy": {"source": "weights", "destination": "fake"}}.items():  # fmt: skip
        answer = await served.post(f"/api/{path}", body)
        assert answer.status_code == 400 and "started with a model 'fake'" in answer.json()["error"]
    for path, body in {"delete": {"model": "fake"}, "copy": {"source": "other", "destination": "x"}}.items():
        answer = await served.post(f"/api/{path}", body)
        assert answer.status_code == 400 and "it is not stored, and stays" in answer.json()["error"]
    assert open_store().entries() == ([], [])


async def test_paths_outside_the_folder_are_as_absent_as_what_is_not_there(served: Served, tmp_path: Path) -> None:
    for name in ("../secret", str(tmp_path / "secret"), "way-out", "nothing", "weights/config.json"):
        answer = await served.post("/api/pull", {"model": name, "stream": False})
        assert answer.status_code in (400, 404)
        assert "secret" not in answer.json()["error"].replace(ascii(name), "")
    inside = await served.post("/api/pull", {"model": str(tmp_path / "models" / "weights"), "stream": False})
    assert inside.json() == {"status": "success"} and "weights:latest" in await names(served)


async def test_files_come_by_digest(served: Served, tmp_path: Path) -> None:
    weights = tmp_path / "models" / "weights"
    files = {}
    for file in weights.iterdir():
        digest = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        assert (await served.client.head(f"/api/blobs/{digest}")).status_code == 404
        wrong = await served.client.post(f"/api/blobs/{digest}", content=b"something else")
        assert wrong.status_code == 400 and "digest" in wrong.json()["error"]
        assert (await served.client.post(f"/api/blobs/{digest}", content=file.read_bytes())).status_code == 201
        assert (await served.client.post(f"/api/blobs/{digest}", content=b"whatever")).status_code == 200
        assert (await served.client.head(f"/api/blobs/{digest}")).status_code == 200
        files[file.name] = digest
    assert (await served.client.post("/api/blobs/md5:12", content=b"x")).status_code == 400
    missing = {**files, "more.json": "sha256:" + "1" * 64}
    for bad, word in ((missing, "more.json"), ({"../x": files["config.json"]}, "without folders")):
        answer = await served.post("/api/create", {"model": "sent", "files": bad, "stream": False})
        assert answer.status_code == 400 and word in answer.json()["error"]
    odd = {"model.gguf": files["config.json"]}
    answer = await served.post("/api/create", {"model": "sent", "files": odd, "stream": False})
    assert answer.status_code == 400 and "not a usable GGUF file" in answer.json()["error"]
    assert "sent:latest" not in await names(served)
    said = steps(await served.post("/api/create", {"model": "sent", "files": files}))
    assert [each["status"][:27] for each in said[:2]] == ["using existing layer sha256"] * 2
    store = open_store()
    folder = store.folder(store.get("sent").source)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert len(list(store.blobs.iterdir())) == 2
    assert (await served.post("/api/delete", {"model": "sent"})).status_code == 200
    assert not list(store.blobs.iterdir()) and not list(store.files.iterdir())


@pytest.mark.parametrize(
    ("weights", "word"),
    [(None, "there is no adapter_model.safetensors"), (b"<html>", "a web page"), (b"x" * 9, "short")],
)
async def test_an_adapter_without_weights_is_refused(
    weights: bytes | None, word: str, served: Served, tmp_path: Path
) -> None:
    (folder := tmp_path / "models" / "side").mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    if weights is not None:
        (folder / "adapter_model.safetensors").write_bytes(weights)
    body = {"model": "both", "modelfile": "FROM weights\nADAPTER side", "stream": False}
    answer = await served.post("/api/create", body)
    assert answer.status_code == 400 and word in answer.json()["error"]
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert (await served.post("/api/create", body)).status_code == 200


async def test_an_adapter_that_does_not_fit_is_refused(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "models" / "side").mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def refuse(config: EngineConfig, adapter: Path) -> None:
        assert config.model.model == str(tmp_path / "models" / "weights") and adapter == folder
        raise ModelError(f"{adapter}: it has another base.")

    monkeypatch.setattr("tokenmill.server.ollama.create.check_fit", refuse)
    for stream in (False, True):
        body = {"model": "both", "modelfile": "FROM weights\nADAPTER side", "stream": stream}
        answer = await served.post("/api/create", body)
        assert answer.status_code == 400 and answer.json() == {"error": "side: it has another base."}
    assert "both:latest" not in await names(served)


async def test_no_two_models_share_a_name(served: Served, tmp_path: Path) -> None:
    """A model with an adapter has its base beside it, whose name gives way to models of that name, old and new."""
    (folder := tmp_path / "models" / "side").mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    models = served.context.shared.models
    plain, adapted = {"from": "weights"}, {"modelfile": "FROM weights\nADAPTER side"}
    for name, body in (("x-base", plain), ("x", adapted), ("y", adapted), ("Y-Base", plain)):
        done = await served.post("/api/create", {"model": name, "stream": False, **body})
        assert done.status_code == 200, done.text
    assert {"x:latest", "x-base:latest", "y:latest", "Y-Base:latest"} <= set(await names(served))
    for name in ("x-base", "Y-Base"):
        entry = models.find(name)
        assert entry is not None and entry.name == name and not entry.spec.adapters
    for name in ("x", "y"):
        entry = models.find(name)
        assert entry is not None and entry.spec.adapters == (name,) and entry.name == f"{name}-base-base"
        with pytest.raises(HttpError, match="is a stored model"):
            _check_not_stored(served.context, name)


async def test_files_have_a_ceiling(start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    served = await start(allow_model_changes=True, max_blob_bytes=1000)
    sent = []
    for size, status in ((1001, 400), (600, 201), (500, 400), (300, 201)):
        data = bytes([size % 251]) * size
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        sent.append((await served.client.post(f"/api/blobs/{digest}", content=data)).status_code == status)
    assert all(sent) and sum(path.stat().st_size for path in open_store().blobs.iterdir()) == 900


async def test_large_files_pass_the_sockets(listen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a body may otherwise have, in chunks, at a real listener."""
    import httpx

    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path))
    data = bytes(range(256)) * (12 << 10)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    listening = await listen(allow_model_changes=True, max_body_bytes=1 << 20, max_blob_bytes=4 << 20)
    pieces = [data[at : at + 100_000] for at in range(0, len(data), 100_000)]

    async def body(times: int = 1) -> Any:
        for piece in pieces * times:
            yield piece

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listening.port}", timeout=120) as client:
        assert (await client.post(f"/api/blobs/{digest}", content=body())).status_code == 201
        assert (await client.head(f"/api/blobs/{digest}")).status_code == 200
        other = digest[:-1] + ("0" if digest[-1] != "0" else "1")
        assert (await client.post(f"/api/blobs/{other}", content=data)).status_code == 400
        assert (await client.post("/api/show", content=b" " * (2 << 20))).status_code == 413
    assert open_store().blob(digest).read_bytes() == data


async def test_openings_stand_before_conversations(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}],
    }
    served, plain = await start(opening=opening), await start()
    hi, own = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Mine."}
    said = [{"role": "system", "content": "Be brief."}, *opening["messages"], hi]
    for given, meant in (([hi], said), ([own, hi], [own, *opening["messages"], hi])):
        found = await served.post("/apply-template", {"messages": given})
        assert found.json() == (await plain.post("/apply-template", {"messages": meant})).json()
        counted = await served.post("/tokenize", {"messages": given})
        assert counted.json()["count"] == (await plain.post("/tokenize", {"messages": meant})).json()["count"]
        asked = {"model": "fake", "messages": given, "stream": False}
        again = {**asked, "messages": meant}
        first, second = await served.post("/api/chat", asked), await plain.post("/api/chat", again)
        assert first.json()["prompt_eval_count"] == second.json()["prompt_eval_count"]
    raw = {"model": "fake", "prompt": "abc", "raw": True, "stream": False}
    assert (await served.post("/api/generate", raw)).json()["prompt_eval_count"] == 3


@pytest.mark.parametrize("opening", [
    {"sistem": "x"}, {"system": 3}, {"messages": "x"}, {"messages": [3]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "tool", "content": "x"}]}, {"messages": [{"role": "user", "content": 3}]},
    {"messages": [{"role": "user", "content": "x", "name": "y"}]},
])  # fmt: skip
def test_bad_openings_are_refused(opening: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="--opening is"):
        check_opening(opening)


def test_stored_parameters_are_defaults_of_requests() -> None:
    stored = {"stop": ["x"], "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 3, "mirostat": 2, "top_k": 7}

    def read(**given: Any) -> SamplingParams:
        body = CompletionRequest.model_validate({"prompt": "a", **given})
        return sampling_params(body, stored, RequestLimits(), max_tokens=4, logprobs=None)

    assert read() == SamplingParams(max_tokens=4, **stored)
    mine = {"stop": ["y"], "presence_penalty": 0.0, "frequency_penalty": -1.0, "seed": 4, "mirostat": 0, "top_k": 1}
    assert read(**mine) == SamplingParams(max_tokens=4, **mine)


@pytest.mark.parametrize(
    ("config", "reach"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 64}, 64),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": None}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": {"rope_type": "linear"}}}, None),
        ({"max_position_embeddings": "64"}, None),
        ({}, None),
    ],
)
async def test_a_context_beyond_the_models_is_refused_when_it_is_stored(
    config: dict[str, Any], reach: int | None, served: Served, tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "short"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert stated_context(folder) == reach
    for wanted, fits in ((64, True), (65, reach is None)):
        body = {"name": f"ctx{wanted}", "from": "short", "parameters": {"num_ctx": wanted}, "stream": False}
        answer = await served.post("/api/create", body)
        assert answer.status_code == (200 if fits else 400), answer.text
        assert fits or "num_ctx is 65, and this model's context is 64 tokens" in answer.json()["error"]


def test_the_context_of_gguf_files(tmp_path: Path) -> None:
    for name, more, reach in (("a", {}, 64), ("b", {"llama.rope.scaling.type": "yarn"}, None)):
        said = {"general.architecture": "llama", "llama.context_length": 64, **more}
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "m.gguf", said, [])
        assert stated_context(tmp_path / name / "m.gguf") == stated_context(tmp_path / name) == reach
