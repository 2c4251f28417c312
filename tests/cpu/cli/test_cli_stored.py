"""Stored models by the verbs: made, listed, shown, used wherever MODEL is expected, copied, removed."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu.cli.cli_helpers import run

from tokenmill.checkpoint.stored import open_store
from tokenmill.cli.flags import resolve_stored, stored_names
from tokenmill.core.config import make_server_config
from tokenmill.demo import demo_dir
from tokenmill.server.many_models.models_file import name_models
from tokenmill.testing.tiny import make_tiny

SMALL = ["--kv-cache-memory-bytes", "4000000", "--max-num-seqs", "8"]
MODELFILE = """FROM ./tiny
PARAMETER temperature 0
PARAMETER num_predict 5
PARAMETER num_ctx 256
SYSTEM "Be brief."
TEMPLATE \"\"\"{{ .System }}|{{ .Prompt }}|{{ .Response }}\"\"\"
MESSAGE user Hi
MESSAGE assistant Ho
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    make_tiny(folder / "tiny")
    (folder / "Modelfile").write_text(MODELFILE)
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))


def rows() -> list[list[str]]:
    return [line.split() for line in run("list").stdout.splitlines()]


def test_a_model_is_made_told_of_and_removed(place: Path) -> None:
    assert rows() == [["NAME", "ID", "SIZE", "FORMAT", "CHANGED"]]
    assert run("pull", str(place / "tiny")).stdout.startswith("tiny: safetensors, ")
    assert run("create", "mill", "-f", str(place / "Modelfile")).stdout.startswith("mill: safetensors, ")
    assert run("cp", "mill", "team/mill:v1").stdout == "team/mill:v1: the same as mill\n"
    assert {row[0] for row in rows()[1:]} == {"tiny:latest", "mill:latest", "team/mill:v1"}
    by_name = {row[0]: row for row in rows()[1:]}
    assert by_name["mill:latest"][1] == by_name["team/mill:v1"][1] != by_name["tiny:latest"][1]
    assert stored_names("m") == ["mill"] and stored_names("zz") == []
    shown = run("show", "mill").stdout
    assert "SYSTEM Be brief." in shown and "PARAMETER num_ctx 256" in shown and "MESSAGE assistant Ho" in shown
    (place / "Again").write_text(run("show", "mill", "--only", "modelfile").stdout)
    run("create", "again", "-f", str(place / "Again"))
    assert open_store().get("again").digest == open_store().get("mill").digest
    assert run("show", "mill", "--only", "template").stdout == "{{ .System }}|{{ .Prompt }}|{{ .Response }}\n"
    for words in (["--only", "parameters"], ["--parameters"]):
        shown = run("show", "mill", *words).stdout.splitlines()
        assert [line.split() for line in shown] == [["num_ctx", "256"], ["num_predict", "5"], ["temperature", "0.0"]]
    assert run("show", "mill", "--only", "system").stdout == "Be brief.\n"
    assert "stored already" in run("cp", "mill", "again", code=2).stderr
    assert run("rm", "mill", "again", "team/mill:v1").stdout == "removed mill\nremoved again\nremoved team/mill:v1\n"
    assert "not found" in run("rm", "mill", code=2).stderr and (place / "tiny" / "config.json").exists()


def test_the_demo_is_known_to_all_of_these_verbs() -> None:
    shown = run("show", "demo").stdout
    assert shown.startswith("# demo:latest, safetensors, ") and shown.endswith("FROM demo\n")
    for part in ("modelfile", "parameters", "template", "system", "license"):
        run("show", "demo", "--only", part)
    assert run("cp", "demo", "mine").stdout == "mine: the same as demo\n"
    assert resolve_stored("mine", {}).config.model.model == str(demo_dir("main").absolute())
    assert "choose another name" in run("cp", "mine", "demo", code=2).stderr
    assert "cannot be removed" in run("rm", "demo", code=2).stderr
    assert "model 'nothing' not found" in run("show", "nothing", code=2).stderr


def test_one_is_made_from_another(place: Path) -> None:
    run("create", "mill", "-f", str(place / "Modelfile"))
    (place / "Child").write_text("FROM mill\nPARAMETER num_predict 7\nPARAMETER stop zz\nMESSAGE user Hey\n")
    run("create", "child", "-f", str(place / "Child"))
    child, mill = open_store().get("child"), open_store().get("mill")
    assert child.parameters == {**mill.parameters, "num_predict": 7, "stop": ["zz"]} and child.parent == "mill"
    assert child.words.system == "Be brief." and child.words.template == mill.words.template
    assert child.words.messages == [{"role": "user", "content": "Hey"}]
    for text, word in {
        "FROM nowhere": "nowhere",
        "FROM mill\nADAPTER ./tiny": "neither a PEFT folder",
        "": "FROM",
    }.items():
        (place / "Bad").write_text(text)
        assert word in run("create", "bad", "-f", str(place / "Bad"), code=2).stderr
    (place / "Fine").write_text("FROM mill")
    assert "comes with this program" in run("create", "demo", "-f", str(place / "Fine"), code=2).stderr


