"""Kernels compiled ahead: when, by how many, and that a load goes on whatever becomes of it. With fake compilers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenmill.core.config import EngineConfig, make_config
from tokenmill.device.gpu import Gpu
from tokenmill.engine.load import ahead_notes
from tokenmill.engine.load import compile_ahead as module
from tokenmill.engine.load.ahead_notes import UNRELATED, is_kept, keep, note_of
from tokenmill.engine.load.ahead_worker import CACHED, COMPILED, FAILED, Farm
from tokenmill.engine.load.compile_ahead import CompileReport, Compiling, Nothing, Order, Process, compile_ahead
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


def test_what_is_needed_first_is_told_first(tmp_path: Path) -> None:
    """While the rest is not even added, or still compiles."""
    gate, told = tmp_path / "gate", list[tuple[int, int]]()

    def work(kernel: int) -> int:
        while kernel >= 3 and not gate.exists():
            time.sleep(0.01)
        return COMPILED

    farm = Farm(2, work)
    for kernel in range(3):
        farm.add(kernel)
    farm.tell(lambda: told.append((len(farm.ended), farm.begun)))
    began = time.monotonic()
    while not told and time.monotonic() - began < 30.0:
        farm.add(3)
        time.sleep(0.05)
    assert told and told[0][0] == 3, "all three have ended, and no other"
    gate.touch()
    farm.finish()
    assert len(told) == 1 and len(farm.ended) == farm.begun > 3


def test_what_is_there_already_is_told_at_once() -> None:
    told: list[int] = []
    farm = Farm(2, lambda kernel: CACHED)
    farm.tell(lambda: told.append(0))
    assert told == [0]
    farm.add(1)
    farm.tell(lambda: told.append(1))
    farm.finish()
    assert told == [0, 1]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As if there were a GPU, Triton and cores."""
    monkeypatch.setattr(module, "_compiles", lambda: True)
    monkeypatch.setattr(module, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(module, "LEAST_CORES", 1)
    monkeypatch.setattr(module, "hash_triton", lambda: None)
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
            for message in (b"", b"", answer):
                Pipe(theirs).send(message)
        theirs.close()
        return subprocess.Popen([sys.executable, "-c", ""]), Watched(ours)

    monkeypatch.setattr(module, "may_fork", lambda: False)
    monkeypatch.setattr(module, "start_process", start)
    return orders


def begun(config: EngineConfig, device: str, raw: dict[str, Any]) -> Compiling:
    """As a load does, until its first steps."""
    compiling = compile_ahead(config, device)
    compiling.begin(raw)
    compiling.first()
    return compiling


def works(compiling: Compiling) -> bool:
    """Has it anything to do?"""
    return isinstance(compiling, Process) and compiling.note is not None


def test_it_is_told_and_not_done_again(on_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = on_gpu / "kernel.json"
    place.touch()
    told = CompileReport(40, 30, 10, 0, 5.0, places=[str(place)])
    orders = answering(monkeypatch, msgspec.msgpack.encode(told))
    config, raw = make_config(model="some", device="cuda:1"), {"hidden_size": 64}
    reasons: list[str] = []
    compiling = begun(config, "cuda:1", raw)
    compiling.wait(reasons)
    assert "30 of 40 kernels were compiled ahead in 5.0 s" in reasons[0] and "10 were there" in reasons[0]
    assert orders[0].config.execute.device == "cuda", "a GPU that is not there has no number"
    assert not orders[0].config.tuning.compile_ahead, "it does not compile ahead of itself"
    assert orders[0].gpu == GPU
    again = begun(config, "cuda:1", raw)
    assert isinstance(again, Process) and not works(again) and len(orders) == 1
    assert again.process.returncode is not None, "it has ended"
    again.wait(reasons)
    assert len(reasons) == 1, "there is nothing to tell"
    assert works(begun(config, "cuda:1", {"hidden_size": 65})), "another model"
    place.unlink()
    assert works(begun(config, "cuda:1", raw)), "Triton's cache was emptied"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "its process ended"),
        (b"\xc1", "its process ended"),
        (msgspec.msgpack.encode(CompileReport(9, 5, 1, 3)), "3 did not compile"),
        (msgspec.msgpack.encode(CompileReport(9, 9, failure="KeyError: x")), "not all are known (KeyError: x)"),
    ],
)
def test_a_load_goes_on(on_gpu: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, reason: str) -> None:
    answering(monkeypatch, answer)
    config, reasons = make_config(model="some"), list[str]()
    begun(config, "cuda", {}).wait(reasons)
    assert reason in reasons[0]
    assert not is_kept(note_of(config, GPU, {})), "what was not compiled is tried again"


