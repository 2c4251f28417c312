"""Where a kernel's loads wait for each other, before and after its registers are bounded. Needs no GPU.

python bench/gpu_chains.py CASE [--only NAME,...] [--layers N]

CASE is one of gpu_compile.py's. Each kernel that its steps of few rows launch is compiled as it is, and with a bound on
registers. Told no bound, ptxas mixes loads with what is done with them, to keep registers few: then the second load is
asked for when the first has come. With a bound it asks for what fits at once. Beside a weight that streams, each wait
costs up to 4 us. Shown are the loads of each chain's links, by number ([12]: all at once; [6, 1, 1, 4]: four waits),
and kernels that get fewer links are marked.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

from gpu_compile import assembly, case_of, of_few_rows, serve
from gpu_standin import DEVICES, Kernel, installed

_ARITHMETIC = (
    "F2FP", "FADD", "FFMA", "FMNMX", "FMUL", "FSEL", "FSETP", "HADD2", "HFMA2", "HMMA", "I2F", "ISETP", "MUFU",
)  # fmt: skip
_WORK = frozenset((*_ARITHMETIC, "BAR", "PRMT", "SHFL", "STG"))
"""What a kernel does with what it has loaded."""
_AMONG = 3
"""So many of these between two loads are no wait: they may belong to loads before."""


def links(sass: str) -> list[int]:
    """How many loads are asked for together, chain link by link."""
    found: list[int] = []
    between = 0
    for line in sass.splitlines():
        said = re.search(r"\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", line)
        name = said[1] if said else ""
        if name in ("LDG", "LDGSTS"):
            if between > _AMONG or not found:
                found.append(0)
            found[-1] += 1
            between = 0
        elif name in _WORK:
            between += 1
    return found


def bounded(options: Any) -> Any:
    """With as many registers as let two programs run on a multiprocessor, or 128."""
    return replace(options, maxnreg=min(128, 65536 // (64 * options.num_warps) // 8 * 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--only", default="", help="kernels whose names begin so, e.g. gemv.,experts.")
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    only = tuple(part for part in given.only.split(",") if part)
    with installed(device=DEVICES["sm_90"]) as standin:
        serve(standin, of_few_rows(case_of(given.case), 64), given.layers)
        for kernel in list(standin.kernels.values()):
            if kernel.name.startswith(only or ""):
                print(told(kernel), flush=True)


def told(kernel: Kernel) -> str:
    """A line about a kernel."""
    before = links(assembly(kernel))
    said = f"{kernel.name:32} {kernel.grid}: {before}"
    if kernel.options.maxnreg:
        return said
    after = links(assembly(replace(kernel, options=bounded(kernel.options))))
    return f"{said} -> {after}{'  fewer' if len(after) < len(before) else ''}"


if __name__ == "__main__":
    main()
