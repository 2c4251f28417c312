"""The store of models: names, torn files, writers at once, files by digest, and what a stored name means."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tokenmill.checkpoint import store as store_module
from tokenmill.checkpoint.blobs import Incoming, check_files, read_digest
from tokenmill.checkpoint.entry import Entry, Source, Words
from tokenmill.checkpoint.gguf_write import Entry as Tensor
from tokenmill.checkpoint.gguf_write import write_gguf
from tokenmill.checkpoint.modelfile_parameters import (
    PARAMETERS,
    as_options,
    check_parameters,
    listed,
    of_generation,
    read_written,
    written,
)
from tokenmill.checkpoint.pull import drop_files, measured, pull_local
from tokenmill.checkpoint.store import STALE_S, NoSuchModelError, Store
from tokenmill.checkpoint.stored import as_stored, find_stored, location, rank_of, under
from tokenmill.checkpoint.stored_names import file_name, full_name, name_from, short_name
from tokenmill.core.errors import BusyError, ModelError, ParameterError, TooLargeError, UserError

HOSTILE = [
    "", " ", ".", "..", "...", "/", "//", "a/", "/a", "a//b", "../a", "a/..", "a/../b", "./a", "~", "~/a", "a/~b",
    "C:\\a", "a\\b", "a\0", "\0", "a\n", "\na", "a\tb", "a b", " a", "a ", "a:", ":a", "a:b:c", "a:..", "a:/b", "a/b/c",
    "a/b/c:d", "x" * 97, "x" * 500, "a:" + "x" * 97, "ａ", "а", "a\u2024b", "a\u2215b", "a\u200b", "é", "a%2fb", "a+b",
    "a@b", "-a", ".a", "_a", "a.", "a/.b", "a/b.", "a:b.", "http://a", "hf.co/", "hf.co/a/b/c", "a..b", "*", "a?",
    "a;b", "a|b", "<a>", "a,b", '"a"', "'a'", "\ud800", "a\u202eb",
]  # fmt: skip


NOTHING = (92).to_bytes(8, "little") + b"{}"
"""How a safetensors file of 100 bytes begins that holds no tensors."""
GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(NOTHING + b" " * (100 - len(NOTHING)))
    return folder


def entry(name: str, **more: object) -> Entry:
    return Entry(name, Source("path", path="/nowhere"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_are_refused_before_anything_is_touched(store: Store, name: str) -> None:
    for use in (store.get, store.remove, lambda n: store.put(entry(n)), lambda n: store.copy("a", n)):
        with pytest.raises(UserError) as told:
            use(name)
        assert str(told.value).isprintable() and len(str(told.value)) < 400
    assert store.find(name) is None
    assert not store.home.exists() or not list(store.models.iterdir())


def test_names_have_one_spelling_and_one_file() -> None:
    assert full_name("mill") == "mill:latest" and short_name("mill:latest") == "mill"
    assert full_name("hf.co/Owner/Name:Q4_K_M") == full_name("huggingface.co/Owner/Name:Q4_K_M") == "Owner/Name:Q4_K_M"
    assert full_name("HF.CO/a/b") == "a/b:latest"
    files = [file_name(full_name(name)) for name in ("a/b", "a:b", "a", "b", "a/b:c", "a-b", "a.b", "a_b")]
    assert len(set(files)) == len(files) and all("/" not in file and not file.startswith(".") for file in files)
    assert file_name("A/B:C") == file_name("a/b:c")
    for given, name in {"my model (1).gguf": "my-model-1", "..": "model", "x" * 300: "x" * 96, "Q4.gguf": "Q4"}.items():
        assert name_from(given) == name and full_name(name_from(given))


def test_what_is_put_is_what_is_found(store: Store) -> None:
    words = Words(
        system="S é\U0001f600", template="{{ a }}", messages=[{"role": "user", "content": "Hi"}], license=["L"]
    )
    put = store.put(entry("Mill", parameters={"temperature": 0.5, "stop": ["a"]}, words=words, size=7, format="gguf"))
    assert store.get("mill:latest") == put and put.name == "Mill:latest" and put.changed > 0
    again = store.copy("mill", "owner/other:tag")
    assert again.digest == put.digest and again.name == "owner/other:tag"
    found, wrong = store.entries()
    assert [each.name for each in found] == ["owner/other:tag", "Mill:latest"] and not wrong
    assert store.remove("MILL") == put and store.find("mill") is None
    with pytest.raises(NoSuchModelError, match="tokenmill list"):
        store.remove("mill")
    assert put.digest != store.put(entry("mill", parameters={"temperature": 0.6})).digest


@pytest.mark.parametrize("data", [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"name": "mill:latest"}', b'{"name": 3, "source": {"kind": "path"}}',
    b'{"name": "mill:latest", "source": {"kind": "other"}}', b"[" * 100_000,
    b'{"name": "other:latest", "source": {"kind": "path"}}', b'{"name": "../mill:latest", "source": {"kind": "path"}}',
    b'{"name": "mill:latest", "source": {"kind": "path"}, "zzz": 1}', b" " * (9 << 20),
])  # fmt: skip
def test_torn_manifests_harm_no_other_model_and_can_be_removed(store: Store, data: bytes) -> None:
    store.put(entry("fine"))
    (store.models / file_name("mill:latest")).write_bytes(data)
    found, (wrong,) = store.entries()
    assert [each.name for each in found] == ["fine:latest"] and "mill@latest.json" in wrong
    with pytest.raises(ModelError, match=r"mill@latest\.json"):
        store.get("mill")
    assert store.remove("mill") is None
    assert store.entries()[1] == [] and store.put(entry("mill")) == store.get("mill")


def test_a_manifest_that_is_no_file_is_told(store: Store) -> None:
    store.put(entry("fine"))
    os.mkfifo(store.models / "pipe@latest.json")
    (store.models / "away@latest.json").symlink_to("/nonexistent")
    assert len(store.entries()[0]) == 1 and len(store.entries()[1]) == 2


def test_a_write_that_fails_leaves_what_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.put(entry("mill"))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="No space left"):
        store.put(entry("mill", size=9))
    monkeypatch.undo()
    assert store.get("mill") == before and len(list(store.models.iterdir())) == 1


def write_many(home: str, number: int, count: int) -> None:
    store = Store(Path(home))
    for i in range(count):
        store.put(entry("shared", parameters={"seed": number * 1000 + i}))
        store.put(entry(f"own-{number}-{i}"))
        if i % 2:
            store.remove(f"own-{number}-{i - 1}")
        assert store.find("shared") is not None


def test_writers_in_threads_and_processes_undo_nothing(store: Store) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_many, args=(str(store.home), n, 10)) for n in range(2)]
    threads = [threading.Thread(target=write_many, args=(str(store.home), n, 10)) for n in (2, 3)]
    for each in (*processes, *threads):
        each.start()
    seen = 0
    while any(each.is_alive() for each in (*processes, *threads)):
        _, wrong = store.entries()
        assert not wrong
        seen += 1
    for each in (*processes, *threads):
        each.join()
    assert all(process.exitcode == 0 for process in processes) and seen
    found, wrong = store.entries()
    kept = {f"own-{n}-{i}:latest" for n in range(4) for i in range(1, 10, 2)}
    assert {each.name for each in found} == {"shared:latest", *kept} and not wrong
    assert not [path for path in store.models.iterdir() if path.name.startswith(".")]


# ---------------------------------------------------------------- files that clients send


def send(store: Store, data: bytes, most: int = 1 << 20) -> str:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    incoming = Incoming(store, digest, most, len(data))
    try:
        for at in range(0, len(data), 7):
            incoming.write(data[at : at + 7])
        incoming.finish()
    finally:
        incoming.close()
    return digest


def test_files_are_kept_while_a_model_needs_them(store: Store) -> None:
    first, second = send(store, b"first"), send(store, b"second")
    source = Source("files", files={"model.gguf": first})
    store.put(Entry("a", source))
    store.copy("a", "b")
    path, _ = location(store, source)
    assert path.endswith("/model.gguf") and Path(path).read_bytes() == b"first"
    store.remove("a")
    assert store.blob(first).exists() and Path(path).exists()
    store.remove("b")
    assert not store.blob(first).exists() and not Path(path).exists()
    assert store.blob(second).exists()  # somebody may be about to use it
    old = store.blob(second).stat().st_mtime - STALE_S - 9
    os.utime(store.blob(second), (old, old))
    store.collect()
    assert not list(store.blobs.iterdir())
    with pytest.raises(UserError, match="send it first"):
        store.put(Entry("a", source))


def test_a_torn_manifest_keeps_all_files(store: Store) -> None:
    digest = send(store, b"data")
    store.put(Entry("a", Source("files", files={"model.gguf": digest})))
    (store.models / "b@latest.json").write_text("{")
    store.remove("a")
    assert store.blob(digest).exists()


def test_files_are_verified_and_bounded(store: Store) -> None:
    digest = f"sha256:{hashlib.sha256(b'right').hexdigest()}"
    incoming = Incoming(store, digest, 100)
    incoming.write(b"wrong")
    with pytest.raises(ParameterError, match="not what its digest says"):
        incoming.finish()
    incoming.close()
    assert not list(store.blobs.iterdir())
    with pytest.raises(TooLargeError, match="at most 4 bytes"):
        send(store, b"right", 4)
    send(store, b"one", 7)
    with pytest.raises(TooLargeError, match="together"):
        send(store, b"right", 7)
    with pytest.raises(BusyError, match="no room"):
        Incoming(store, digest, 1 << 62, 1 << 60)
    assert len(list(store.blobs.iterdir())) == 1


@pytest.mark.parametrize("digest", [
    "", "sha256:", "sha256:" + "0" * 63, "sha256:" + "0" * 65, "sha256:" + "A" * 64, "md5:" + "0" * 64, "0" * 64, None,
    "sha256:" + "../" * 21 + "0", "sha256:" + "0" * 63 + "\n", "sha256:" + "٠" * 64,
])  # fmt: skip
def test_bad_digests(digest: object) -> None:
    with pytest.raises(ParameterError, match="64 lower-case hexadecimal"):
        read_digest(digest)


@pytest.mark.parametrize("name", ["", "..", "../a", "a/b", ".a", "a\0", "a..b", "é", "x" * 129, "a b", "a\\b"])
def test_bad_names_of_files(name: str) -> None:
    with pytest.raises(ParameterError, match="a file's name"):
        check_files({name: "sha256:" + "0" * 64})
    with pytest.raises(ParameterError, match="case alone"):
        check_files(dict.fromkeys(("a", "A"), "sha256:" + "0" * 64))


# ---------------------------------------------------------------- what a name means


def test_the_rank_of_an_adapter_of_few_experts(tmp_path: Path) -> None:
    halves = {"lora_a": (4, 32, 64), "lora_b": (4, 64, 32)}
    entries = [
        Tensor(f"blk.0.ffn_up_exps.weight.{half}", shape, "F32", lambda: [bytes(4 * 4 * 32 * 64)])
        for half, shape in halves.items()
    ]
    write_gguf(tmp_path / "a.gguf", {"general.architecture": "qwen3moe"}, entries)
    assert rank_of(tmp_path / "a.gguf") == 32


def test_a_stored_model_is_options(store: Store, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled = pull_local(store, weights)
    assert (pulled.name, pulled.format, pulled.size) == ("weights:latest", "safetensors", 100)
    adapter = weights.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 4, "rank_pattern": {"a": 64}}))
    words = Words(system="Be brief.", template="{{ x }}", messages=[{"role": "user", "content": "Hi"}])
    parameters = {"temperature": 0.5, "num_ctx": 64, "num_gpu": 0, "stop": ["a"], "seed": -1, "num_predict": -1}
    store.put(Entry("mill:small", pulled.source, parameters, words, adapter=Source("path", path=str(adapter))))
    found = find_stored("mill:small", store)
    assert found is not None and found.name == "mill:small" and found.system == "Be brief."
    assert found.options["model"] == str(weights) and found.options["max_model_len"] == 64
    assert found.options["device"] == "cpu" and found.options["max_lora_rank"] == 64
    assert json.loads(found.options["lora_modules"][0]) == {"name": "mill:small", "path": str(adapter)}
    assert found.options["served_model_name"] == "mill:small-base"
    generation = {"temperature": 0.5, "stop": ["a"], "do_sample": True}
    assert found.options["override_generation_config"] == generation
    assert Path(found.server["chat_template"]).read_text() == "{{ x }}"
    assert found.server["opening"] == {"system": "Be brief.", "messages": words.messages}
    mine = under(
        found, {"model": "mill:small", "max_model_len": 32, "override_generation_config": {"temperature": 0.0}}
    )
    assert mine["model"] == str(weights) and mine["max_model_len"] == 32
    assert mine["override_generation_config"] == {**generation, "temperature": 0.0}
    for name in ("demo", str(weights), "mill", "owner/absent", "../x", ""):
        assert find_stored(name, store) is None
    monkeypatch.chdir(weights.parent)
    pull_local(store, weights, "adapter")
    assert find_stored("adapter", store) is None  # a folder of that name lies here
    shutil.rmtree(weights)
    with pytest.raises(UserError, match="no longer exists"):
        as_stored(store, store.get("mill:small"))


def test_a_hub_model_is_asked_for_again_when_its_files_are_gone(store: Store, weights: Path) -> None:
    source = Source("hub", path=str(weights), repo="owner/name:Q4_K_M", revision="abc")
    assert location(store, source) == (str(weights), "")
    shutil.rmtree(weights)
    assert location(store, source) == ("owner/name:Q4_K_M", "abc")
    stored = as_stored(store, Entry("x:latest", source))
    assert stored.options["model"] == "owner/name:Q4_K_M" and stored.options["revision"] == "abc"


def test_what_a_pull_brought_goes_with_the_last_model_that_needs_it(store: Store, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--a--b"
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("x", "y"):
        (blobs / name).write_bytes(b"12345")
        (snapshot / f"model-{name}.safetensors").symlink_to(blobs / name)
    other = repo / "snapshots" / "def"
    other.mkdir()
    (other / "model-y.safetensors").symlink_to(blobs / "y")
    source = Source("hub", path=str(snapshot), repo="a/b", revision="abc", fetched=True)
    first = store.put(Entry("a/b", source))
    store.copy("a/b", "mine")
    store.remove("a/b")
    assert drop_files(store, first) == 0 and (blobs / "x").exists()
    store.remove("mine")
    assert drop_files(store, first) == 5 and [path.name for path in blobs.iterdir()] == ["y"] and not snapshot.exists()
    assert drop_files(store, Entry("z", Source("hub", path=str(other), repo="a/b"))) == 0 and other.exists()


def test_what_is_no_model_is_not_stored(store: Store, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path, word in ((tmp_path, "no weights"), (tmp_path / "notes.txt", "neither"), (tmp_path / "none", "neither")):
        with pytest.raises(UserError, match=word):
            pull_local(store, path)
    for name, data in _SPLIT.items():
        (tmp_path / name).write_bytes(GGUF + data)
    for name, size in (("big", 5), ("big-Q4", 11), ("big[1]", 3)):
        assert measured(tmp_path / f"{name}-00001-of-00002.gguf") == ("gguf", 2 * len(GGUF) + size)


PAGE, POINTER = b"<!DOCTYPE html><title>Log in</title>", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


def gguf_of(kind: bytes) -> bytes:
    """How a GGUF file of this general.type begins."""
    key = b"\x0c" + bytes(7) + b"general.type" + b"\x08" + bytes(3)
    return GGUF[:16] + b"\x01" + bytes(7) + key + len(kind).to_bytes(8, "little") + kind


ZIPPED = b"PK\x03\x04".ljust(100)
_PLACES = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
INDEX = {"pytorch_model.bin.index.json": json.dumps({"weight_map": _PLACES}).encode()}


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"a.gguf": b"hello world"}, "does not begin with GGUF"),
        ({"a.gguf": POINTER}, "Git LFS pointer"),
        ({"a.gguf": b"GGUF\x03"}, "ends"),
        ({"a.gguf": gguf_of(b"adapter")}, "an adapter, not a model"),
        ({"a.gguf": gguf_of(b"imatrix")}, "importance of a model's columns, not a model"),
        ({"a.gguf": gguf_of(b"mmproj")}, "sees or hears, not a model"),
        ({"a-00001-of-00002.gguf": GGUF, "a-00002-of-00002.gguf": PAGE}, "a web page"),
        ({"model.safetensors": NOTHING.ljust(100)}, "no config.json"),
        ({"model.safetensors": NOTHING.ljust(100), "adapter_config.json": b"{}"}, "it is an adapter, not a model"),
        ({"model.safetensors": NOTHING.ljust(100), "config.json": b"[]"}, "must hold a JSON object"),
        ({"model.safetensors": NOTHING.ljust(100), "config.json": PAGE}, "a web page"),
        ({"model.safetensors": b"hello, world, this is no model", "config.json": b"{}"}, "its header claims"),
        ({"model.safetensors": NOTHING.ljust(90), "config.json": b"{}"}, "truncated"),
        ({"model.safetensors": NOTHING.ljust(101), "config.json": b"{}"}, "the file holds 1"),
        ({"model.safetensors": POINTER, "config.json": b"{}"}, "Git LFS pointer"),
        ({"pytorch_model.bin": b"hello", "config.json": b"{}"}, "no file that torch.save"),
        ({"pytorch_model.bin": PAGE, "config.json": b"{}"}, "a web page"),
        ({"pytorch_model-1.bin": ZIPPED, "config.json": b"{}", **INDEX}, "'pytorch_model-2.bin', which"),
    ],
)
def test_files_that_are_no_model_are_refused_in_one_sentence(
    files: dict[str, bytes], word: str, store: Store, tmp_path: Path
) -> None:
    (folder := tmp_path / "some").mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for path in {folder, *folder.glob("*00001*.gguf"), *folder.glob("a.gguf")}:
        with pytest.raises(UserError, match=word) as told:
            pull_local(store, path)
        assert len(str(told.value)) < 400 + len(str(path)) and "\n" not in str(told.value)
    assert not store.entries()[0]


def test_a_second_copy_of_the_weights_is_not_looked_at(weights: Path) -> None:
    (weights / "consolidated.safetensors").write_bytes(b"half a copy")
    assert measured(weights)[0] == "safetensors"


_SPLIT = {
    "big-00001-of-00002.gguf": b"123", "big-00002-of-00002.gguf": b"45", "big-Q4-00001-of-00002.gguf": b"6789",
    "big-Q4-00002-of-00002.gguf": b"6789abc", "big[1]-00001-of-00002.gguf": b"1", "big[1]-00002-of-00002.gguf": b"23",
}  # fmt: skip


def test_models_in_one_folder_go_one_by_one(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for name, data in {**_SPLIT, "model.safetensors": b"whole"}.items():
        (folder / name).write_bytes(data)
    entries = [
        store.put(Entry(name, Source("hub", path=str(path), repo="a/b", fetched=True)))
        for name, path in {
            "plain": folder / "big-00001-of-00002.gguf",
            "whole": folder,
            "q4": folder / "big-Q4-00001-of-00002.gguf",
        }.items()
    ]
    for entry, size, left in zip(entries, (5, 5, 11), (["Q4", "[1]", "model"], ["Q4", "[1]"], ["[1]"]), strict=True):
        store.remove(entry.name)
        assert drop_files(store, entry) == size, entry.name
        assert all(any(word in file.name for word in left) for file in folder.iterdir())
        assert len(list(folder.iterdir())) == sum(1 if word == "model" else 2 for word in left)


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_is_done_harmless_or_refused(name: str) -> None:
    parameter = PARAMETERS[name]
    assert bool(parameter.into or parameter.option) != bool(parameter.why)
    value = {float: 0.5, int: 1, bool: True, str: "x"}[parameter.kind]
    if parameter.refused:
        value = not value if name == "penalize_newline" else value
        with pytest.raises(ParameterError, match=f"PARAMETER {name} cannot be used"):
            check_parameters({name: value})
        return
    kept = check_parameters({name: value})
    options = as_options(kept)
    assert bool(options) == bool(parameter.into or parameter.option) or name == "num_gpu"
    assert read_written(written(kept)) == kept


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", "hot"), ("temperature", -1), ("temperature", float("nan")), ("temperature", True), ("top_k", 1.5),
    ("top_p", 2), ("seed", "x"), ("stop", ""), ("stop", 3), ("stop", ["x"] * 17), ("stop", "x" * 257), ("num_ctx", 0),
    ("num_ctx", 10**12), ("use_mmap", 1), ("temperatur", 1), ("", 1), ("num_gpu", None.__class__), ("mirostat", 3),
    ("rope_frequency_base", 1e6), ("tfs_z", 0.5), ("main_gpu", 1), ("vocab_only", True),
])  # fmt: skip
def test_unusable_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=f"PARAMETER '?{name}"):
        check_parameters({name: value})


@pytest.mark.parametrize("text", ["1_0", "\u0661", " 1", "1 ", "0x10", "1e", ""])
def test_numbers_are_written_as_everywhere(text: str) -> None:
    """Python alone reads 1_0 as 10."""
    for name in ("temperature", "top_k"):
        with pytest.raises(ParameterError, match="number"):
            read_written([(name, text)])


def test_a_lock_that_is_never_given_back_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PATIENCE_S", 0.0)
    with store.changing(), pytest.raises(BusyError, match="another process is changing the stored models"):
        Store(store.home).put(Entry("a", Source("path", path="/x")))
    assert store.put(Entry("a", Source("path", path="/x"))).name


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere")], ids=["a pipe", "a link"])
def test_whatever_the_lock_is_nobody_waits_for_ever(store: Store, make: Any) -> None:
    store.home.mkdir()
    make(store.home / ".lock")
    assert store.put(Entry("a", Source("path", path="/x"))).name


def test_settings_of_a_model_are_listed_under_the_names_of_parameters() -> None:
    settings = {"do_sample": True, "eos_token_id": [1, 2], "repetition_penalty": 1.5, "temperature": 0.7, "top_k": None}
    found = of_generation(settings)
    assert found == {"repeat_penalty": 1.5, "temperature": 0.7} and found == check_parameters(found)
    assert of_generation({**settings, "do_sample": False})["temperature"] == 0.0
    texts = {"stop": ["a b", 'say "hi"\n'], "use_mmap": True, "seed": 3}
    assert [line.split(maxsplit=1) for line in listed(texts).splitlines()] == [
        ["seed", "3"], ["stop", '"a b"'], ["stop", '"say \\"hi\\"\\n"'], ["use_mmap", "true"],
    ]  # fmt: skip
