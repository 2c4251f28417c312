"""What a server reports about the work of its steps. Owns: reading that from /metrics around a run; its MBU and MFU.

tokenmill's server reports it, and so do others that have the same series. The counts are estimates: weights once per
step, and the K/V held by running sequences. Must not know: load patterns, terminals, torch (the caller gives ceilings).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tokenmill.measure.client import Target
from tokenmill.measure.devices import Device, share

SETTLE_S = 3.0
"""Engines report a few times a second. After this time a run's last step is counted."""
_PAUSE_S = 0.25
_SERIES = {
    "vllm:estimated_flops_per_gpu_total": "flops",
    "vllm:estimated_read_bytes_per_gpu_total": "read",
    "vllm:estimated_write_bytes_per_gpu_total": "written",
    "vllm:generation_tokens_total": "tokens",
}
_STEPS = "tokenmill:steps_total"
_LINE = re.compile(r"^([\w:]+)(?:\{.*\})? (\S+)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
UNTOLD = "mbu and mfu are null: the server's /metrics does not tell what its steps computed and moved"
CUT_OFF = "mbu and mfu are null: the run was stopped, and the server also worked for answers that had not ended"


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a server's engines since its start. `engines`: how many engines report."""

    flops: float
    read: float
    written: float
    tokens: float
    engines: int
    device: Mapping[str, str] = field(default_factory=dict)
    """What they run on (device, device_name, dtype, quantization), if the server reports it."""
    steps: float = 0.0
    """0: the server does not report their number."""


def read_totals(text: str) -> Totals | None:
    """The totals in a text of /metrics. None: a series is missing."""
    found: dict[str, list[float]] = {}
    device: dict[str, str] = {}
    names = {**_SERIES, _STEPS: "steps"}
    for line in text.splitlines():
        if line.startswith("tokenmill:device_info{"):
            device = dict(_LABEL.findall(line))
        match = _LINE.match(line)
        if match is not None and match[1] in names:
            try:
                found.setdefault(names[match[1]], []).append(float(match[2]))
            except ValueError:
                return None
    if found.keys() - {"steps"} != set(_SERIES.values()):
        return None
    return Totals(**{name: sum(values) for name, values in found.items()}, engines=len(found["flops"]), device=device)


async def ask_totals(session: aiohttp.ClientSession, target: Target) -> Totals | None:
    """The present totals. None: this server does not report them."""
    try:
        limit = aiohttp.ClientTimeout(total=5)
        async with session.get(f"{target.base_url}/metrics", headers=target.headers(), timeout=limit) as response:
            return read_totals(await response.text()) if response.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, OSError, UnicodeDecodeError):
        return None


async def spent_since(
    session: aiohttp.ClientSession, target: Target, before: Totals | None, tokens: int
) -> dict[str, Any] | None:
    """Operations and bytes since `before`, once `tokens` more tokens are counted. None: this server does not report
    them."""
    if before is None:
        return None
    deadline = time.perf_counter() + SETTLE_S
    while True:
        now = await ask_totals(session, target)
        if now is None or (now.tokens >= before.tokens + tokens or time.perf_counter() > deadline):
            break
        await asyncio.sleep(_PAUSE_S)
    if now is None or now.flops <= before.flops:  # nothing was counted, or the server has restarted
        return None
    moved = {"read": now.read - before.read, "written": now.written - before.written}
    spent = {"flops": now.flops - before.flops, "bytes": moved, "steps": int(now.steps - before.steps) or None}
    return {**spent, "engines": now.engines, "server_device": dict(now.device)}


def fill_shares(result: dict[str, Any], device: Device, dtype: str) -> bool:
    """Fill in mbu and mfu of a result and its runs, from the server's work and its device's ceilings. Returns whether
    all of them were below their ceiling. One that is above it becomes null."""
    honest = True
    for run in (result, *result.get("runs", ())):
        if run.get("flops") is None or not run["seconds"]:
            continue
        spent, limit = run["seconds"] * run["engines"], device.flops_in(dtype)
        moved = run["bytes"]["read"] + run["bytes"]["written"]
        rate = device.reading(moved / run["steps"]) if run.get("steps") else max([device.bytes_per_s, *_rates(device)])
        run["mbu"] = share(moved / spent / rate)
        run["mfu"] = None if limit is None else share(run["flops"] / spent / limit)
        honest = honest and run["mbu"] is not None and (limit is None or run["mfu"] is not None)
    return honest


def _rates(device: Device) -> list[float]:
    return [rate for _, rate in device.sets]