@pytest.mark.parametrize("begins", [True, False])
def test_it_does_not_wait_for_ever(on_gpu: Path, monkeypatch: pytest.MonkeyPatch, begins: bool) -> None:
    """For one that works too long, nor for one that does not begin."""
    monkeypatch.setattr(module, "LONGEST_S" if begins else "LONGEST_BEGIN_S", 0.0)
    ours, theirs = socket.socketpair()
    if begins:
        Pipe(theirs).send(b"")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(module, "may_fork", lambda: False)
    monkeypatch.setattr(module, "start_process", lambda module, name: (process, Pipe(ours)))
    reasons: list[str] = []
    begun(make_config(model="some"), "cuda", {}).wait(reasons)
    assert "not compiled ahead within" in reasons[0]
    assert process.returncode == -signal.SIGKILL
    theirs.close()


def test_a_fork_is_the_same_and_ends_with_its_compilers(on_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer, its compilers' end, and nothing of it left behind."""
    told = msgspec.msgpack.encode(CompileReport(3, 2, 1, 0, 0.2, places=[__file__]))
    orders, compilers = on_gpu / "orders", on_gpu / "compilers"

    def serve(pipe: Pipe) -> None:
        orders.write_bytes(pipe.receive() or b"")
        compiler = os.fork()
        if not compiler:
            signal.pause()
        compilers.write_text(str(compiler))
        for message in (b"", b"", told):
            pipe.send(message)
        signal.pause()

    monkeypatch.setattr(module, "_serve", serve)
    monkeypatch.setattr(module, "may_fork", lambda: True)
    config, reasons = make_config(model="some"), list[str]()
    compiling = begun(config, "cuda", {"hidden_size": 64})
    assert isinstance(compiling, Process)
    compiling.wait(reasons)
    assert reasons == ["2 of 3 kernels were compiled ahead in 0.2 s by " + reasons[0].split(" by ")[1]]
    assert msgspec.msgpack.decode(orders.read_bytes(), type=Order).gpu == GPU
    assert compiling.process.returncode == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        compiler = os.pidfd_open(int(compilers.read_text()))
        assert select.select([compiler], [], [], 30.0)[0], "it has ended"
        os.close(compiler)
    again = begun(config, "cuda", {"hidden_size": 64})
    assert not works(again) and isinstance(again, Process) and again.process.returncode == -signal.SIGKILL


def test_what_goes_wrong_in_a_fork_stays_there(on_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(pipe: Pipe) -> None:
        pipe.receive()
        raise SystemExit(0)

    monkeypatch.setattr(module, "_serve", serve)
    monkeypatch.setattr(module, "may_fork", lambda: True)
    reasons: list[str] = []
    begun(make_config(model="some"), "cuda", {}).wait(reasons)
    assert "its process ended" in reasons[0]


def test_only_a_process_whose_threads_wait_is_forked() -> None:
    """Another thread may hold a lock that a fork would wait for without end."""
    program = """
import threading
from tokenmill.process.start import may_fork

end, found = threading.Event(), [may_fork()]
for name in ("tokenmill-parent", "tokenmill-listener"):
    threading.Thread(target=end.wait, name=name, daemon=True).start()
    found.append(may_fork())
print(found)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, True, False]"


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
        assert isinstance(compile_ahead(make_config(model="some", **options), device), Nothing), options
    monkeypatch.setattr(module, "LEAST_CORES", 1 << 20)
    assert isinstance(compile_ahead(make_config(model="some"), "cuda"), Nothing), "too few cores"
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
    package = on_gpu / "package"
    monkeypatch.setattr(ahead_notes, "PACKAGE", package)
    for name in ("linear.py", "measured.json"):  # a kernel, and how kernels are cut
        source = package / "kernels" / "triton" / "products" / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("{}")
        different.append(note())
    assert len(set(different)) == len(different)


def test_every_option_that_kernels_do_not_follow_from_exists() -> None:
    """An option that is renamed would otherwise be noticed by loads alone."""
    config = make_config(model="some")
    assert all(hasattr(getattr(config, group), name) for group, names in UNRELATED.items() for name in names)
