"""Ollama's API over fake engines."""

from __future__ import annotations

import hashlib
import json

import pytest

from tokenmill.checkpoint.entry import Entry, Source
from tokenmill.checkpoint.stored import open_store
from tokenmill.core.errors import ParameterError
from tokenmill.server.ollama.keep_alive import seconds_of
from tokenmill.server.ollama.routes import details
from tokenmill.server.ollama.stored_files import read_stored
from tokenmill.testing.fake_generator import FakeOptions

CALL = 'Let me see.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
HI = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
ONE = {"options": {"num_predict": 1}}


def lines(answer) -> list[dict]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_streams_are_the_default_and_add_up_to_the_whole(start):
    served = await start(FakeOptions(script="Hello there."))
    streamed = lines(await served.post("/api/chat", HI))
    whole = (await served.post("/api/chat", {**HI, "stream": False})).json()
    assert "".join(x["message"]["content"] for x in streamed) == whole["message"]["content"] == "Hello there."
    last = streamed[-1]
    assert last["done"] and not any(x["done"] for x in streamed[:-1])
    assert last["done_reason"] == whole["done_reason"] == "stop"
    for name in ("prompt_eval_count", "eval_count"):
        assert last[name] == whole[name] > 0
    assert whole["total_duration"] >= whole["prompt_eval_duration"] > 0
    for answer in (last, whole, (await served.post("/api/chat", {**HI, "stream": False, **ONE})).json()):
        assert answer["eval_duration"] > 0 and answer["prompt_eval_duration"] > 0  # clients divide by them
    generated = lines(await served.post("/api/generate", {"model": "fake:latest", "prompt": "Hi"}))
    assert "".join(x["response"] for x in generated) == "Hello there."
    assert generated[-1]["prompt_eval_count"] == whole["prompt_eval_count"]  # the same template around the same words


async def test_calls_come_whole_with_arguments_as_objects(start):
    served = await start(FakeOptions(script=CALL), tool_call_parser="hermes")
    for stream in (True, False):
        answer = await served.post("/api/chat", {**HI, "tools": TOOLS, "stream": stream})
        found = lines(answer) if stream else [answer.json()]
        (calls,) = [x["message"]["tool_calls"] for x in found if "tool_calls" in x["message"]]
        name = calls[0].pop("id")
        assert name.startswith("call_") and calls == [
            {"function": {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}}
        ]
        assert "".join(x["message"]["content"] for x in found).strip() == "Let me see."


async def test_a_call_that_is_cut_is_left_out(start):
    """Its arguments are objects here, and an empty one would be another call."""
    served = await start(FakeOptions(script=CALL), tool_call_parser="hermes")
    for stream in (True, False):
        body = {**HI, "tools": TOOLS, "stream": stream, "options": {"num_predict": len(CALL) - 20}}
        answer = await served.post("/api/chat", body)
        found = lines(answer) if stream else [answer.json()]
        assert not any("tool_calls" in x["message"] for x in found) and found[-1]["done_reason"] == "length"


async def test_options_mean_what_they_say(start):
    served = await start(FakeOptions(script="abcdefgh"))
    body = {**HI, "stream": False, "options": {"num_predict": 3, "seed": 1, "num_ctx": 99, "mirostat": 0}}
    found = (await served.post("/api/chat", body)).json()
    assert found["eval_count"] == 3 and found["done_reason"] == "length"
    body["options"] = {"stop": "d"}
    assert (await served.post("/api/chat", body)).json()["message"]["content"] == "abc"
    raw = {"model": "fake", "prompt": "abc", "raw": True, "stream": False}
    assert (await served.post("/api/generate", raw)).json()["prompt_eval_count"] == 3
    raw["prompt"] = "<|im_start|>user\nabc<|im_end|>\n"  # whoever leaves the template out writes its tokens
    assert (await served.post("/api/generate", raw)).json()["prompt_eval_count"] == len("_user\nabc_\n")


