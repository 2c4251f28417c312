"""What `tokenmill doctor` finds. Owns: looking at the machine, the installation, and the kernels that really run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tokenmill import __version__
from tokenmill.core.cores import usable_cores
from tokenmill.core.errors import TokenmillError
from tokenmill.core.extras import pip_install
from tokenmill.core.request import SamplingParams
from tokenmill.demo import demo_dir
from tokenmill.device.memory import describe, free_bytes, others, pick_device, total_bytes
from tokenmill.engine.interfaces.llm import LLM
from tokenmill.kernels import has_kernels

_EXTRAS = {
    "chat": ("prompt_toolkit", "line editing in tokenmill chat"),
    "bench": ("matplotlib", "plots of benchmarks"),
}
_TIGHT_BYTES = 2 << 30
_TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Finding:
    """One finding. `advice`: what to do about it, if anything."""

    name: str
    status: Literal["ok", "note", "bad"]
    detail: str
    advice: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which they are shown."""
    device = pick_device("auto")
    return [*_software(), *_machine(device), *_native(), *_kernels(device), *_extras(), _demo()]


def _software() -> Iterator[Finding]:
    yield Finding("tokenmill", "ok", f"{__version__}, Python {platform.python_version()} on {platform.system()}")
    yield Finding("torch", "ok", torch.__version__)


def _machine(device: str) -> Iterator[Finding]:
    advice = "" if device != "cpu" else "Everything works on the CPU; a GPU needs torch with CUDA and its driver."
    yield Finding("device", "ok", f"{device}: {describe(device)}", advice)
    if not has_kernels(device):
        yield Finding("own kernels", "note", f"none for {device}: plain torch computes there", "It works, but slowly.")
    for kind in others():
        advice = f"`--device {kind}` computes there in plain torch; the CPU's own kernels may well be faster."
        yield Finding("another device", "note", f"{kind}: {describe(kind)}", advice)
    present, quota = os.cpu_count() or 1, cpu_quota(Path("/sys/fs/cgroup"))
    usable = usable_cores()
    limit = f", limited to {quota:g} by the container" if quota is not None else ""
    if quota is not None and quota < usable:
        text = f"Start with --threads {max(1, int(quota))}: more threads than the limit wait for each other."
        yield Finding("cores", "note", f"{usable} of {present} may be used{limit}", text)
    else:
        yield Finding("cores", "ok", f"{usable} of {present} may be used{limit}")
    for name in dict.fromkeys(("cpu", device)):
        free, total = free_bytes(name), total_bytes(name)
        tight = free < _TIGHT_BYTES
        advice = "Close other programs, or keep the cache small with --kv-cache-memory-bytes." if tight else ""
        yield Finding(
            f"memory ({name})",
            "note" if tight else "ok",
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free",
            advice,
        )


def cpu_quota(cgroup: Path) -> float | None:
    """The cores that the container may use on average. None: there is no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _native() -> Iterator[Finding]:
    try:
        native = importlib.import_module("tokenmill._native")
    except ImportError as error:
        advice = "Install a C++ compiler, then `pip install --force-reinstall --no-deps tokenmill` (or `make setup`)."
        yield Finding("native kernels", "note", f"not built, plain torch is used ({error})", advice)
        return
    yield Finding("native kernels", "ok", f"instruction set {native.isa()}, {native.threads()} threads")


def _kernels(device: str) -> Iterator[Finding]:
    """Run a few tokens through a random model, and list the operations that fell back."""
    for dtype in ("float32", "bfloat16"):
        try:
            backend, counts = _try_out(device, dtype)
        except TokenmillError as error:
            yield Finding(f"kernels, {dtype}", "bad", f"a tiny model does not run: {error}", "Please report this.")
            continue
        slow = {name: n["fallbacks"] for name, n in counts.items() if n["fallbacks"]}
        used = ", ".join(f"{name} {n['calls']}" for name, n in sorted(counts.items()) if n["calls"])
        detail = f"{backend}; calls: {used}"
        if slow:
            shown = ", ".join(f"{name} {n}" for name, n in sorted(slow.items()))
            advice = "These run in plain torch: right results, slower."
            yield Finding(f"kernels, {dtype}", "note", f"{detail}; fallbacks: {shown}", advice)
        else:
            yield Finding(f"kernels, {dtype}", "ok", detail)


def _try_out(device: str, dtype: str) -> tuple[str, dict[str, dict[str, int]]]:
    """The backend's name, and its counters after a prompt and a few tokens."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_TINY))
        with LLM(folder, load_format="dummy", device=device, dtype=dtype, kv_cache_memory_bytes=8 << 20) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            output = llm.generate([[1, 2, 3, 4, 5]], params, use_tqdm=False)[0].outputs[0]
            if output.finish_reason != "length":
                raise TokenmillError(str(output.stop_reason))
            answer = llm.engine.executor.control({"what": "counters"})
            runner = getattr(llm.engine.executor, "runner", None)
            return type(runner.kernels).__name__ if runner is not None else "unknown", answer["kernels"]


def _extras() -> Iterator[Finding]:
    for extra, (module, purpose) in _EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding(f"extra {extra}", "ok", f"{module} is installed ({purpose})")
        else:
            yield Finding(f"extra {extra}", "note", f"{module} is not installed ({purpose})", pip_install(extra))


def _demo() -> Finding:
    folder = demo_dir("main")
    if (folder / "config.json").exists():
        return Finding("demo model", "ok", "installed")
    return Finding("demo model", "note", "not in this installation", "Name a model folder instead of `demo`.")
