"""Proves that a change of the Triton backend leaves what a GPU runs as it was. Needs no GPU.

python bench/gpu_identity.py [CASE ...] --json OUT     what is launched, in order, and the PTX of every kernel
python bench/gpu_identity.py --compare BEFORE AFTER    whether two such files say the same; exit status 1: they do not
python bench/gpu_identity.py --usage KERNEL ... --json OUT      also what ptxas makes of these kernels (all: "_")

CASEs are those of gpu_compile.py and of MORE below (default: DEFAULT); they run on its stand-in. A launch is a kernel,
its grid, options, shapes, numbers, and which of its tensors share memory; what torch is asked to launch in between is
noted, too. PTX is compared without debug lines and without names of functions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ.setdefault("TRITON_CACHE_DIR", str(pathlib.Path.home() / ".triton" / "ptx"))  # holds no machine code

import torch
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas

import gpu_compile
from gpu_compile import ANY, EXPERTS, LLAMA, MOE, SMALL, Case, Requests
from gpu_standin import DEVICES, Kernel, Standin, installed

ROUND: dict[str, Requests] = {
    "choices": [(128, 0, 6)] * 12, "batch32": [(100, 0, 4)] * 32, "prefix": [(700 + 3 * i, 600, 4) for i in range(70)],
    "alone": [(n, 0, 3) for n in (1, 3, 12, 60, 200, 513, 1025, 2100)],
    "mixed": [(1 + 97 * i % 897, 0, 3 + i % 9) for i in range(100)],
}  # fmt: skip
"""What every case serves here: few tokens, every kind of step."""
MAMBA = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 768, "intermediate_size": 1536,
    "num_hidden_layers": 2, "state_size": 16, "conv_kernel": 4, "time_step_rank": 48, "vocab_size": 50280,
    "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "max_position_embeddings": 8192,
}  # fmt: skip
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 768, "expand": 2, "num_heads": 24,
    "head_dim": 64, "num_hidden_layers": 2, "state_size": 128, "conv_kernel": 4, "n_groups": 1, "vocab_size": 50288,
    "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu", "chunk_size": 256,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "max_position_embeddings": 8192, "rms_norm": True,
}  # fmt: skip
BLOCKS = SMALL | {
    "hidden_size": 512, "intermediate_size": 1024, "head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip
MORE = {
    "mamba": Case(MAMBA, ROUND), "mamba2": Case(MAMBA2, ROUND), "small-blocks": Case(BLOCKS, ROUND),
    "30b-a3b-deterministic": Case(MOE, EXPERTS, {"max_model_len": 8192, "deterministic": True}),
    "small-int8": Case(SMALL, ANY, {"quantization": "int8"}),
    "8b-lora-fp8": Case(LLAMA, ANY, {"enable_lora": True, "max_loras": 4, "quantization": "fp8"}),
}  # fmt: skip
DEFAULT = (
    "small", "small-fp8", "small-int4", "small-blocks", "mamba", "mamba2", "8b-bf16", "8b-fp8-kv8", "8b-int8",
    "8b-int4-g128", "8b-kv-int8", "8b-deterministic", "8b-lora", "8b-plain", "8b-eagle3", "30b-a3b", "30b-a3b-int4",
    "gemma-2-9b:bf16", "gemma-2-9b:kv-fp8", "gpt-oss-20b:bf16", "deepseek-v2-lite:bf16", "qwen3.6-35b-a3b:bf16",
    "bloom-560m:bf16",
)  # fmt: skip


@dataclass(slots=True)
class Notes:
    """All that was launched: distinct launches, and their order by number."""

    places: dict[str, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)

    def note(self, what: str, phase: str) -> None:
        """One launch more."""
        if not self.phases or self.phases[-1][0] != phase:
            self.phases.append((phase, len(self.order)))
        self.order.append(self.places.setdefault(what, len(self.places)))


def described(value: Any, storages: dict[int, int]) -> Any:
    """An argument, without addresses: tensors by their form and by whose memory they lie in."""
    if isinstance(value, torch.Tensor):
        place = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}+{value.storage_offset()}@{place}"
    if isinstance(getattr(value, "base", None), torch.Tensor):
        return [described(value.base, storages), *map(str, (value.shape, value.strides, value.block_shape))]
    if isinstance(value, (tuple, list)):
        return [described(one, storages) for one in value]
    return str(value)


def ptx_of(kernel: Kernel) -> tuple[str, int]:
    """What is compiled, without debug lines and names; and bytes of shared memory."""
    made = kernel.function._do_compile(
        kernel.key, kernel.signature, 0, kernel.constants, kernel.options, kernel.attributes, True
    )
    text: str = made.asm["ptx"]
    text = re.sub(r"//.*|^\s*\.(loc|file|section)\b.*", "", text, flags=re.MULTILINE)
    return text.replace(made.metadata.name, "KERNEL"), made.metadata.shared


def usage_of(ptx: str) -> dict[str, int]:
    """Registers, spilled bytes and instructions that ptxas makes of it."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = pathlib.Path(folder) / "k.ptx", pathlib.Path(folder) / "k.cubin"
        source.write_text(ptx)
        target = re.search(r"\.target (\w+)", ptx)
        assert target is not None
        path = pathlib.Path(get_ptxas(90).path)
        command = [str(path), "-v", f"--gpu-name={target[1]}", str(source), "-o", str(made)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        listed = subprocess.run(
            [str(path.with_name("cuobjdump")), "-sass", str(made)], capture_output=True, text=True, check=True
        ).stdout
    numbers = {name: int(n) for n, name in re.findall(r"(\d+) (registers|bytes stack frame|bytes spill \w+)", said)}
    return numbers | {"instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", listed, flags=re.MULTILINE))}