async def test_every_token_s_log_probability_is_in_a_stream(start):
    """Those of tokens without a text of their own as well: the first bytes of a character, tags, what a stop holds."""
    served = await start(FakeOptions(script="<think>Hé</think>Wéll.", step_s=0.001), reasoning_parser="think")
    body = {**HI, "logprobs": True, "top_logprobs": 1, "options": {"stop": ["Wx", "l..."]}}
    whole = (await served.post("/api/chat", {**body, "stream": False})).json()
    streamed = lines(await served.post("/api/chat", body))
    assert [row for line in streamed for row in line.get("logprobs", [])] == whole["logprobs"]
    assert len(whole["logprobs"]) == whole["eval_count"]


@pytest.mark.parametrize(("path", "change", "word"), [
    ("/api/chat", {"options": {"mirostat": 3}}, "mirostat"),
    ("/api/chat", {"options": {"tfs_z": 0.5}}, "tfs_z"),
    ("/api/chat", {"options": {"temperature": -1}}, "temperature"),
    ("/api/chat", {"options": {"num_predict": 0}}, "num_predict"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]}, "images"),
    ("/api/chat", {"format": 3}, "format"),
    ("/api/generate", {"prompt": "x", "suffix": "y", "system": "z"}, "system"),
    ("/api/generate", {"prompt": "x", "template": "y"}, "template"),
    ("/api/generate", {"prompt": "x", "context": [1, 2]}, "context"),
])  # fmt: skip
async def test_what_cannot_be_honoured_is_refused_in_its_shape(start, path, change, word):
    served = await start()
    answer = await served.post(path, {**(HI if path == "/api/chat" else {"model": "fake"}), **change})
    assert answer.status_code == 400 and word in answer.json()["error"]
    assert served.context.gate.open == 0


async def test_models_are_told_of(start):
    served = await start()
    entry, *_ = (await served.client.get("/api/tags")).json()["models"]
    assert entry["name"] == "fake:latest" and len(entry["digest"]) == 64
    assert (await served.client.get("/api/ps")).json()["models"][0]["name"] == entry["name"]
    shown = (await served.post("/api/show", {"model": "fake:latest"})).json()
    assert "im_start" in shown["template"] and "completion" in shown["capabilities"]
    assert (await served.client.get("/api/version")).json()["version"]
    for path, more in {"/api/show": {}, "/api/chat": HI, "/api/embed": {"input": "x"}}.items():
        missing = await served.post(path, {**more, "model": "nope"})
        assert missing.status_code == 404 and "nope" in missing.json()["error"]
    assert (await served.post("/api/pull", {"model": "x"})).status_code == 501
    assert (await served.post("/api/chat", {"model": "fake", "messages": []})).json()["done_reason"] == "load"


async def test_vectors(start):
    served = await start()
    found = (await served.post("/api/embed", {"model": "fake", "input": ["a", "bb"]})).json()
    assert len(found["embeddings"]) == 2 and found["prompt_eval_count"] == 3
    old = (await served.post("/api/embeddings", {"model": "fake", "prompt": "a"})).json()
    assert old["embedding"] == found["embeddings"][0]
    for nothing in ({"input": ""}, {"input": []}, {}):
        empty = (await served.post("/api/embed", {"model": "fake", **nothing})).json()
        assert empty["embeddings"] == [] and empty["prompt_eval_count"] == 0
    assert (await served.post("/api/embeddings", {"model": "fake", "prompt": ""})).json() == {"embedding": []}
    assert (await served.post("/api/embed", {"model": "nope", "input": ""})).status_code == 404


async def test_a_vector_is_that_of_a_text_s_beginning(start):
    """As in Ollama, which cuts the end off: to the context, or to num_ctx."""
    served = await start(FakeOptions(max_model_len=64))

    async def vector(text, **more):
        return (await served.post("/api/embed", {"model": "fake", "input": text, **more})).json()

    assert (await vector("abc" * 30))["embeddings"] == (await vector(("abc" * 30)[:64]))["embeddings"]
    cut = await vector("abcdef", options={"num_ctx": 3})
    assert cut["prompt_eval_count"] == 3 and cut["embeddings"] == (await vector("abc"))["embeddings"]
    refused = await vector("abc" * 30, truncate=False)
    assert refused["error"].startswith("the input length exceeds the context length: ")


