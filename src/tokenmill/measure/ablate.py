"""`bench ablate`: what each optimisation is worth. Owns: which options can be switched off, and the ratios.

Must not know: terminals. Everything runs on one machine, one after the other, each on an engine of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.core.config import EngineConfig, make_config
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.device.memory import pick_device
from tokenmill.measure.result_files import STOPPED
from tokenmill.measure.throughput import Progress, measure
from tokenmill.measure.workloads import Workload

GAPS = 1000
"""With fewer gaps between tokens there is no 99th percentile to compare."""
ENOUGH_S = 5.0
"""Options that have run for this long are not run again."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One optimisation: its name, and the options that switch it off."""

    name: str
    off: dict[str, Any]


def switches(config: EngineConfig) -> list[Switch]:
    """The optimisations that are on in this configuration and can be switched off."""
    device = pick_device(config.execute.device)
    found = []
    if config.cache.enable_prefix_caching:
        found.append(Switch("prefix cache", {"enable_prefix_caching": False}))
    if config.schedule.max_num_seqs > 1:
        found.append(Switch("batching", {"max_num_seqs": 1}))
        if config.schedule.batching == "continuous":
            found.append(Switch("continuous batching", {"batching": "static"}))
        if config.model.max_model_len:
            # One block per sequence, as long as a sequence can get: engines without pages reserve memory in this way.
            off = {"block_size": config.model.max_model_len, "enable_prefix_caching": False}
            found.append(Switch("paged K/V", off))
    if config.schedule.enable_chunked_prefill:
        beside = {"long_prefill_token_threshold": 0} if config.schedule.long_prefill_token_threshold else {}
        found.append(Switch("chunked prefill", {"enable_chunked_prefill": False, **beside}))
    if config.execute.kernels != "reference":
        found.append(Switch("fast kernels", {"kernels": "reference"}))
    if config.execute.kernels != "reference" and not config.execute.enforce_eager:
        found.append(Switch("recorded steps", {"enforce_eager": True}))
    if device.startswith("cuda") and config.execute.kernels != "reference" and not config.execute.disable:
        found.append(Switch("fused operations", {"disable": "fusion"}))
        found.append(Switch("shared prefix read once", {"disable": "cascade"}))
        found.append(Switch("dependent launch", {"disable": "dependent-launch"}))
        found.append(Switch("short way from a call to its launch", {"disable": "quick-launch"}))
        found.append(Switch("products of few rows whose parts stay unadded", {"disable": "few-rows"}))
        found.append(Switch("own products of many rows", {"disable": "many-rows"}))
        found.append(Switch("keys and values of heads for long prompts of latent attention", {"disable": "unfolded"}))
        if config.model.quantization:
            found.append(Switch("packed weights in 16 bits, too", {"disable": "widened"}))
        if config.parallel.tensor_parallel_size > 1:
            found.append(Switch("own sums over devices", {"disable": "all-reduce"}))
        if config.parallel.tensor_parallel_size == 2:
            found.append(Switch("long sums exchanged in pieces", {"disable": "exchange"}))
    if config.execute.pipeline_depth != 1 and (device.startswith("cuda") or config.execute.executor == "process"):
        found.append(Switch("overlapped planning", {"pipeline_depth": 1}))
    if config.speculate.speculative_config:
        found.append(Switch("speculation", {"speculative_config": None}))
    if config.model.quantization:
        found.append(Switch("quantised weights", {"quantization": None}))
    if config.tuning.pruned_weights == "packed":
        found.append(Switch("zeros of pruned weights left out", {"pruned_weights": "dense"}))
    if config.cache.kv_cache_dtype != "auto":
        found.append(Switch("K/V type", {"kv_cache_dtype": "auto"}))
    if config.cache.mamba_ssm_cache_dtype not in ("auto", "float32"):
        found.append(Switch("type of recurrent states", {"mamba_ssm_cache_dtype": "auto"}))
    return found


def ablate(
    options: Mapping[str, Any],
    workload: Workload,
    *,
    repeat: int = 1,
    only: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the workload with all optimisations, then without each in turn. The best of `repeat` runs counts. After
    Ctrl-C the result holds the optimisations that were measured."""
    config = make_config(**options)
    only = [name.replace("-", " ") for name in only]  # as other flags' values are written
    chosen = [switch for switch in switches(config) if not only or switch.name in only]
    unknown = set(only) - {switch.name for switch in switches(config)}
    if unknown:
        known = ", ".join(switch.name for switch in switches(config))
        raise ParameterError(f"--only {', '.join(sorted(unknown))}: what can be switched off here is {known}.")
    every = [workload] * repeat
    whole = measure(options, every, progress=progress, enough_s=ENOUGH_S)
    many = whole["output_tokens"] >= GAPS
    rows, stopped = [], STOPPED in whole
    for switch in chosen if not stopped else ():
        row: dict[str, Any] = {"name": switch.name, "off": switch.off, "worth": None, "error": None}
        try:
            without = measure({**options, **switch.off}, every, progress=progress, roofline=False, enough_s=ENOUGH_S)
        except UserError as error:
            row["error"] = str(error)
        except KeyboardInterrupt:  # what was measured is not lost
            stopped = True
            break
        else:
            row |= {
                "output_tokens_per_s": without["output_tokens_per_s"],
                "ttft_ms": without["ttft_ms"]["p50"],
                "tpot_ms": without["tpot_ms"]["p50"],
                "itl_p99_ms": without["itl_ms"]["p99"],
                "worth": round(whole["output_tokens_per_s"] / without["output_tokens_per_s"], 4),
                "worth_ttft": _ratio(without["ttft_ms"]["p50"], whole["ttft_ms"]["p50"]),
                "worth_itl_p99": _ratio(without["itl_ms"]["p99"], whole["itl_ms"]["p99"]) if many else None,
            }
            stopped = STOPPED in without
        rows.append(row)
        if stopped:
            break
    more = {STOPPED: True} if stopped else {}
    return {**whole, "bench": "ablate", "options": rows, "engine_options": whole["options"], **more}


def _ratio(without: float | None, whole: float | None) -> float | None:
    """By what factor a time grows without the optimisation. None: nothing was measured."""
    return round(without / whole, 4) if without and whole else None
