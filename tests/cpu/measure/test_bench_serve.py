"""bench serve against a server whose delays are known."""

from __future__ import annotations

import asyncio
import json
import signal
import threading

import numpy as np
import pytest
from tests.cpu.measure.fake_server import Fake, running
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.core.errors import UserError
from tokenmill.measure.client import Answer, Target
from tokenmill.measure.conversations import Conversation, Lengths, Made, UserTurn, make_conversations
from tokenmill.measure.devices import recognise
from tokenmill.measure.server_load import Pattern, serve_load, sum_up, sweep
from tokenmill.measure.server_work import fill_shares, read_totals


def talks(count, tokens=10, **made):
    return make_conversations(Made(count, Lengths("fixed", 20), Lengths("fixed", tokens), **made))


async def put(fake, conversations, pattern, *, chat=False, extras=True, want_ids=False, slo=None, timeout=120.0):
    async with running(fake) as url:
        target = Target(url, "", chat=chat, extras=extras, want_ids=want_ids, timeout=timeout)
        return await serve_load(target, conversations, pattern, slo=slo, warmup=0)


async def test_known_delays_are_measured():
    fake = Fake(first=0.1, gap=0.02)
    result = await put(fake, talks(12, tokens=11), Pattern(users=4))
    assert result["completed"] == result["requests"] == 12 and result["errors"] == {}
    assert result["output_tokens"] == 132 and result["prompt_tokens"] == 240 and result["tokens_counted"]
    assert result["most_open"] == 4 == fake.most_open
    assert result["requests_per_s"] == pytest.approx(12 / result["seconds"], rel=1e-3)
    assert result["requests_per_minute"] == pytest.approx(60 * result["requests_per_s"], rel=1e-3)
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in fake.bodies)


async def test_times_are_those_of_the_server():
    """Somebody else's load can make one run wrong, not the same way each time; wrong arithmetic would be."""
    for _ in range(5):
        fake = Fake(first=0.1, gap=0.02)
        result = await put(fake, talks(12, tokens=11), Pattern(users=4))
        # What the server did, by its own clock.
        first = np.percentile([1e3 * (t[1] - t[0]) for t in fake.times], 50)
        each = np.percentile([1e3 * (t[-1] - t[1]) / 10 for t in fake.times], 50)
        off = [
            result["ttft_ms"]["p50"] / first,
            result["tpot_ms"]["p50"] / each,
            result["itl_ms"]["mean"] / each,
            result["e2e_ms"]["p50"] / (first + 10 * each),
        ]
        if max(off) < 1.15 and min(off) > 0.87:
            return
    pytest.fail(f"measured over true: {off}")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", [False, True])
async def test_tokens_are_counted_though_events_hold_several(chat, usage):
    fake = Fake(first=0.01, gap=0.01, per_event=4, usage=usage)
    result = await put(fake, talks(3, tokens=10, text=chat), Pattern(users=3), chat=chat)
    # Without usage each event counts as one token, and the result says so.
    assert result["output_tokens"] == (30 if usage else 9) and result["tokens_counted"] is usage
    if usage:
        # Events of 4, 4 and 2 tokens: the time between first and last is that of 9 further tokens.
        assert result["tpot_ms"]["p50"] <= 1e3 * max((t[-1] - t[0]) / 9 for t in fake.times)


async def test_without_running_usage_the_last_one_corrects_the_count():
    result = await put(Fake(per_event=5), talks(2, tokens=10), Pattern(users=2), extras=False)
    assert result["output_tokens"] == 20 and result["tokens_counted"] is False


async def test_errors_are_counted_by_kind():
    fake = Fake(first=0.01, gap=0.001, fail={0: 429, 1: 500, 2: "break", 3: "event", 4: 429})
    result = await put(fake, talks(8), Pattern(users=1), slo={"ttft": 10_000.0})
    assert result["errors"] == {"http 429": 2, "http 500": 1, "connection lost": 1, "error event": 1}
    assert result["completed"] == 3 and result["goodput"]["share"] == 3 / 8
    slow = await put(Fake(first=5.0), talks(1), Pattern(users=1), timeout=0.1)
    assert slow["errors"] == {"timeout": 1} and slow["ttft_ms"]["p50"] is None


