"""The verbs on a tiny random model: real engines, real files, real processes."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.cli.cli_helpers import run

from tokenmill import LLM, SamplingParams
from tokenmill.measure import ceilings
from tokenmill.testing.tiny import make_tiny

SOURCE = Path(__file__).parents[3] / "src"
SMALL = ["--kv-cache-memory-bytes", "4000000", "--max-num-seqs", "8"]
MEASURED = functools.cache(ceilings.measure_device)
SUMMARY = {"p50", "p90", "p95", "p99", "mean"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds, and what it finds is not looked at here."""
    monkeypatch.setattr(ceilings, "measure_device", MEASURED)


# ------------------------------------------------------------------ generate


def greedy(model: str, prompt: str, count: int) -> Any:
    with LLM(model, num_blocks=64, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        return llm.generate([prompt], params, use_tqdm=False)[0]


def test_generate_prints_what_the_engine_says(tiny: str) -> None:
    wanted = greedy(tiny, "The mill", 12)
    given = ["generate", tiny, "--max-tokens", "12", "--ignore-eos", "--temperature", "0", *SMALL]
    for how in ("--no-stream", "--stream"):
        assert run(*given, "--prompt", "The mill", how).stdout == wanted.outputs[0].text + "\n"
    assert run(*given, "--prompt", "-", typed="The mill").stdout == wanted.outputs[0].text + "\n"


def test_a_text_that_ends_at_once_is_told(tiny: str) -> None:
    first = greedy(tiny, "The mill", 1).outputs[0].text
    found = run("generate", tiny, "--prompt", "The mill", "--temperature", "0", "--stop", first, *SMALL)
    assert found.stdout == "\n" and "ended its text at once" in found.stderr
    assert "ended its text" not in run("generate", tiny, "--prompt", "The mill", "--max-tokens", "3", *SMALL).stderr


def test_generate_json(tiny: str, tmp_path: Path) -> None:
    wanted = greedy(tiny, "The mill", 12)
    file = tmp_path / "prompt.txt"
    file.write_text("The mill")
    result = run(
        "generate", "--model", tiny, "--prompt-file", str(file), "--max-tokens", "12", "--ignore-eos", "--json", *SMALL
    )
    answer = json.loads(result.stdout)
    assert answer["prompt"] == "The mill"
    assert answer["text"] == wanted.outputs[0].text
    assert answer["token_ids"] == wanted.outputs[0].token_ids
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] == len(wanted.prompt_token_ids)
    assert answer["output_tokens"] == 12
    times = answer["timings"]
    assert 0 < times["ttft_ms"] <= times["total_ms"]
    assert times["output_tokens_per_s"] == pytest.approx(12 / times["total_ms"] * 1000, rel=1e-3)


def test_generate_repeats_itself_with_a_seed_and_stops_at_a_text(tiny: str) -> None:
    given = ["generate", tiny, "--prompt", "x", "--temperature", "1", "--json", "--max-tokens", "8", *SMALL]
    given += ["--ignore-eos", "--n", "2"]
    first, again, other = (json.loads(run(*given, "--seed", s).stdout)["outputs"] for s in ("1", "1", "2"))
    assert len(first) == 2 and first == again != other
    assert first[0]["token_ids"] != first[1]["token_ids"]
    text = greedy(tiny, "The mill", 12).outputs[0].text
    stopped = run(
        *("generate", tiny, "--prompt", "The mill", "--max-tokens", "12", "--ignore-eos", "--stop", text[1], "--json"),
        *SMALL,
    )
    answer = json.loads(stopped.stdout)
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (text[:1], "stop", text[1])


def test_generate_tells_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    result = run("generate", str(tmp_path), "--prompt", "a", code=2)
    assert result.stderr.startswith(f"tokenmill: {tmp_path}/config.json: there is no such file")
    assert result.stdout == ""


# ------------------------------------------------------------------ chat