def test_an_adapter_of_another_base_is_refused(place: Path, tmp_path: Path) -> None:
    for hidden in (64, 32):
        made = make_tiny(tmp_path / f"base-{hidden}", hidden=hidden)
        tensors = {}
        for name, weight in load_file(made / "model.safetensors").items():
            if name.endswith("q_proj.weight"):
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.ones(2, weight.shape[1])
                tensors[f"{stem}.lora_B.weight"] = torch.ones(weight.shape[0], 2)
        (adapter := tmp_path / f"adapter-{hidden}").mkdir()
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}')
    (tmp_path / "Fits").write_text("FROM base-64\nADAPTER adapter-64")
    (tmp_path / "Not").write_text("FROM base-64\nADAPTER adapter-32")
    run("create", "fits", "-f", str(tmp_path / "Fits"))
    assert "it has another base" in run("create", "not", "-f", str(tmp_path / "Not"), code=2).stderr
    assert [entry.name for entry in open_store().entries()[0]] == ["fits:latest"]


def test_generate_and_chat_take_a_stored_name(place: Path) -> None:
    run("create", "mill", "-f", str(place / "Modelfile"))
    asked = ["--prompt", "The mill", "--json", *SMALL]
    found = json.loads(run("generate", "mill", *asked).stdout)
    given = ["--temperature", "0", "--max-tokens", "5"]
    wanted = json.loads(run("generate", str(place / "tiny"), *asked, *given, "--max-model-len", "256").stdout)
    assert found["token_ids"] == wanted["token_ids"] and 0 < found["output_tokens"] <= 5
    said = run("chat", "mill", *SMALL, typed="A\n").stderr
    assert "context 256 tokens" in said and "(5 tokens" in said and "mill: " in said and str(place) not in said


def test_what_is_typed_wins_over_what_is_stored(place: Path) -> None:
    run("create", "mill", "-f", str(place / "Modelfile"))
    settled = resolve_stored("mill", {"max_model_len": 128, "override_generation_config": {"top_k": 3}})
    assert settled.config.model.model == str(place / "tiny") and settled.name == "mill"
    assert settled.config.model.max_model_len == 128 and settled.config.model.served_model_name == "mill"
    generation = settled.config.files.override_generation_config
    assert generation == {"temperature": 0.0, "max_new_tokens": 5, "top_k": 3}
    assert settled.stored is not None and "|" in Path(settled.stored.server["chat_template"]).read_text()
    (spec,) = name_models(["mill"], {}, make_server_config({}))
    assert spec.names == ("mill",) and spec.engine.model.model == str(place / "tiny")
    assert spec.server.messages.opening == settled.stored.server["opening"] and spec.server.serve.chat_template
    assert resolve_stored("demo", {}).stored is None and resolve_stored(str(place / "tiny"), {}).stored is None


def test_stored_names_are_read_by_verbs_that_convert(place: Path, tmp_path: Path) -> None:
    run("pull", str(place / "tiny"), "--name", "small")
    assert "matrices rounded" in run("quantize", "small", str(tmp_path / "out"), "--format", "int8").stdout
    assert "neither" in run("quantize", "sma:ller", str(tmp_path / "other"), "--format", "int8", code=2).stderr


def test_ps_and_stop_ask_a_server() -> None:
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            if self.path.startswith("/moved"):
                return self._say(302, {}, f"http://127.0.0.1:{server.server_port}/elsewhere")
            ends = {"a": "2999-12-31T00:00:00Z", "b": "2001-01-01T00:00:00Z"}
            models = [{"name": f"{n}:latest\x1b[2J", "digest": n * 64, "size_vram": 1 << 20, "context_length": 4096,
                       "expires_at": end} for n, end in ends.items()]  # fmt: skip
            self._say(200, {"models": models})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, body))
            good = body["model"] == "a"
            self._say(200 if good else 404, {"done_reason": "unload"} if good else {"error": "there is no such model"})

        def _say(self, status: int, found: Any, elsewhere: str = "") -> None:
            data = b"<html>" if self.path.startswith("/page") else json.dumps(found).encode()
            self.send_response(status)
            if elsewhere:
                self.send_header("location", elsewhere)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = ["--url", f"http://127.0.0.1:{server.server_port}/v1", "--api-key", "k"]
    try:
        table = [line.split("  ") for line in run("ps", *url).stdout.splitlines()]
        assert [row[0] for row in table[1:]] == ["a:latest\ufffd[2J", "b:latest\ufffd[2J"]
        assert table[1][-1].strip() == "for ever" and table[2][-1].strip() == "now" and "1.0 MiB" in " ".join(table[1])
        assert "is unloaded" in run("stop", "a", *url).stdout
        assert "there is no such model" in run("stop", "b", *url, code=2).stderr
        page = ["ps", "--url", f"http://127.0.0.1:{server.server_port}/page"]
        assert "does not speak Ollama's API" in run(*page, code=2).stderr
        assert "302" in run("ps", "--url", f"http://127.0.0.1:{server.server_port}/moved", *url[2:], code=2).stderr
    finally:
        server.shutdown()
        server.server_close()
    assert asked[0] == ("/api/ps", "Bearer k")
    assert asked[1] == ("/api/generate", {"model": "a", "keep_alive": 0, "stream": False})
    assert asked[-1][0] == "/moved/api/ps", "the key goes nowhere else"