async def test_open_loops_keep_their_times_however_slow_the_server_is():
    fake = Fake(first=0.8, gap=0.001)
    result = await put(fake, talks(20, tokens=2), Pattern(kind="constant", rate=80.0))
    assert result["offered_rate"] == pytest.approx(80.0) and result["most_open"] == 20 == fake.most_open
    assert not result["piled_up"]
    late = await put(Fake(first=0.02, gap=0.0, at_once=1), talks(40, tokens=1), Pattern(kind="constant", rate=200.0))
    assert late["piled_up"], "0.2 s of requests take 0.8 s"
    held = await put(Fake(first=0.05, gap=0.001), talks(9, tokens=2), Pattern(kind="poisson", rate=500.0, max_open=3))
    assert held["most_open"] <= 3


async def test_traces_come_at_their_times():
    said = [Conversation([UserTurn([1, 2, 3], 2)], at) for at in (0.0, 0.1, 0.9)]
    fake = Fake(first=0.001, gap=0.001)
    await put(fake, said, Pattern(kind="trace"))
    assert fake.times[1][0] - fake.times[0][0] > 0.05 and fake.times[2][0] - fake.times[0][0] > 0.85
    faster = await put(Fake(first=0.001, gap=0.001), said, Pattern(kind="trace", rate=10.0))
    assert 0.09 <= faster["seconds"] < 0.9
    with pytest.raises(UserError, match="no time for 1"):
        await put(Fake(), [*said, Conversation([UserTurn([1], 1)])], Pattern(kind="trace"))


