"""The sizes in which a device is calibrated, and how long each takes. Owns: these tables. Must not know: how anything
is measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """How long something is timed. rounds 0: run everything once, and time nothing. round_s: work is repeated until a
    round takes this long. warm_s, lasting_s: the work runs for this long before it is timed; lasting_s is for work that
    a model does for seconds on end, single rows and full steps. passes: how often products are measured. A later time
    counts if it is much shorter, because neighbours on a shared host slow single points down to half."""

    rounds: int = 5
    round_s: float = 0.0
    warm_s: float = 0.0
    lasting_s: float = 0.0
    passes: int = 1


@dataclass(frozen=True, slots=True)
class CalibrationSizes:
    """What is measured on one kind of device. `layers`: (hidden, inner, bytes cycled through); small models have small
    layers, and stay in caches. `mixture`: experts, chosen, hidden, inner. `contexts`: (sequences, length). `prompts`:
    (sequences, new tokens). `behind`: with as many tokens before them. `heads`: of queries, of keys, and their size.
    `nothing`: hidden and inner size of a layer whose arithmetic costs next to nothing. `stored`: the type of K/V in 8
    bits. `kv_cycled`: the bytes of K/V that are read in turn, because few bytes would stay in a cache; 0: no more than
    there are, and predictions ask how many."""

    layers: tuple[tuple[int, int, int], ...]
    rows: tuple[int, ...]
    mixture: tuple[int, int, int, int]
    mixture_rows: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int]
    behind: tuple[tuple[int, int, int], ...] = ()
    nothing: tuple[int, int] = (64, 64)
    stored: str = "int8"
    kv_cycled: int = 0
    timing: Timing = Timing()


SIZES = {
    "cpu": CalibrationSizes(
        layers=((256, 512, 3 << 19), (256, 1024, 12 << 20), (512, 2048, 40 << 20), (2048, 6144, 192 << 20)),
        rows=(1, 2, 4, 8, 16, 32, 64, 256, 1024),
        mixture=(16, 4, 1024, 1024),
        mixture_rows=(1, 8, 64, 512),
        contexts=((4, 256), (8, 1024), (4, 8192)),
        prompts=((8, 64), (1, 256), (1, 2048)),
        heads=(32, 8, 64),
        timing=Timing(passes=2),
    ),
    "gpu": CalibrationSizes(
        layers=((4096, 14336, 1 << 29),),
        rows=(1, 8, 32, 64, 128, 256, 1024, 8192),
        mixture=(64, 8, 2048, 1024),
        mixture_rows=(1, 4, 32, 256, 1024, 8192),
        contexts=((1, 256), (1, 4096), (32, 256), (256, 800), (16, 16384)),
        prompts=((64, 128), (16, 512), (1, 8192)),
        heads=(32, 8, 128),
        behind=((60, 128, 2048), (1, 8192, 8192)),
        nothing=(128, 128),
        stored="float8_e4m3fn",
        kv_cycled=1 << 28,
        timing=Timing(round_s=5e-3, warm_s=0.05, lasting_s=0.3),
    ),
    "short": CalibrationSizes(
        layers=((256, 1024, 12 << 20), (1024, 2048, 64 << 20)),
        rows=(1, 8, 64, 256),
        mixture=(8, 2, 512, 512),
        mixture_rows=(1, 8, 64),
        contexts=((4, 256), (4, 2048)),
        prompts=((8, 64), (1, 512)),
        heads=(32, 8, 64),
        timing=Timing(rounds=3),
    ),
}
"""The sizes by kind of device. `short`: for a CPU, while a person waits."""
