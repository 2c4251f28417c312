"""Kernels compiled ahead: when, by how many, and that a load goes on whatever becomes of it. With fake compilers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tokenmill.core.config import make_config
from tokenmill.device.gpu import Gpu
from tokenmill.engine import ahead
from tokenmill.engine.ahead import Nothing, Order, Process, Told, compile_ahead
from tokenmill.engine.ahead_notes import UNRELATED, is_kept, keep, note_of
from tokenmill.engine.ahead_worker import CACHED, COMPILED, FAILED, Farm
from tokenmill.process.pipe import Pipe

GPU = Gpu("NVIDIA H200", (9, 0), 132, 227 << 10, 140 << 30, 139 << 30)


def test_compilers_end_each_in_its_way_and_few_at_a_time(tmp_path: Path) -> None:
    def work(kernel: int) -> int:
        busy = tmp_path / f"{os.getpid()}.busy"
        busy.touch()
        (tmp_path / f"{kernel}.saw").write_text(str(len(list(tmp_path.glob("*.busy")))))
        busy.unlink()
        if kernel == 3:
            raise RuntimeError("does not compile")
        if kernel == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return CACHED if kernel == 5 else COMPILED

    farm = Farm(2, work)
    for kernel in range(8):
        farm.add(kernel)
        assert len(farm.running) <= 2
    farm.finish()
    assert sorted(farm.ended) == sorted([COMPILED] * 5 + [FAILED] * 2 + [CACHED])
    assert all(int(path.read_text()) <= 2 + 1 for path in tmp_path.glob("*.saw")), "one may have died busy"
    assert not farm.running and not farm.waiting


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if there were a GPU, Triton and cores."""
    monkeypatch.setattr(ahead, "_compiles", lambda: True)
    monkeypatch.setattr(ahead, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(ahead, "LEAST_CORES", 1)
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path))
    return tmp_path


def answering(monkeypatch: pytest.MonkeyPatch, answer: bytes | None) -> list[Order]:
    """Processes that say this at once, or end (None); -> orders they were given."""
    orders: list[Order] = []

    class Watched(Pipe):
        def send(self, message: bytes, *args: object) -> None:
            orders.append(msgspec.msgpack.decode(message, type=Order))

    def start(module: str, name: str) -> tuple[subprocess.Popen[bytes], Pipe]:
        ours, theirs = socket.socketpair()
        if answer is not None:
            Pipe(theirs).send(answer)
        theirs.close()
        return subprocess.Popen([sys.executable, "-c", ""]), Watched(ours)

    monkeypatch.setattr(ahead, "start_process", start)
    return orders


def test_it_is_told_and_not_done_again(on_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = on_gpu / "kernel.json"
    place.touch()
    told = Told(40, 30, 10, 0, 2.0, 5.0, places=[str(place)])
    orders = answering(monkeypatch, msgspec.msgpack.encode(told))
    config, raw = make_config(model="some", device="cuda:1"), {"hidden_size": 64}
    reasons: list[str] = []
    compiling = compile_ahead(config, "cuda:1", raw)
    compiling.wait(reasons)
    assert "30 of 40 kernels were compiled ahead in 5.0 s" in reasons[0] and "10 were there" in reasons[0]
    assert orders[0].config.execute.device == "cuda", "a GPU that is not there has no number"
    assert not orders[0].config.tuning.compile_ahead, "it does not compile ahead of itself"
    assert orders[0].gpu == GPU
    assert isinstance(compile_ahead(config, "cuda:1", raw), Nothing)
    assert isinstance(compile_ahead(config, "cuda:1", {"hidden_size": 65}), Process), "another model"
    place.unlink()
    assert isinstance(compile_ahead(config, "cuda:1", raw), Process), "Triton's cache was emptied"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "its process ended"),
        (b"\xc1", "its process ended"),
        (msgspec.msgpack.encode(Told(9, 5, 1, 3)), "3 did not compile"),
        (msgspec.msgpack.encode(Told(9, 9, failure="KeyError: x")), "not all are known (KeyError: x)"),
    ],
)
def test_a_load_goes_on(on_gpu: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, reason: str) -> None:
    answering(monkeypatch, answer)
    config, reasons = make_config(model="some"), list[str]()
    compile_ahead(config, "cuda", {}).wait(reasons)
    assert reason in reasons[0]
    assert not is_kept(note_of(config, GPU, {})), "what was not compiled is tried again"


