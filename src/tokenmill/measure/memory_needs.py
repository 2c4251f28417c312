"""How much memory models will take here, before any is loaded. Owns: answering this for a server of many models.

It counts as `tokenmill plan` does. It runs in a process of its own, because a server does not import torch.
Must not know: servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import TokenmillError
from tokenmill.device.memory import counts_memory, free_bytes, pick_device
from tokenmill.measure.devices import Device
from tokenmill.measure.memory_need import Need
from tokenmill.measure.plan import Planner, held_in_all, layouts, read_model
from tokenmill.measure.several_devices import Spread, stage_of


def find_needs(configs: Sequence[EngineConfig], memory: int | None, shares: int) -> tuple[int, list[Need]]:
    """(the bytes that all models together may take, the bytes that each takes). memory: the first, if it is given;
    shares: among how many models it is divided if a model sets no K/V cache."""
    device = pick_device(configs[0].execute.device)
    whole = memory
    if whole is None:
        whole = free_bytes(device)
        if counts_memory(device):
            whole = int(whole * configs[0].cache.gpu_memory_utilization)
    return whole, [_need(config, device, whole, shares) for config in configs]


def find_places(names: Sequence[str]) -> dict[str, str]:
    """For each name of a device as people configure it, one name that all names of that device have."""
    found = {}
    for name in names:
        try:
            device = pick_device(name)
        except TokenmillError:  # the load will say it better
            continue
        found[name] = device if device == "cpu" or ":" in device else f"{device}:0"
    return found


def _need(config: EngineConfig, device: str, memory: int, shares: int) -> Need:
    kind = "cpu" if device == "cpu" else "gpu"
    parallel = config.parallel
    spread = Spread(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, engines=parallel.data_parallel_size)
    sharers = spread.sharers(kind)
    share = memory // shares // sharers
    try:
        planner = read_model(config, kind, spread.ranks)
        planner = replace(planner, sheet=stage_of(planner.sheet, spread.stages))
        fixed = config.cache.kv_cache_memory_bytes is not None or config.cache.num_gpu_blocks_override is not None
        found = _for(planner, kind, memory // sharers if fixed else share, sharers)
        if not found.kv:  # the weights alone take its share, so the cache gets as much again
            found = _for(planner, kind, min(memory // sharers, found.whole + share), sharers)
        if not found.kv:
            found = _for(planner, kind, memory // sharers, sharers)
        count = max(sharers, spread.engines)
        return Need(found.whole * count, found.kv, (found.whole - found.kv - planner.sheet.held_bytes) * count, fixed)
    except (TokenmillError, OSError, MemoryError, ValueError):  # the load will say it better
        return Need()


def _for(planner: Planner, kind: str, memory: int, sharers: int) -> Need:
    """The need of one rank with this much memory. On a CPU all ranks of all engines share it: they are so many
    `sharers`."""
    here = Device("here", "", kind, memory, 1.0, {}, 1.0, "")
    kv = layouts(planner, here, sharers).kv_bytes
    return Need(held_in_all(planner, here, sharers), kv)
