"""A device without kernels of ours: everything runs there in plain torch, says so, and gives the CPU's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmill.core.errors import UserError
from tokenmill.device import memory
from tokenmill.kernels import ReferenceKernels, has_kernels, make_kernels
from tokenmill.testing.tiny import make_tiny

REPO = Path(__file__).parents[3]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.8},
    {"temperature": 1.0, "seed": 3, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.9, "seed": 1, "typical_p": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {7: 2.0}},
    {"temperature": 1.0, "seed": 4, "logprobs": 3, "prompt_logprobs": 2, "bad_words": ["a"]},
    {"temperature": 0.0, "structured_outputs": {"regex": "[a-c]x"}},
    {"temperature": 1.0, "seed": 5, "n": 3},
]
ENGINES: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8", "max_num_batched_tokens": 16},
    {"quantization": "int4"},
    {"quantization": "fp8"},
]
PROGRAM = """
import json, sys
from tests.cpu.engine.fake_device import install
install()
from tests.cpu.engine.test_other_devices import answers
print(json.dumps(answers("fake", sys.argv[1])))
"""


def answers(device: str, folder: str) -> list[Any]:
    """What engines on `device` say to all of ASKED: ids, and how many operations ran beside the fallbacks."""
    from tokenmill import LLM, SamplingParams

    prompts = [{"prompt_token_ids": [5, 6, 7, 8] * 5}, {"prompt_token_ids": [9, 10, 11]}]
    found: list[Any] = []
    for number, options in enumerate(ENGINES):
        kernels = "reference" if device == "cpu" else "auto"
        with LLM(folder, device=device, kernels=kernels, kv_cache_memory_bytes=1 << 22, **options) as llm:
            for asked in ASKED if number == 0 else ASKED[1:2]:
                params = SamplingParams(max_tokens=5, ignore_eos=True, **asked)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                lines = [c for output in outputs for c in output.outputs]
                # CPUs round activations of integer products, other devices do not
                same = "quantization" not in options
                found.append([(c.finish_reason, c.stop_reason, c.token_ids if same else []) for c in lines])
            counts = llm.engine.executor.control({"what": "counters"})["kernels"]
            reasons = " ".join(llm.built.facts.reasons)
            if device != "cpu":
                assert sum(n["calls"] for n in counts.values()) == 0 < sum(n["fallbacks"] for n in counts.values())
                assert f"plain torch computes on {device}" in reasons
    return found


def test_the_same_tokens_as_on_the_cpu(tmp_path: Path) -> None:
    """Its tensors refuse float64, the host's tensors, and reading without a copy."""
    folder = str(make_tiny(tmp_path / "tiny"))
    cpu = json.loads(json.dumps(answers("cpu", folder)))
    told = subprocess.run([sys.executable, "-c", PROGRAM, folder], cwd=REPO, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-3000:]
    assert cpu == json.loads(told.stdout.splitlines()[-1])
    assert {reason for lines in cpu for reason, _, _ in lines} <= {"length", "stop"}


def module(**given: Any) -> Any:
    return SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, **given)


def test_what_torch_does_not_know_or_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tpu", "meta", "", "cpu0", "cuda0", "mps0"):
        with pytest.raises(UserError, match="Unknown device"):
            memory.pick_device(name)
    for name in ("mps", "xpu", "xpu:1"):
        with pytest.raises(UserError, match=r"No .* can be used here"):
            memory.pick_device(name)
    monkeypatch.setattr(memory, "_module", lambda kind: module())
    assert memory.pick_device("xpu:1") == "xpu:1" and memory.devices_like("xpu:1") == ["xpu:1", "xpu:0"]
    for name in ("xpu:2", "xpu:x", "xpu:"):
        with pytest.raises(UserError, match="There is no device"):
            memory.pick_device(name)
    assert memory.others() == [kind for kind in memory.KNOWN if kind != memory.pick_device("auto")]


def test_memory_as_each_kind_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats", "synchronize"))
    kinds = {
        "xpu": module(mem_get_info=lambda device: (3, 4), **counting),
        "mps": module(recommended_max_memory=lambda: 1 << 20, driver_allocated_memory=lambda: 1 << 19),
        "odd": module(),
    }
    monkeypatch.setattr(memory, "_module", lambda device: kinds.get(device.partition(":")[0]))
    assert (memory.free_bytes("xpu:0"), memory.total_bytes("xpu:0"), memory.counts_memory("xpu:0")) == (3, 4, True)
    assert (memory.free_bytes("mps"), memory.total_bytes("mps"), memory.counts_memory("mps")) == (
        1 << 19,
        1 << 20,
        False,
    )
    assert memory.total_bytes("odd") == memory.total_bytes("cpu") and memory.describe("odd") == "odd"


def test_amds_gpus_are_called_cuda_and_get_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.records("cuda:0") and has_kernels("cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not memory.records("cuda:0") and not has_kernels("cuda")
    assert type(make_kernels("cuda:0")) is ReferenceKernels
    with pytest.raises(UserError, match="deterministic"):
        make_kernels("cuda:0", steady=True)
    monkeypatch.setattr(memory, "_module", lambda kind: module() if kind == "cuda" else None)
    assert memory.pick_device("rocm:1") == "cuda:1"
