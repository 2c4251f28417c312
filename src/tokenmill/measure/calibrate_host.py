"""What a step costs besides its arithmetic. Owns: whole steps of tiny models, run by the engine itself.

Their products cost next to nothing. What is left is planning, launching, waiting for one kernel after the other, and
choosing tokens. Two depths show what a layer adds; mixtures of experts and large vocabularies have models of their own.
On a GPU the host works at the same time, so the device's part is the time of a step's recording, replayed by itself.
Run as a module, this is a process that holds only such a model and prints how much memory it took.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokenmill.core.config import calm_threads
from tokenmill.core.errors import TokenmillError
from tokenmill.device.graphs import Recording
from tokenmill.device.memory import peak_bytes
from tokenmill.engine.interfaces.llm import LLM
from tokenmill.measure.closed_loop import closed_loop
from tokenmill.process.start import PYTHON
from tokenmill.runner.ragged import TOKENS
from tokenmill.runner.recorder import Graphs, RecordedSteps
from tokenmill.runner.runner import Runner

_TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 64,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
_PROMPT = 8
_LONG = 100
_MANY = (TOKENS[-1] // _LONG + 2, _LONG)
"""The number of prompts and their tokens in a step that is too long to be recorded on a GPU."""
_WORDS = 512
_MANY_WORDS = 32768


@dataclass(frozen=True, slots=True)
class HostSizes:
    """Two depths, whose difference shows a layer's share. The smaller one has so few layers that a GPU waits for the
    host. records: steps are recorded, those with prompts up to some length. words: a large vocabulary is measured,
    too."""

    few: int
    many: int
    rows: tuple[int, ...]
    tokens: int = 48
    rounds: int = 5
    words: bool = True
    records: bool = False


SIZES = {
    "cpu": HostSizes(2, 10, (1, 8, 9, 32)),
    "short": HostSizes(2, 10, (1, 8, 32), 16, 3, words=False),
    "gpu": HostSizes(4, 16, (1, 32, 128), 32, 3, words=False, records=True),
}
_REPLAYS = 30
Found = dict[int, tuple[float, float]]
"""Seconds between two tokens, and to the first token, by rows. 0: to the first token of a step that is launched."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one model: the times of steps, and the device's times for their recordings; for single tokens and for
    prompts."""

    whole: Found
    device: Found


def host(device: str, *, mixture: bool = True, short: bool = False, now: Callable[[str], None]) -> dict[str, Any]:
    """Plain JSON: milliseconds around a step and per layer, for steps of single tokens and steps with prompts.

    short: with fewer rows and rounds. now: gets what is being run."""
    sizes = SIZES["gpu" if device != "cpu" else ("short" if short else "cpu")]
    now("a tiny model")
    few = _steps(device, sizes, _TINY, sizes.few)
    now("a deeper one")
    many = _steps(device, sizes, _TINY, sizes.many)
    found: dict[str, Any] = {
        name: [_point(sizes, rows, i, few, many) for rows in sizes.rows]
        for i, name in enumerate(("decoding", "prompting"))
    }
    if sizes.records:
        launched = _apart(sizes, few.whole[0][1], many.whole[0][1])
        found["launching"] = {"tokens": TOKENS[-1], **launched}
    elif mixture:
        now("one with experts")
        deep = _steps(device, sizes, _TINY | _MIXTURE, sizes.many).whole
        more = {rows: (deep[rows][0] - many.whole[rows][0]) / sizes.many for rows in sizes.rows}
        found["mixture_ms"] = [(rows, _ms(max(1e-9, more[rows]))) for rows in sizes.rows]
    found["logit_ns"] = 0.0
    if sizes.words:  # on a GPU this is small compared with a step
        now("one with a large vocabulary")
        most = sizes.rows[-1]
        taken = _steps(device, sizes, _TINY, sizes.few, _MANY_WORDS).whole[most][0] - few.whole[most][0]
        found["logit_ns"] = round(max(0.0, 1e9 * taken / most / (_MANY_WORDS - _WORDS)), 6)
    return found


def rehearse(device: str) -> None:
    """Run once what `host` will run on a GPU."""
    _steps(device, replace(SIZES["gpu"], tokens=3, rounds=1), _TINY, 1)


def _point(sizes: HostSizes, rows: int, which: int, few: Steps, many: Steps) -> dict[str, float]:
    """Steps of single tokens (which: 0) or with prompts (1)."""
    whole = few.whole[rows][which]
    if not sizes.records:
        return {"rows": rows, **_apart(sizes, whole, many.whole[rows][which]), "least_ms": _ms(whole)}
    found = _apart(sizes, few.device[rows][which], many.device[rows][which])
    if which:  # the host plans before the device's work, and reads after it
        found["step_ms"] = max(0.0, _ms(whole) - sizes.few * found["layer_ms"])
    return {"rows": rows, **found, "least_ms": _ms(whole)}


def _apart(sizes: HostSizes, few: float, many: float) -> dict[str, float]:
    """A step's own part and each layer's part, from two depths."""
    layer = max(0.0, (many - few) / (sizes.many - sizes.few))
    return {"step_ms": _ms(max(0.0, few - sizes.few * layer)), "layer_ms": _ms(layer)}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 6)


def process_bytes() -> int:
    """Memory of a process on a CPU that has run next to nothing: programs, libraries, threads."""
    command = [*PYTHON, "-m", "tokenmill.measure.calibrate_host"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TokenmillError(f"A tiny model does not run in a process of its own: {done.stderr.strip()[-300:]}")
    return int(done.stdout)


def _main() -> None:
    calm_threads()
    _steps("cpu", HostSizes(1, 1, (1,), 4, 1), _TINY, 1, pool_bytes=1 << 20)
    sys.stdout.write(f"{peak_bytes('cpu')}\n")


def _steps(
    device: str, sizes: HostSizes, model: dict[str, Any], layers: int, words: int = _WORDS, pool_bytes: int = 1 << 28
) -> Steps:
    """The usual times of this model."""
    whole: Found = {}
    recorded: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        config = {**model, "num_hidden_layers": layers, "vocab_size": words}
        if sizes.records:
            config["max_position_embeddings"] = 2 * TOKENS[-1]  # otherwise not all lengths of prompts are recorded
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": device}
        with LLM(folder, kv_cache_memory_bytes=pool_bytes, max_num_seqs=sizes.rows[-1], **options) as llm:
            loads = {rows: (rows, min(_PROMPT, max(1, TOKENS[-1] // 4 // rows))) for rows in sizes.rows}
            for name, (rows, length) in (loads | ({0: _MANY} if sizes.records else {})).items():
                jobs = [([1 + (i + rows) % 500] * length, sizes.tokens if name else 2) for i in range(rows)]
                times = []
                for _ in range(sizes.rounds):
                    llm.reset_prefix_cache()
                    run = closed_loop(llm.engine, time.perf_counter, jobs, rows)
                    times.append((1e-3 * run["itl_ms"]["p50"], 1e-3 * run["ttft_ms"]["p50"]))
                whole[name] = min(t for t, _ in times), statistics.median(t for _, t in times)
                if name and sizes.records:
                    recorded[rows] = _recorded(llm, rows, rows * length)
    return Steps(whole, recorded)


def _recorded(llm: LLM, rows: int, tokens: int) -> tuple[float, float]:
    """The device's seconds for the recorded steps with this many rows, and with this many prompt tokens. 0: not
    recorded."""
    runner: Runner = llm.engine.executor.runner  # type: ignore[attr-defined]
    graphs = [
        r.recordings.made for r in runner.recorders if isinstance(r, RecordedSteps) if isinstance(r.recordings, Graphs)
    ]
    decoding, prompting = graphs or ({}, {})
    steps = sorted(key for key in decoding if key[0] >= rows)
    prompts = sorted(key for key in prompting if key[0] >= tokens and key[1] > rows)
    return _replayed(decoding[steps[0]]) if steps else 0.0, _replayed(prompting[prompts[0]]) if prompts else 0.0


def _replayed(recording: Recording[Any]) -> float:
    times = []
    probe = torch.ones(1, device=recording.made.hidden.device)
    for _ in range(3):
        recording.replay()
        probe.item()
        start = time.perf_counter()
        for _ in range(_REPLAYS):
            recording.replay()
        probe.item()  # waits for everything before it
        times.append((time.perf_counter() - start) / _REPLAYS)
    return statistics.median(times)


if __name__ == "__main__":
    _main()