def test_it_does_not_wait_for_ever(on_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "LONGEST_S", 0.0)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(ahead, "start_process", lambda module, name: (process, Pipe(ours)))
    reasons: list[str] = []
    compile_ahead(make_config(model="some"), "cuda", {}).wait(reasons)
    assert "not compiled ahead within" in reasons[0]
    assert process.returncode == -signal.SIGKILL
    theirs.close()


def test_compilers_end_with_whoever_started_them(tmp_path: Path) -> None:
    """A worker that is not waited for any more leaves no compiler behind."""
    program = "import os, time; p = os.fork(); p and print(p, flush=True); time.sleep(600)"
    ours, theirs = socket.socketpair()
    compiling = Process.__new__(Process)
    compiling.pipe = Pipe(ours)
    compiling.process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, process_group=0
    )  # type: ignore[assignment]
    assert compiling.process.stdout is not None
    child = os.pidfd_open(int(compiling.process.stdout.readline()))
    compiling.end()
    assert select.select([child], [], [], 30.0)[0], "it has ended"
    os.close(child)
    theirs.close()


def test_only_where_it_pays(on_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = answering(monkeypatch, None)
    for options, device in (
        ({}, "cpu"),
        ({"compile_ahead": False}, "cuda"),
        ({"kernels": "reference"}, "cuda"),
        ({"tensor_parallel_size": 2}, "cuda"),
    ):
        assert isinstance(compile_ahead(make_config(model="some", **options), device, {}), Nothing), options
    monkeypatch.setattr(ahead, "LEAST_CORES", 1 << 20)
    assert isinstance(compile_ahead(make_config(model="some"), "cuda", {}), Nothing), "too few cores"
    assert not orders


def test_notes_are_whole_or_not_there(tmp_path: Path) -> None:
    note = tmp_path / "deep" / "note.json"
    assert not is_kept(note)
    keep(note, [])
    assert not is_kept(note), "a load without kernels was none"
    keep(note, [str(tmp_path / "gone")])
    assert not is_kept(note)
    keep(note, [__file__])
    assert is_kept(note)
    note.write_text("[")
    assert not is_kept(note)


def model_folder(folder: Path, size: int = 64, config: dict[str, int] | None = None) -> str:
    """A folder with weights of so many bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"hidden_size": 64}))
    (folder / "model.safetensors").write_bytes(bytes(size))
    return str(folder)


def test_a_load_is_known_by_what_its_kernels_follow_from(on_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {"hidden_size": 64, "_name_or_path": "here", "transformers_version": "4.1"}

    def note(folder: str = model_folder(on_gpu / "a"), said: dict[str, object] = raw, **options: object) -> Path:
        return note_of(make_config(model=folder, **options), GPU, said)

    drafts = [{"speculative_config": {"model": model_folder(on_gpu / name)}} for name in ("d1", "d2")]
    other = {"speculative_config": {"model": model_folder(on_gpu / "d3", config={"hidden_size": 65})}}
    same = [
        note(model_folder(on_gpu / "moved" / "b")),
        note(said={"hidden_size": 64, "_name_or_path": "there", "transformers_version": "4.2"}),
        note(seed=1, tokenizer="other", served_model_name="x", device="cuda:1", executor="process", threads=2),
        note(lora_modules=["a=/b"], max_waiting=7, max_cpu_loras=3),
    ]
    assert set(same) == {note()}
    assert note(model_folder(on_gpu / "c", 65), load_format="dummy") == note(load_format="dummy"), "no file is read"
    assert note(**drafts[0]) == note(**drafts[1])
    different = [
        note(), note(model_folder(on_gpu / "quantised", 32)), note(said={"hidden_size": 65}), note(dtype="float16"),
        note(quantization="fp8"), note(kv_cache_dtype="fp8"), note(max_num_seqs=7), note(disable="fusion"),
        note(enable_lora=True), note(**drafts[0]), note(**other), note("owner/one"), note("owner/two"),
    ]  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(on_gpu / "triton"))
    different.append(note())
    assert len(set(different)) == len(different)


def test_every_option_that_kernels_do_not_follow_from_exists() -> None:
    """An option that is renamed would otherwise be noticed by loads alone."""
    config = make_config(model="some")
    assert all(hasattr(getattr(config, group), name) for group, names in UNRELATED.items() for name in names)
