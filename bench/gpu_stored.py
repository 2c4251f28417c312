"""Times decode attention over every form of K/V on an NVIDIA GPU: how much of the speed of plain bytes is left.

python bench/gpu_stored.py [--forms bfloat16,fp8,...] [--cases 16x16000,...] [--heads 32x8x128]
                           [--configs] [--json OUT]

A case is SEQUENCESxTOKENS, one new token each. GB/s are bytes of stored numbers and scales; `of plain` is their share
of what plain keys reach. With --configs every form is also tried in other programs (most splits, keys of a tile, warps,
stages, tiles to bring near, least tiles of a split: `decode_config` chooses them), the fastest first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
from dataclasses import replace

import torch

from gpu_kernels import time_calls
from tokenmill.compute.forward import AttentionSpec, ForwardContext, GroupPlan, KVFormat, KVSpec, KVView
from tokenmill.kernels.triton.attention.decode import attend_one, decode_config
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kvcache.pool import KVPool, make_layout

FORMS = {
    "bfloat16": KVFormat("bfloat16"), "fp8": KVFormat("float8_e4m3fn"), "int8": KVFormat("int8"),
    "int4-fp8k": KVFormat("float8_e4m3fn", 0, "int4"), "int4": KVFormat("int4"),
}  # fmt: skip
BLOCK = 16
CYCLED = 3e8
"""Bytes that calls go through before they come to the first ones again: more than caches hold."""
Config = tuple[int, int, int, int, int, int]
Heads = tuple[int, int, int]


def fill(view: KVView) -> None:
    """Random numbers, scales of ordinary sizes."""
    for pages, scale in ((view.key, view.key_scale), (view.value, view.value_scale)):
        if pages.dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for part in pages.split(1024):  # little memory beside
                part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))
        else:
            pages.view(torch.uint8).random_(0, 255)
        if scale is not None:
            scale.fill_(0.02)


def made(form: KVFormat, seqs: int, length: int, heads: Heads) -> tuple[list[AttentionSpec], ForwardContext, int]:
    """A layer after the other, and bytes that each reads."""
    kv = KVSpec("full", heads[1], heads[2], heads[2])
    moved = seqs * length * form.bytes_per_token(kv)
    layers, held = max(1, int(CYCLED // moved)), -(-length // BLOCK)
    pool = KVPool(make_layout((kv,) * layers, BLOCK, form), [seqs * held], "cuda")
    for view in pool.views:
        fill(view)
    tables = torch.randperm(seqs * held, device="cuda").int().view(seqs, held)
    last = torch.full((seqs,), length - 1, device="cuda")
    slots = tables.gather(1, (last // BLOCK)[:, None])[:, 0].long() * BLOCK + last % BLOCK
    plan = GroupPlan(tables, None, torch.full((seqs,), held, dtype=torch.int32, device="cuda"), slots)
    starts = torch.arange(seqs + 1, dtype=torch.int32, device="cuda")
    ctx = ForwardContext(TritonKernels(), last, starts, (last + 1).int(), 1, pool.views, [plan], block_size=BLOCK)
    spec = AttentionSpec(0, 0, heads[0], kv, heads[2] ** -0.5)
    return [replace(spec, layer=i) for i in range(layers)], ctx, moved


def configs(units: int, narrow: bool) -> list[Config]:
    """Programs that may be faster: of few warps, and so many that all places are taken."""
    tries: list[Config] = [
        (splits, keys, warps, stages, 1, least)
        for splits, (keys, warps), stages, least in itertools.product(
            (1, 2, 4, 8, 16), ((32, 1), (32, 2), (64, 2), (64, 4)), (3, 5), (1, 16)
        )
        if 500 <= splits * units <= 4200 and (splits > 1 or least == 1)
    ]
    return tries if narrow else [one for one in tries if one[2] > 1]


def measure(form: KVFormat, case: tuple[int, int], heads: Heads, more: bool) -> list[dict[str, object]]:
    """Of the config that is chosen, and of others, fastest first."""
    specs, ctx, moved = made(form, *case, heads)
    units, scratch = case[0] * heads[1], ctx.kernels.launch.scratch
    q = torch.randn(case[0], heads[0], heads[2], device="cuda", dtype=torch.bfloat16)
    out = torch.empty(case[0], heads[0] * heads[2], device="cuda", dtype=torch.bfloat16)
    usual = decode_config(units, ctx.groups[0].tables.shape[1] * BLOCK, specs[0], narrow=form.scaled)
    found = []
    for config in [usual, *(one for one in (configs(units, form.scaled) if more else []) if one != usual)]:
        calls = [
            lambda spec=spec, config=config: attend_one(q, out, spec, ctx, scratch, pdl=True, config=config)
            for spec in specs
        ]
        seconds = time_calls(calls, slow=False)
        found.append({"config": config, "us": 1e6 * seconds, "gb_s": 1e-9 * moved / seconds, "usual": config == usual})
    return sorted(found, key=lambda one: (not one["usual"], one["us"]))


def main() -> None:
    """Every form at every case, plain keys first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--cases", default="1x16000,4x32000,16x16000,32x4000,256x800,512x4000")
    parser.add_argument("--heads", default="32x8x128", help="query heads, key/value heads, numbers of a head")
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    query_heads, kv_heads, width = (int(n) for n in options.heads.split("x"))
    heads = query_heads, kv_heads, width
    names, told = ["bfloat16", *(name for name in options.forms.split(",") if name != "bfloat16")], []
    for text in options.cases.split(","):
        seqs, length = (int(n) for n in text.split("x"))
        plain = 0.0
        for name in names:
            rows = measure(FORMS[name], (seqs, length), heads, options.configs)
            plain = plain or max(float(str(row["gb_s"])) for row in rows)
            for row in rows[:6]:
                share = float(str(row["gb_s"])) / plain
                print(f"{text:>10} {name:10} {'chosen' if row['usual'] else '':6} {row['config']!s:22} "
                      f"{row['us']:9.1f} us {row['gb_s']:7.0f} GB/s  {share:4.2f} of plain", flush=True)  # fmt: skip
            told += [{"case": text, "form": name, **row} for row in rows]
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