async def test_an_error_in_a_stream_is_a_line(start):
    served = await start(FakeOptions(script="a" * 50, step_s=0.05), request_timeout=0.3)
    found = lines(await served.post("/api/chat", HI))
    assert all(line["message"]["content"] for line in found[:-1]) and "deadline" in found[-1]["error"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
async def test_bodies_are_json_whatever_their_type_says(start, kind):
    served = await start(FakeOptions(script="Hello."))
    for path, body in {
        "/api/chat": {**HI, "stream": False},
        "/api/generate": {"model": "fake", "prompt": "x", "stream": False},
        "/api/show": {"model": "fake"},
        "/completion": {"prompt": "x"},
        "/apply-template": HI,
    }.items():
        headers = {"content-type": kind} if kind else {}
        answer = await served.client.post(path, content=json.dumps(body).encode(), headers=headers)
        assert answer.status_code == 200, (path, answer.text)
        bad = await served.client.post(path, content=b"a=b&c=d", headers=headers)
        assert bad.status_code == 400 and "JSON" in bad.text
        page = await served.client.post(path, content=b"{}", headers={**headers, "origin": "http://elsewhere"})
        assert page.status_code == 403  # a form on another page may not use it
    refused = await served.client.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert refused.status_code == 415


def safetensors(folder, entries, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(10))
    return folder


def test_files_are_told_as_they_lie(tmp_path):
    entry = {"data_offsets": [0, 1]}
    entries = {"a": {"dtype": "BF16", "shape": [10, 20], **entry}, "b": {"dtype": "F32", "shape": [5], **entry}}
    folder = safetensors(tmp_path / "plain", {**entries, "__metadata__": {"x": "y"}})
    found = read_stored(str(folder))
    size = (folder / "model.safetensors").stat().st_size
    assert (found.format, found.size, found.parameters, found.level) == ("safetensors", size, 205, "BF16")
    packed = safetensors(tmp_path / "packed", entries, quantization_config={"quant_method": "gptq"})
    assert read_stored(str(packed)).level == "GPTQ"
    assert read_stored("owner/model") is None and read_stored(str(tmp_path)) is None
    (packed / "config.json").write_text("{")
    assert read_stored(str(packed)) is None
    demo = read_stored("demo")
    assert demo.model_info("qwen3")["general.parameter_count"] == demo.parameters
    assert {"qwen3.embedding_length", "qwen3.block_count", "qwen3.attention.head_count"} <= demo.model_info(
        "qwen3"
    ).keys()
    assert demo.family == "qwen3"
    assert demo.format == "safetensors" and demo.parameters > 1_000_000 and demo.size > 2**20


def packed(header):
    return len(header).to_bytes(8, "little") + header + bytes(16)


GOOD = packed(b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}')
LIES = {
    "a list": (b"[]", GOOD),
    "nothing": (b"null", GOOD),
    "deep": (b"[" * 100_000, GOOD),
    "a scheme that is a number": (b'{"quantization_config": 5}', GOOD),
    "a scheme that is a list": (b'{"quantization_config": [1]}', GOOD),
    "a type that is a list": (b'{"model_type": [1], "max_position_embeddings": "x"}', GOOD),
    "a long name": (b'{"model_type": "' + b"x" * 100_000 + b'", "torch_dtype": {"a": 1}}', packed(b"{}")),
    "a header that is a list": (b"{}", packed(b"[]")),
    "a header that is deep": (b"{}", packed(b"[" * 100_000)),
    "a tensor that is a number": (b"{}", packed(b'{"a": 5}')),
    "a shape that is a text": (b"{}", packed(b'{"a": {"dtype": [], "shape": "x"}}')),
    "a shape of no numbers": (b"{}", packed(b'{"a": {"dtype": "F32", "shape": [null, -1, 1e308]}}')),
    "a shape without end": (b"{}", packed(b'{"a": {"dtype": "F32", "shape": [%s, %s]}}' % (b"9" * 4000, b"9" * 4000))),
    "a header that is not there": (b"{}", (1 << 62).to_bytes(8, "little")),
    "a file that is empty": (b"{}", b""),
}


async def test_files_that_lie_are_told_like_any(start, tmp_path, monkeypatch):
    """Clients may send files of models, and files change later; what lists them reads them, and must not fail for
    everybody."""
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    served, good = await start(allow_model_changes=True), {}
    for name, data in (("config.json", b"{}"), ("model.safetensors", GOOD)):
        good[name] = f"sha256:{hashlib.sha256(data).hexdigest()}"
        await served.client.post(f"/api/blobs/{good[name]}", content=data)
    for number, files in enumerate(LIES.values()):
        sent = {}
        for name, data in zip(("config.json", "model.safetensors"), files, strict=True):
            sent[name] = f"sha256:{hashlib.sha256(data).hexdigest()}"
            assert (await served.client.post(f"/api/blobs/{sent[name]}", content=data)).status_code in (200, 201)
        made = {"model": f"m{number}", "files": sent, "stream": False}
        answer = await served.post("/api/create", made)
        if answer.status_code != 200:  # what headers tell is refused: such files can only have changed later
            assert answer.status_code == 400 and len(answer.json()["error"]) < 500
            assert (await served.post("/api/create", {**made, "files": good})).status_code == 200
            open_store().put(Entry(f"m{number}:latest", Source("files", files=sent), size=1, format="safetensors"))
        shown = await served.post("/api/show", {"model": made["model"]})
        assert shown.status_code == 200 and len(shown.text) < 2000
        framed = await served.post("/api/create", {"model": "n", "from": made["model"], "template": "{{ .Prompt }}"})
        assert framed.status_code == 400 and str(tmp_path) not in framed.text  # it has no tokenizer
    answer = await served.client.get("/api/tags")
    listed = {entry["name"]: entry["details"] for entry in answer.json()["models"]}
    assert {f"m{number}:latest" for number in range(len(LIES))} <= set(listed)
    assert len(answer.text) < 1000 * len(listed)


def test_a_family_is_told_before_a_model_is_loaded_and_is_the_same_afterwards(tmp_path):
    tensors = {"a": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]}}
    for number, more in enumerate(({}, {"quantization_config": {"quant_method": "gptq"}})):
        root = str(safetensors(tmp_path / str(number), tensors, model_type="llava", **more))
        for known in ({}, {"family": "llama"}):
            assert details(root, known)["families"] == ["llava"]
    unsaid = str(safetensors(tmp_path / "unsaid", tensors))
    assert details(unsaid, {})["family"] == "unknown" and details(unsaid, {"family": "llama"})["family"] == "llama"
    assert details("owner/model", {"family": "llama"})["family"] == "llama"