def witnessed(standin: Standin, notes: Notes) -> None:
    """Have launches noted, those of torch included."""
    plain = standin.launch

    def launch(function: Any, arguments: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> None:
        plain(function, arguments, grid, dict(options))
        _, _, _, _, binder = function.device_caches[0]
        bound, _, _ = binder(*arguments, **options, debug=False, instrumentation_mode="")
        storages: dict[int, int] = {}
        given = [f"{name}={described(value, storages)}" for name, value in bound.items()]
        shape = tuple(grid(bound) if callable(grid) else grid)
        chosen = sorted((n, str(v)) for n, v in options.items() if n not in bound)
        notes.note(f"{function.fn.__name__}{shape}{chosen}({', '.join(given)})", standin.phase)

    standin.launch = launch  # type: ignore[method-assign]
    standin.noted = lambda what: notes.note(what, standin.phase)


def look(name: str, layers: int, usage: list[str]) -> dict[str, Any]:
    """One case: its launches and its kernels."""
    case = MORE[name] if name in MORE else gpu_compile.case_of(name)
    options = {"max_num_seqs": 128, **case.options}
    options["max_num_seqs"] = min(128, options["max_num_seqs"])
    options["max_model_len"] = min(8192, options.get("max_model_len", 8192))
    case = Case(case.config, ROUND, options, case.draft)
    notes = Notes()
    with installed(device=DEVICES["sm_90"]) as standin:
        witnessed(standin, notes)
        gpu_compile.serve(standin, case, layers)
    CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: b""  # type: ignore[method-assign]
    kernels: list[dict[str, Any]] = []
    for kernel in list(standin.kernels.values()):
        text, shared = ptx_of(kernel)
        short = kernel.name.rpartition(".")[2]
        known = {n: str(v) for n, v in kernel.known().items()}
        warps = kernel.options.num_warps
        found = {"name": short, "known": known, "warps": warps, "stages": kernel.options.num_stages, "shared": shared}
        found["ptx"] = hashlib.sha256(text.encode()).hexdigest()[:20]
        if any(part in short for part in usage):
            found["usage"] = usage_of(text)
        kernels.append(found)
    print(f"{name}: {len(notes.order)} launches, {len(notes.places)} distinct, {len(kernels)} kernels", flush=True)
    for problem in standin.problems:
        print("  PROBLEM", problem)
    return {
        "case": name, "launches": list(notes.places), "order": notes.order, "phases": notes.phases, "kernels": kernels,
        "problems": standin.problems,
    }  # fmt: skip


def compare(before: pathlib.Path, after: pathlib.Path) -> bool:
    """Print what differs; is it nothing?"""
    old, new = ({case["case"]: case for case in json.loads(path.read_text())} for path in (before, after))
    same = old.keys() == new.keys()
    for name in old.keys() & new.keys():
        a, b = old[name], new[name]
        one, other = ([case["launches"][i] for i in case["order"]] for case in (a, b))
        kernels = [Counter((k["name"], k["ptx"], k["shared"]) for k in case["kernels"]) for case in (a, b)]
        print(f"{name}: launches {'same' if one == other else 'DIFFER'} ({len(one)}, {len(other)}), "
              f"kernels {'same' if kernels[0] == kernels[1] else 'DIFFER'} ({len(a['kernels'])})")  # fmt: skip
        if one != other:
            at = next(
                (i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other))
            )
            print(f"  first at {at}:", *(f"\n    {side[at][:1500]}" for side in (one, other) if at < len(side)))
        for short, ptx, shared in (kernels[0] - kernels[1]) + (kernels[1] - kernels[0]):
            print(f"  {short} {ptx} {shared} {'is gone' if kernels[0][short, ptx, shared] else 'is new'}")
        same = same and one == other and kernels[0] == kernels[1]
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[], metavar="CASE")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--usage", action="append", default=[], metavar="KERNEL")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--compare", nargs=2, type=pathlib.Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        sys.exit(not compare(*options.compare))
    cases, found = options.cases or list(DEFAULT), []
    if len(cases) == 1:
        found = [look(cases[0], options.layers, options.usage)]
    for name in cases if len(cases) > 1 else ():  # each in a process of its own: the stand-in stays for the life of one
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            more = [f"--layers={options.layers}", f"--json={file.name}", *(f"--usage={part}" for part in options.usage)]
            subprocess.run([sys.executable, __file__, name, *more], check=False)
            text = pathlib.Path(file.name).read_text()
            found += json.loads(text) if text else [{"case": name, "problems": ["the case ended early"]}]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