def test_chat_answers_each_line_of_a_pipe(tiny: str) -> None:
    lines = "hello\n/system Be kind.\nhow are you?\n\n/nothing\n/exit\nnever asked\n"
    result = run("chat", tiny, "--max-tokens", "4", "--temperature", "0", *SMALL, typed=lines, code=2)
    with LLM(tiny, num_blocks=64, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        said: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
        first = llm.chat(said, params)[0].outputs[0].text
        said = [{"role": "system", "content": "Be kind."}, *said, {"role": "assistant", "content": first}]
        second = llm.chat([*said, {"role": "user", "content": "how are you?"}], params)[0].outputs[0].text
    assert result.stdout == f"{first}\n{second}\n"
    assert result.stderr.count("tokens/s") == 2
    assert "There is no command /nothing" in result.stderr
    assert "context 2,048 tokens" in result.stderr and "float32 on cpu" in result.stderr


def test_chat_forgets_the_oldest_turns_and_refuses_what_never_fits(tiny: str) -> None:
    lines = "\n".join(["word " * 10] * 4 + ["word " * 200, "hi"]) + "\n"
    result = run("chat", tiny, "--max-tokens", "5", "--max-model-len", "160", *SMALL, typed=lines, code=2)
    assert "the oldest 2 messages are forgotten" in result.stderr
    assert "has room for 120: say less at a time" in result.stderr
    assert result.stderr.count("of 160)") == 5


def test_chat_needs_a_template(tiny: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "plain")
    (folder / "tokenizer_config.json").write_text("{}")
    assert "no chat template" in run("chat", str(folder), *SMALL, typed="hi\n", code=2).stderr


def test_chat_goes_on_with_another_model(tiny: str, tmp_path: Path) -> None:
    other, plain = make_tiny(tmp_path / "other"), make_tiny(tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text("{}")
    lines = f"hello\n/model /no/such\n/model {plain}\n/model\n/model {other}\n/model\nand now?\n/bye\nnever\n"
    result = run("chat", tiny, "--max-tokens", "3", *SMALL, typed=lines)
    assert "'/no/such' is neither" in result.stderr and f"{plain} has no chat template" in result.stderr
    assert f"The model is {tiny}." in result.stderr and f"The model is {other}." in result.stderr
    assert result.stderr.count("of weights in") == 2  # what cannot chat was never loaded
    assert result.stderr.count("of 2048)") == 2 and "(3 tokens" in result.stderr


def read_until(stream: Any, part: bytes, seconds: float) -> bytes:
    """Bytes of a non-blocking pipe until `part` has come."""
    found, end = b"", time.monotonic() + seconds
    while part not in found and time.monotonic() < end:
        found += stream.read() or b""
        time.sleep(0.01)
    return found


def endless(folder: Path) -> str:
    """A model that knows no end of text: its answers fill the context."""
    make_tiny(folder)
    for name, gone, more in (
        ("config.json", "eos_token_id", {"max_position_embeddings": 6000}),
        ("generation_config.json", "eos_token_id", {}),
        ("tokenizer_config.json", "eos_token", {}),
    ):
        settings = json.loads((folder / name).read_text())
        del settings[gone]
        (folder / name).write_text(json.dumps({**settings, **more}))
    return str(folder)


def test_control_c_ends_a_chat_that_reads_a_pipe(tmp_path: Path) -> None:
    """At a terminal it stops the answer alone (test_cli_terminal.py)."""
    script = "from tokenmill.cli.main import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", script, "chat", endless(tmp_path), *SMALL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        # Whoever runs the tests in the background has the signal ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdin and child.stdout and child.stderr
    try:
        os.set_blocking(child.stderr.fileno(), False)
        child.stdin.write(b"tell me everything\n")
        child.stdin.flush()
        read_until(child.stderr, b"context 6,000", 120)
        assert os.read(child.stdout.fileno(), 1)  # the answer has begun
        child.send_signal(signal.SIGINT)
        assert child.wait(120) == 130
    finally:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            stream.close()


# ------------------------------------------------------------------ doctor


def test_doctor_finds_this_machine() -> None:
    result = run("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert {"torch", "device", "cores", "memory (cpu)", "native kernels", "demo model"} <= set(findings)
    for dtype in ("float32", "bfloat16"):
        found = findings[f"kernels, {dtype}"]
        assert "attention" in found["detail"] and found["status"] in ("ok", "note")
        assert ("fallbacks" in found["detail"]) == (found["status"] == "note") == bool(found["advice"])
    assert "torch" in run("doctor").stdout


# ------------------------------------------------------------------ bench


def workload(folder: Path, jobs: list[tuple[Any, int]]) -> str:
    file = folder / "w.jsonl"
    key = {str: "prompt", list: "prompt_token_ids"}
    file.write_text("".join(json.dumps({key[type(p)]: p, "max_tokens": n}) + "\n" for p, n in jobs))
    return str(file)


def test_bench_throughput_counts_exactly(tiny: str, tmp_path: Path) -> None:
    jobs = [([1, 2, 3, 4], 1), ("The mill grinds grain", 17), ([7] * 40, 9), ([1, 2, 3, 4], 30)]
    out, file = tmp_path / "out.json", workload(tmp_path, jobs)
    flags = ["--json", str(out), "--enforce-eager", *SMALL]  # recorded steps call their kernels once
    table = run("bench", "throughput", tiny, "--workload", file, "--workload", file, *flags)
    result = json.loads(out.read_text())
    prompts = 4 + 40 + 4 + len(greedy(tiny, "The mill grinds grain", 1).prompt_token_ids)
    assert len(result["runs"]) == 2
    for run_ in [result, *result["runs"]]:
        assert (run_["requests"], run_["prompt_tokens"], run_["output_tokens"]) == (4, prompts, 57)
        assert run_["computed_prompt_tokens"] == prompts and run_["cached_tokens"] == 0  # cleared in between
        assert run_["seconds"] > 0
        assert run_["output_tokens_per_s"] == pytest.approx(57 / run_["seconds"], rel=1e-3)
        assert run_["total_tokens_per_s"] == pytest.approx((57 + prompts) / run_["seconds"], rel=1e-3)
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert set(run_[name]) == SUMMARY and run_[name]["p50"] <= run_[name]["p99"]
        assert run_["e2e_ms"]["p99"] <= 1000 * run_["seconds"] + 0.001
        assert run_["steps"] == 30  # one row needs 30 tokens, and all four fit into each step
        assert run_["mbu"] > 0 and run_["mfu"] > 0
        assert run_["kernels"]["attention"] == {"calls": 60, "fallbacks": 0}
    speeds = [run_["output_tokens_per_s"] for run_ in result["runs"]]
    assert result["output_tokens_per_s"] == max(speeds)
    assert result["startup_s"] > 0 and result["peak_memory_bytes"] > 1 << 20
    assert result["weight_bytes"] == 4 * (2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128) + 320 * 64)
    assert "output tokens/s" in table.stdout


def test_bench_ignores_the_end_of_text(tiny: str, tmp_path: Path) -> None:
    """A model that would end at once gives all the tokens that were asked for."""
    folder = make_tiny(tmp_path / "ends")
    first = greedy(tiny, "The mill", 1).outputs[0].token_ids[0]
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [first]}))
    with LLM(str(folder), num_blocks=64, max_num_seqs=2) as llm:
        ended = llm.generate(["The mill"], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0].outputs[0]
    assert ended.finish_reason == "stop"
    out = tmp_path / "out.json"
    file = workload(tmp_path, [("The mill", 6)])
    run("bench", "throughput", str(folder), "--workload", file, "--json", str(out), *SMALL)
    assert json.loads(out.read_text())["output_tokens"] == 6


def test_bench_with_a_config_alone(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(tiny, "config.json").read_text())
    out = tmp_path / "out.json"
    given = ["bench", "throughput", str(tmp_path), "--load-format", "dummy", "--json", str(out), *SMALL]
    run(*given, "--input-len", "20", "--output-len", "1", "--num-prompts", "12", "--repeat", "2")
    result = json.loads(out.read_text())
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (12, 240, 12)
    assert len(result["runs"]) == 2 and result["detokenize"] is False
    assert set(result["tpot_ms"].values()) == {None}
    assert set(result["itl_ms"].values()) == {None}
    text = workload(tmp_path, [("text", 1)])
    assert "line 1: text needs a tokenizer" in run(*given, "--workload", text, code=2).stderr
    long = workload(tmp_path, [([1], 1), ([1] * 2000, 100)])
    assert "request 2: 2000 prompt and 100 output tokens" in run(*given, "--workload", long, code=2).stderr
    odd = workload(tmp_path, [([320], 1)])
    assert "token id 320" in run(*given, "--workload", odd, code=2).stderr