async def test_tags_tell_the_files(start, tmp_path, monkeypatch):
    served = await start()
    info = served.context.backend.info
    for root, form, level in (("o/m:Q4_K_M", "gguf", "Q4_K_M"), ("demo", "safetensors", "BF16")):
        monkeypatch.setattr(info, "root", root) if not is_frozen(info) else object.__setattr__(info, "root", root)
        (entry, *_) = (await served.client.get("/api/tags")).json()["models"]
        assert (entry["details"]["format"], entry["details"]["quantization_level"]) == (form, level)
        assert entry["size"] == (read_stored(root).size if read_stored(root) else info.details.get("weight_bytes", 0))


def is_frozen(value):
    return value.__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("5m", 300), ("1h30m", 5400), (".5s", 0.5), ("5.", 5), ("+5", 5), (0.0, 0), ("0s", 0), (1e12, -1), ("-1m", -1),
     ("1\u00b5s1\u03bcs", 2e-6),
     *((wrong, None) for wrong in ("--5", "+-5m", "", ".", "m", "5 m", "5d", "1h-30m"))],
)  # fmt: skip
def test_durations(said: float | str, seconds: float | None) -> None:
    if seconds is not None:
        assert seconds_of(said) == seconds
        return
    with pytest.raises(ParameterError, match="keep_alive must be"):
        seconds_of(said)