async def test_later_turns_hold_what_was_said_before():
    fake = Fake(first=0.001, gap=0.001)
    (talk,) = talks(1, tokens=3, turns=3)
    await put(fake, [talk], Pattern(), want_ids=True)
    first, second, third = (body["prompt"] for body in fake.bodies)
    assert first == talk.turns[0].prompt
    assert second == first + [0, 0, 0] + talk.turns[1].prompt
    assert third == second + [0, 0, 0] + talk.turns[2].prompt
    fake = Fake(first=0.001, gap=0.001)
    await put(fake, talks(1, tokens=1, turns=2, text=True), Pattern(think=0.1), chat=True)
    assert [m["role"] for m in fake.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert fake.bodies[1]["messages"][1]["content"] == "word "


async def test_the_sweep_finds_the_knee():
    # Two at a time, 0.02 s each: 100 requests per second at most.
    async with running(Fake(first=0.02, gap=0.0, at_once=2)) as url:
        pattern = Pattern(kind="constant", rate=30.0)
        asked = []

        def more(count, number):
            asked.append((count, number))
            return talks(count, tokens=1, seed=number)

        found = await sweep(Target(url, ""), more, pattern, seconds=0.5, slo={"ttft": 150.0}, warmup=1)
    assert asked[0] == (1, 0) and [number for _, number in asked] == list(range(len(asked)))
    assert list(dict.fromkeys(count for count, _ in asked))[1:3] == [20, 24]
    assert 0 < found["knee_rate"] < 400
    rates = [run["offered_rate"] for run in found["runs"]]
    assert rates == sorted(rates) and max(rates) > found["knee_rate"]
    assert found["goodput"]["share"] >= 0.9 and found["offered_rate"] <= found["knee_rate"] * 1.01


async def test_a_sweep_that_is_stopped_keeps_its_finished_runs():
    for last in (3, 1):
        async with running(Fake(first=0.001, gap=0.0)) as url:

            def more(count, number, last=last):
                if number == last:
                    asyncio.current_task().cancel()  # as Ctrl-C does
                return talks(count, tokens=1, seed=number)

            work = sweep(Target(url, ""), more, Pattern(kind="constant", rate=200.0), seconds=0.05, warmup=1)
            if last == 1:
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.ensure_future(work)
            else:
                found = await asyncio.ensure_future(work)
                assert found["stopped"] and len(found["runs"]) == 2 and found["bench"] == "sweep"


class Presses:
    """A progress that presses Ctrl-C after so many conversations."""

    def __init__(self, after, press):
        self.left, self.press = after, press

    def start(self, name, total):
        pass

    def advance(self):
        self.left -= 1
        if not self.left:
            self.press()


ARRIVALS = [Pattern(users=2), Pattern(kind="constant", rate=200.0), Pattern(kind="constant", rate=200.0, max_open=1),
            Pattern(kind="bursty", rate=100.0)]  # fmt: skip


@pytest.mark.parametrize("pattern", ARRIVALS, ids=["closed", "open", "few at once", "bursty"])
async def test_a_load_that_is_stopped_keeps_the_answers_that_had_ended(pattern):
    async with running(Fake(first=0.001, gap=0.0)) as url:
        task = asyncio.ensure_future(serve_load(
            Target(url, ""), talks(400, tokens=2), pattern, warmup=0, progress=Presses(5, lambda: task.cancel())
        ))  # fmt: skip
        found = await task
        assert found["stopped"] and 5 <= found["requests"] < 400 and not found["errors"]
        assert found["completed"] == found["requests"] and found["output_tokens"] == 2 * found["completed"]
        assert found["flops"] is None and found["seconds"] > 0
        left = {other for other in asyncio.all_tasks() if "converse" in repr(other) or "user" in repr(other)}
        await asyncio.gather(*left, return_exceptions=True)
        assert all(other.cancelled() for other in left), "somebody still asks"


async def test_a_load_that_is_stopped_before_any_answer_has_no_result():
    async with running(Fake(first=30.0, gap=0.0)) as url:
        task = asyncio.ensure_future(serve_load(Target(url, ""), talks(4), Pattern(users=2), warmup=0))
        while not any("user" in repr(other) for other in asyncio.all_tasks()):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_goodput_counts_requests_that_meet_every_term():
    def answer(first, gap, tokens, error=None):
        marks = [(first + gap * i, i + 1) for i in range(tokens)]
        return Answer(0.0, sent=0.0, end=marks[-1][0], marks=marks, error=error)

    answers = [answer(0.1, 0.01, 5), answer(0.3, 0.01, 5), answer(0.1, 0.05, 5), answer(0.1, 0.01, 5, "timeout")]
    answers.append(answer(0.1, 0.0, 1))  # one token has no TPOT, so it meets that term
    terms = (({"ttft": 200.0}, 3), ({"tpot": 20.0}, 3), ({"ttft": 200.0, "tpot": 20.0}, 2), ({"e2e": 50.0}, 0),
             ({"itl": 30.0}, 3))  # fmt: skip
    for slo, count in terms:
        assert sum_up(answers, 0.0, slo)["goodput"]["share"] == count / 5, slo


@pytest.fixture
def hears_ctrl_c():
    """A shell's job in the background is deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def server():
    """A fake server in a thread of its own, for the command line."""
    started, stop, found = threading.Event(), None, {}

    async def main():
        nonlocal stop
        stop = asyncio.Event()
        async with running(Fake(first=0.01, gap=0.002)) as url:
            found["url"], found["loop"] = url, asyncio.get_running_loop()
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait(120)
    yield found["url"]
    found["loop"].call_soon_threadsafe(stop.set)
    thread.join()


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_prints_and_writes_what_had_ended(server, tmp_path, monkeypatch):
    """The whole verb: a signal in the middle of a load."""
    press = Presses(3, lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr("tokenmill.cli.bench_serve.BenchProgress.advance", lambda self: press.advance())
    out = tmp_path / "out.json"
    done = run(server, "--users", 1, "--num-prompts", 300, "--output-len", 2, "--json", out)
    assert done.exit_code == 130 and "these are the requests that had ended" in done.output, done.output
    assert "the run was stopped" in " ".join(done.output.split())
    found = json.loads(out.read_text())
    assert found["stopped"] and 3 <= found["completed"] < 300


def test_the_command_writes_json_and_tells_the_figures(server, tmp_path):
    out = tmp_path / "out.json"
    done = run("--base-url", server, "--users", 4, "--num-prompts", 8, "--input-len", "5:9", "--output-len", 6,
               "--prefix-len", 30, "--slo", "ttft=2s", "--json", out)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "8 of 8" in done.output and "goodput" in done.output and "errors" in done.output
    found = json.loads(out.read_text())
    assert found["model"] == "fake" and found["output_tokens"] == 48 and 280 <= found["prompt_tokens"] <= 312
    assert set(found["ttft_ms"]) == {"p50", "p90", "p95", "p99", "mean"}
    assert found["mbu"] is None and any("does not tell" in note for note in found["notes"])
    done = CliRunner().invoke(app, ["bench", "compare", str(out), str(out)])
    assert done.exit_code == 0 and "1.000" in done.output


METRICS = """# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:estimated_flops_per_gpu_total{{engine="0",model_name="m"}} {flops}
vllm:estimated_read_bytes_per_gpu_total{{engine="0",model_name="m"}} {read}
vllm:estimated_write_bytes_per_gpu_total{{engine="0",model_name="m"}} 0.0
tokenmill:device_info{{device="cuda",device_name="NVIDIA H200",dtype="bfloat16",quantization="fp8"}} 1.0
"""


async def test_a_server_that_tells_what_it_moved_gets_mbu_and_mfu():
    fake = Fake(first=0.05, gap=0.01)

    def metrics():  # 16 tokens of 1e9 bytes and 1e12 operations each
        asked = sum(body["max_tokens"] for body in fake.bodies)
        return METRICS.format(tokens=asked, flops=asked * 1e12, read=asked * 1e9)

    fake.metrics = metrics
    result = await put(fake, talks(4, tokens=4), Pattern(users=2))
    assert result["mbu"] is None and result["flops"] == 16e12 and result["bytes"] == {"read": 16e9, "written": 0.0}
    device = recognise(result["server_device"]["device_name"])
    fill_shares(result, device, "fp8")
    assert result["mbu"] == pytest.approx(16e9 / result["seconds"] / device.bytes_per_s, rel=1e-3)
    assert result["mfu"] == pytest.approx(16e12 / result["seconds"] / device.flops["fp8"], rel=1e-3, abs=1e-6)
    assert read_totals("vllm:generation_tokens_total 5\n") is None


def test_flags_that_users_of_other_tools_type(server, tmp_path):
    out = tmp_path / "out.json"
    few = ("--num-prompts", 6, "--input-len", 5, "--output-len", 3, "--json", out)
    done = run(server, "--request-rate", "inf", "--burstiness", 1, "--ignore-eos", "--goodput", "ttft:5000 e2el:9000",
               "--metric-percentiles", "25,99.9", *few)  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["most_open"] == 6 and found["piled_up"] is False and found["offered_rate"] is None
    assert found["goodput"]["slo_ms"] == {"ttft": 5000.0, "e2e": 9000.0} and "p25 " in done.output
    assert {"p25", "p50", "p99.9"} <= set(found["ttft_ms"])
    done = run(server, "--max-concurrency", 2, *few)
    assert done.exit_code == 0 and json.loads(out.read_text())["workload"] == "2 users"


def test_bad_input_is_told_before_the_run(server, tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"prompt": "a", "max_tokens": 1}\n{"prompt": "b"}\n')
    for arguments, part in (
        (["--base-url", "http://127.0.0.1:1"], "127.0.0.1:1 cannot be reached: nothing listens there"),
        (["--base-url", server.replace("http:", "https:")], "does not speak TLS there"),
        (["--base-url", "http://nowhere.invalid"], "no host of this name"),
        (["--base-url", "127.0.0.1:1"], "must begin with http"),
        (["--base-url", server, "--model", "nope"], "it has: fake, other"),
        (["--base-url", server, "--workload", trace], "line 2: max_tokens must be a positive integer"),
        (["--arrivals", "poisson"], "needs --rate"),
        (["--sweep"], "closed loop has no rate"),
        (["--users", "3", "--rate", "2"], "--users is for closed loops"),
        (["--input-len", "9:5"], "--input-len takes a length"),
        (["--slo", "fast"], "--slo takes terms"),
        (["--goodput", "ttft:-3"], "--goodput takes terms"),
        (["--percentiles", "50,101"], "--percentiles takes numbers"),
        (["--rate", "-1", "--arrivals", "trace"], "--rate must be above 0"),
        (["--rate", "2", "--arrivals", "constant", "--burstiness", "0.5"], "--burstiness is for open loops"),
        (["--users", "2", "--max-concurrency", "2"], "leave out --max-concurrency"),
        (["--sweep", "--rate", "inf"], "finite --rate"),
        (["--device", "h20"], "Did you mean 'h200'"),
        (["--json", tmp_path / "no" / "x.json"], "no such folder"),
        (["--workload", trace, "--turns", 2], "brings its own prompts"),
        (["--duration", 5, "--rate", 2], "--duration is the time of each rate of a --sweep"),
        (["--num-prefixes", 2], "--num-prefixes needs --prefix-len"),
        (["--vocab-size", 50, "--chat"], "--vocab-size is for token ids"),
        (["--think-time", 1, "--users", 2], "--think-time needs conversations of several questions"),
    ):
        done = run(*arguments)
        assert done.exit_code not in (0, None) and part in " ".join(done.output.split()), (arguments, done.output)
        assert "Traceback" not in done.output
