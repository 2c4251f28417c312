"""docs/hardware.md: what runs on which processors. Owns: its words; `--write` writes it, else it is compared.

GPUs are told from bench/matrix.json, which `python bench/gpu_matrix.py --results FILE --summary bench/matrix.json`
writes, and from the sources' own names of kernels; CPUs from csrc/machine.h. Run as `python tools/hardware.py`; the
tests compare, too.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "hardware.md"
MATRIX = ROOT / "bench" / "matrix.json"
KERNELS = ROOT / "src" / "tokenmill" / "kernels" / "triton"
GENERATIONS = {"sm_80": "Ampere (A100)", "sm_89": "Ada (L40S)", "sm_90": "Hopper (H200)", "sm_100": "Blackwell (B200)"}
LAUNCHED = re.compile(r"^@(?:triton|gluon)\.jit(?:\([^()]*\)[^\n]*)?\ndef (_\w*kernel)\(", re.MULTILINE)
HEAD = """# What runs on which hardware

This page is written by `tools/hardware.py`. Only an H200 and a CPU with AVX-512 have been measured
([performance.md](performance.md)). For the other GPUs kernels are **compiled** by Triton {triton} and its assembler and
held against what a program may take there; none of them has run. What is not compiled for a device, does not fit it or
fails to compile is computed by plain torch, more slowly; `tokenmill doctor`, benchmarks and `/metrics` count such calls
as fallbacks, and the first one of an operation is logged.

## GPUs

{cases} cases: {geometries} geometries, {weights} weight formats and {keys} forms of K/V, each loaded and served on a
GPU that is stood in for (`bench/gpu_matrix.py`). They launch {specialisations} specialisations of {kernels} kernels, of
which {compiled} were compiled, {failed} with a problem.

"""
DIFFERENCES = """| | Ampere | Ada | Hopper | Blackwell |
|---|---|---|---|---|
| shared memory of a program | 163 KiB | 99 KiB: smaller tiles | 227 KiB | 227 KiB |
| launches that begin before the one before has ended | no | no | yes | yes |
| fp8 weights | plain torch, at every call, counted | packed | packed | packed |
| products of more than 64 rows | cuBLAS | cuBLAS | own (`wide`) or cuBLAS | cuBLAS |
| attention of long prompts | `gathered` | `prefill` | `hopper` or `gathered` | `gathered` |
| latent attention of long prompts | `unfolded` | `latent` | `unfolded` | `unfolded` |
| a shared prefix read once | yes | no | yes | yes |
| ways of products | by rule | by rule | measured, or the nearest measured | by rule |
| measured | no | no | yes | no |

`tokenmill tune MODEL --kernel-search load` finds the fastest products of a model on the GPU that is there, and keeps
them for it ([measuring.md](measuring.md)).

{stopped}Plain torch computes on every GPU, counted: heads of more than 256 numbers in 32 bits, K/V with scales for a
number of groups that is no power of two, and matrices of formats without a packed form; on Ampere that is fp8, of
mixtures, too, and fp8 K/V.

## Kernels

How many specialisations were compiled, and the most shared memory that one of them takes. Empty: no case launched it.

"""
CPUS = """
## CPUs

The native kernels are compiled once for each of these instruction sets; the best one that the processor has is chosen
when tokenmill starts. `make run` compiles that one alone. Results of two sets differ in rounding.

| set | processors | measured |
|---|---|---|
"""
SETS = {
    "scalar": ("any", "no"), "avx2": ("x86-64 with AVX2, FMA and F16C", "no"),
    "avx512": ("with AVX-512 F, BW, DQ and VL", "no"), "avx512_vnni": ("and VNNI", "no"),
    "avx512_bf16": ("and BF16", "yes"), "avx512_amx": ("and AMX with BF16 (Linux)", "yes"),
    "neon": ("AArch64", "no: compared under emulation (`make test-neon`)"),
    "neon_dot": ("with dot products", "no: compared under emulation"),
    "neon_bf16": ("and BF16", "no: compared under emulation"),
}  # fmt: skip


def kernels() -> dict[str, str]:
    """Every kernel that is launched: its name as the matrix has it -> its folder."""
    found = {}
    for path in sorted(KERNELS.rglob("*.py")):
        folder = "alone" if path.parent == KERNELS else path.parent.name
        for name in LAUNCHED.findall(path.read_text()):
            found[f"{path.stem}.{name}"] = folder
    return found


def instruction_sets() -> list[str]:
    """As the native module names them."""
    text = (ROOT / "csrc" / "machine.h").read_text()
    lists = re.findall(r"kNames\[\] = \{([^}]*)\}", text)
    return list(dict.fromkeys(name.strip(' "') for part in reversed(lists) for name in part.split(",")))


def page() -> str:
    """The whole page."""
    matrix = json.loads(MATRIX.read_text())
    devices, known = matrix["devices"], kernels()
    every = [cell for device in devices.values() for cell in device.values()]
    text = HEAD.format(
        **{name: matrix[name] for name in ("triton", "cases", "geometries", "weights", "keys")},
        specialisations=f"{sum(matrix['specialisations'].values()):,}",
        kernels=len({name for device in devices.values() for name in device}),
        compiled=sum(cell["compiled"] for cell in every),
        failed=sum(cell["failed"] for cell in every) or "none",
    )
    ended = [f"`{name}`" for name in matrix["failed"]]
    stopped = (
        "Not finished, because plain torch reads computed numbers there, which the stand-in for a GPU does not have: "
        f"{', '.join(ended)}.\n\n"
        if ended
        else ""
    )
    text += (
        DIFFERENCES.replace("{stopped}", stopped)
        + f"| kernel | {' | '.join(GENERATIONS.values())} |\n"
        + "|---" * 5
        + "|\n"
    )
    for name, folder in sorted(known.items(), key=lambda pair: (pair[1], pair[0])):
        cells = [_cell(devices[device].get(name)) for device in GENERATIONS]
        module, _, function = name.partition(".")
        text += f"| {folder}: `{module}.{function.strip('_').removesuffix('_kernel')}` | {' | '.join(cells)} |\n"
    text += CPUS
    for name in instruction_sets():
        text += f"| `{name}` | {' | '.join(SETS[name])} |\n"
    return text


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    size = f"{found['compiled']}, {found['shared'] / 1024:.0f} KiB"
    return size + (f", **{found['failed']} not**" if found["failed"] else "")


def main() -> None:
    """Compare, or write."""
    if "--write" in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/hardware.md is not what its sources say: python tools/hardware.py --write")


if __name__ == "__main__":
    main()
