"""Several ranks behind one engine: the bytes of one process in every mode, and what follows when a rank is lost.

TOKENMILL_RELIABILITY=1 adds four ranks, more formats, and many kills and stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest
from tests.cpu.engine.engine_ranks_helpers import FULL, compare, lose, requests
from tests.cpu.engine.engines import exact, greedy, open_llm, run

from tokenmill import LLM, SamplingParams
from tokenmill.core.config import make_config
from tokenmill.core.errors import EngineDeadError, EngineLostError, ParameterError
from tokenmill.engine.running.replicas import Replicas
from tokenmill.engine.steps import watch, workers
from tokenmill.engine.steps.worker import BEAT, CONTROL
from tokenmill.process.pipe import Pipe
from tokenmill.testing.tiny import make_tiny

LONG = pytest.mark.skipif(not FULL, reason="long: set TOKENMILL_RELIABILITY=1")


def test_two_ranks_give_the_bytes_of_one(tiny):
    compare(tiny, 2, dtype="bfloat16")


@pytest.mark.skipif(not FULL, reason="long: set TOKENMILL_RELIABILITY=1")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4", "fp8"])
def test_every_format_gives_the_bytes_of_one(form, ranks, tiny):
    narrow = form not in ("float32", "bfloat16")
    compare(tiny, ranks, dtype="float32" if narrow else form, quantization=form if narrow else None)


@pytest.mark.parametrize(
    ("ranks", "vocab"), [(2, 320), *(pytest.param(*each, marks=LONG) for each in ((3, 321), (3, 320), (4, 320)))]
)
def test_ranks_choose_among_their_own_words(ranks, vocab, tmp_path):
    """Its head is not the embeddings' matrix, so that each rank has a part of it, if the vocabulary divides; rows of
    all kinds, apart and in one step, in recorded steps, too."""
    heads = 3 if ranks == 3 else 4
    folder = make_tiny(tmp_path, hidden=8 * heads, heads=heads, kv_heads=heads, vocab=vocab, architecture="llama")
    kinds = [{"temperature": 0.0}, {}, {"top_k": 9}, {"min_p": 0.05}, {"top_p": 0.9}, {"logprobs": 2}]
    params = [SamplingParams(seed=i, max_tokens=12, ignore_eos=True, **kind) for i, kind in enumerate(kinds)]
    prompts = [[3 + i, 9, 20 + i] for i in range(6)]

    def answers(**options) -> list:
        with open_llm(folder, kernels="auto", **options) as llm:
            apart = [run(llm, [prompt], [each]) for prompt, each in zip(prompts, params, strict=True)]
            return [
                exact(each)
                for some in (*apart, run(llm, prompts[:4], params[:4]), run(llm, prompts, params))
                for each in some
            ]

    assert answers(tensor_parallel_size=ranks) == answers()


def test_ranks_go_on_together_after_one_has_failed(tmp_path, monkeypatch, caplog):
    """In the first step the other has gone on meanwhile, so that a step is recorded, in which it exchanges more, while
    this rank sees it for the first time. In the fourth one the other waits for it and gives up, which is not the
    cause."""
    folder = make_tiny(tmp_path, hidden=32, heads=4, kv_heads=4, vocab=320, architecture="llama")
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    with open_llm(folder, kernels="auto") as llm:
        wanted = [exact(each) for each in run(llm, [[3, 9, 20]], [params])]
    start = workers.start_process
    monkeypatch.setattr(workers, "start_process", lambda module, *rest: start("failing_rank", *rest))
    with open_llm(folder, kernels="auto", tensor_parallel_size=2) as llm:
        assert [exact(each) for each in run(llm, [[3, 9, 20]], [params])] == wanted
        assert llm.engine.scheduler.counters.failures == 2
    (said,) = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert "RuntimeError: a fault of one rank" in said


SCRIPT = """
from tokenmill import LLM, SamplingParams
print("begun")
for options in {options!r}:
    llm = LLM({folder!r}, max_model_len=64, kv_cache_memory_bytes=1 << 20, **options)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [dict(prompt_token_ids=[3 + i, 7]) for i in range(4)]
    print([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    print(sorted(one.labels["engine"] for one in llm.get_metrics() if one.name == "vllm:num_requests_running"),
          llm.get_world_size(), llm.get_world_size(include_dp=False))
    llm.close()
"""


@pytest.mark.parametrize(
    "options",
    [
        [{"data_parallel_size": 2}],
        pytest.param([{"tensor_parallel_size": 2, "data_parallel_size": 2}], marks=LONG),
        pytest.param(
            [{"tensor_parallel_size": 2}, {"data_parallel_size": 3}, {"pipeline_parallel_size": 2}], marks=LONG
        ),
    ],
)
def test_a_script_with_several_processes_needs_no_guard(options, tiny, tmp_path):
    """It is not run again by any of them, and each engine has its own figures."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(folder=str(tiny), options=[{}, *options]))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    begun, *said = done.stdout.splitlines()
    assert begun == "begun" and set(said[::2]) == {said[0]}, "the answers of one process"
    wanted = []
    for each in (dict[str, int](), *options):
        engines = each.get("data_parallel_size", 1)
        ranks = each.get("tensor_parallel_size", 1) * each.get("pipeline_parallel_size", 1)
        wanted.append(f"{[str(number) for number in range(engines)]} {engines * ranks} {ranks}")
    assert said[1::2] == wanted


def test_every_rank_does_what_it_is_told_behind_the_plans_before(tiny):
    """On a CPU plans run when they are waited for: what is told after one must not come before it on some rank."""
    from tokenmill.engine.interfaces.prompts import make_request

    def operations() -> list[int]:
        said = llm.engine.executor.control_all({"what": "counters"})
        return [sum(op["calls"] for op in each["kernels"].values()) for each in said]

    with open_llm(tiny, tensor_parallel_size=2, kernels="auto", enable_lora=True) as llm:
        llm.engine.add(make_request("r", None, [3, 4, 5], greedy(3)))
        before = operations()
        assert llm.engine.submit()
        answers = llm.engine.executor.control_all({"what": "adapter", "op": "forget"})
        assert answers == [{}, {}] and len(llm.engine.flying) == 1
        assert all(new > old for new, old in zip(operations(), before, strict=True))
        while llm.engine.has_work:
            llm.engine.step()


@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_lost_rank_ends_its_engine(rank, how, tiny):
    with open_llm(tiny, tensor_parallel_size=2, kernels="auto", max_model_len=512) as llm:
        lose(llm, rank, how)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_other_engines_continue_what_a_lost_one_worked_on(how, tiny):
    """Their answers are those of one engine; another one is loaded in its place, also if all are lost at once."""
    prompts, params = requests()
    options = {"kernels": "auto", "max_model_len": 160}
    with open_llm(tiny, **options) as llm:
        wanted = [exact(output) for output in run(llm, prompts, params)]
    with open_llm(tiny, data_parallel_size=3, enable_sleep_mode=True, **options) as llm:
        engine, step, dying = llm.engine, llm.engine.step, [1]
        assert isinstance(engine, Replicas) and engine.successors is not None

        def stepped():
            if dying and sum(part.scheduler.counters.steps for part in engine.parts) > 15:
                while dying:
                    os.kill(engine.parts[dying.pop()].executor.process.pid, how)
            return step()

        def all_are_back():
            while len(engine.alive) < 3:
                assert step() == []
                time.sleep(0.01)

        llm.engine.step = stepped
        assert [exact(output) for output in run(llm, prompts, params)] == wanted
        all_are_back()
        os.kill(engine.parts[0].executor.process.pid, signal.SIGKILL)
        llm.sleep(1)
        assert engine.successors.missing == {0} and not engine.successors.coming, "others have its memory now"
        llm.wake_up()
        assert [exact(output) for output in run(llm, prompts, params)] == wanted
        all_are_back()
        numbers = {m.labels["engine"]: m.value for m in llm.get_metrics() if m.name == "vllm:generation_tokens"}
        dying += [0, 1, 2]
        assert [exact(output) for output in run(llm, prompts, params)] == wanted, "they wait for an engine"
        all_are_back()
        after = {m.labels["engine"]: m.value for m in llm.get_metrics() if m.name == "vllm:generation_tokens"}
        assert all(after[each] >= numbers[each] for each in numbers), "totals of all lives"
        assert sum(after.values()) > sum(numbers.values()), "whoever came first may have done all of it"
        engine.successors.close()
        for part in engine.parts:
            os.kill(part.executor.process.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                run(llm, prompts, params)


def test_a_command_may_take_longer_than_a_step(monkeypatch):
    """Sleep, wake and adapters read and write whole models; here a step has taken no time, and patience is short."""
    monkeypatch.setattr(watch, "QUIET_S", 0.15)
    monkeypatch.setattr(watch, "BUSY_S", 0.15)
    monkeypatch.setattr(watch, "LEAST_WORK", -1.0)  # it works all the time
    ours, theirs = socket.socketpair()
    running = type("Running", (), {"pid": os.getpid(), "poll": lambda self: None})()
    watched = watch.Watch([os.getpid()], on_device=False)
    executor = workers.ProcessExecutor([workers.Rank(running, Pipe(ours, greedy=True))], [1], watched)
    for tokens in (1, 100):
        watched.begin(tokens)
        watched.end()

    def obey() -> None:
        end = Pipe(theirs)
        end.receive(5.0)
        for _ in range(6):
            time.sleep(0.1)
            end.send(BEAT + msgspec.msgpack.encode((7, False)))
        end.send(CONTROL + msgspec.msgpack.encode({"asleep": []}))

    thread = threading.Thread(target=obey)
    with ours, theirs:
        thread.start()
        assert executor.control_all({"what": "sleep", "level": 1}) == [{"asleep": []}]
        thread.join()


def busy_ranks(monkeypatch) -> list[float]:
    """Ranks that compute all the time; returns the time that the watch sees."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "work_of", lambda pid: now[0])
    monkeypatch.setattr(watch, "state_of", lambda pid: "R")
    return now


@pytest.mark.parametrize(
    ("on_device", "looks", "found"), [(False, 99, ""), (True, 9, "a step"), (False, 200, "a step")]
)
def test_a_long_operation_is_no_hang_on_a_cpu(on_device, looks, found, monkeypatch):
    """Steps of as many tokens took no time, because they looked back at less."""
    now = busy_ranks(monkeypatch)
    watched = watch.Watch([1, 2], on_device=on_device)
    for tokens in (1, 500):
        watched.begin(tokens)
        watched.end()
        now[0] += 0.01
        watched.times.saw(tokens, 0.001)
    watched.begin(500)
    for rank in (0, 1):
        watched.beat(rank, 7, True)
    said = ""
    for _ in range(looks):
        now[0] += 0.5
        said = said or watched.look() or ""
    assert said[: len("a step")] == found


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("seen", "tokens"), [((), 1), ((1,), 500)], ids=["the first step", "the first long step"])
def test_a_step_unlike_any_before_that_never_ends_is_found(seen, tokens, on_device, monkeypatch):
    """And a command may take any time."""
    now = busy_ranks(monkeypatch)
    watched = watch.Watch([1, 2], on_device=on_device)

    def first_said(tokens: int | None) -> float | None:
        watched.begin(tokens)
        for _ in range(4 * int(watch.UNSEEN_S)):
            now[0] += 0.5
            if now[0] - watched.began < 100:
                watched.beat(0, int(now[0]), False)
            if watched.look() is not None:
                return now[0] - watched.began
        return None

    for each in seen:
        watched.begin(each)
        watched.end()
        watched.times.saw(each, 0.001)
    assert first_said(None) is None
    assert watch.UNSEEN_S < (first_said(tokens) or 0.0) <= watch.UNSEEN_S + 101


@pytest.mark.parametrize(
    ("how", "gone", "said"),
    [
        (signal.SIGKILL, False, r"rank 1 ended .*\(signal 9\)"),
        (signal.SIGKILL, True, r"rank 1 ended .*\(signal 9\)"),
        (signal.SIGSTOP, False, r"rank 1 was stopped"),
    ],
)
def test_a_rank_that_is_lost_while_it_loads_ends_the_load(how, gone, said, tiny, monkeypatch):
    """gone: before it could be told anything."""
    started = []
    start = workers.start_process

    def lose(*given):
        process, pipe = start(*given)
        started.append(process)
        if len(started) == 2:
            os.kill(process.pid, how)
            if gone:
                process.wait()
        return process, pipe

    monkeypatch.setattr(workers, "start_process", lose)
    monkeypatch.setattr(watch, "STOPPED_S", 0.2)
    with pytest.raises(EngineLostError, match=said):
        workers.start_ranks(make_config(model=str(tiny), tensor_parallel_size=2))
    assert len(started) == 2 and all(process.poll() is not None for process in started), "a rank was left behind"


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_more_ranks_than_there_is_to_share_out_start_no_process(name, monkeypatch):
    started = []
    monkeypatch.setattr("tokenmill.engine.running.build.start_ranks", started.append)
    with pytest.raises(ParameterError, match=rf"--{name.replace('_', '-')} 64: this model has only \d+ "):
        LLM(model="demo", **{name: 64})
    assert not started
