"""`bench throughput`. Owns: running workloads on an engine in this process, and the fields of the result.

All requests arrive at 0, so the time to the first token counts queueing. Decoding is greedy and the end of text is
ignored: every request gives exactly the tokens that it asks for. Start-up and warm-up are not in `seconds`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill import __version__
from tokenmill.core.config import without_secrets
from tokenmill.core.errors import ParameterError, TokenmillError
from tokenmill.core.request import Request, SamplingParams, TextDelta
from tokenmill.core.step import StepPlan
from tokenmill.device.energy import energy_reader
from tokenmill.device.memory import describe, peak_bytes
from tokenmill.engine.interfaces.llm import LLM
from tokenmill.engine.running.build import runs_here
from tokenmill.measure.calibration import Speeds
from tokenmill.measure.ceilings import ceilings
from tokenmill.measure.devices import ABOVE, Device, share, speeds
from tokenmill.measure.plan import Planner, read_model, speed_type
from tokenmill.measure.plan_recorder import PlanRecorder, SharedPrefixes, grants_of
from tokenmill.measure.result_files import STOPPED
from tokenmill.measure.roofline import Cost, floor, step_cost
from tokenmill.measure.stats import summary_ms, thin
from tokenmill.measure.workloads import Job, Workload

WARM_TOKENS = 4
TIMELINE_POINTS = 2000
Steps = list[tuple[float, StepPlan]]
"""The time at which each plan of a run was submitted, and the plan."""
SHARES = ("mbu", "mfu", "roofline")
"""The figures of a run that are shares of what the device could do."""
_COUNTED = ("steps", "prompt_tokens", "cached_tokens", "preemptions", "drafted", "accepted")


class Progress(Protocol):
    """Hears how far a benchmark is."""

    def start(self, name: str, total: int) -> None: ...
    def advance(self) -> None: ...


class Silent:
    """The null progress."""

    def start(self, name: str, total: int) -> None:
        """Nothing to show."""

    def advance(self) -> None:
        """Nothing to show."""


@dataclass(slots=True)
class Trace:
    """The times at which one request's tokens came, in seconds since all requests were submitted: (time, how many)."""

    marks: list[tuple[float, int]] = field(default_factory=list)
    end: float = 0.0

    @property
    def count(self) -> int:
        """The number of all tokens."""
        return sum(n for _, n in self.marks)


def measure(
    options: Mapping[str, Any],
    workloads: Sequence[Workload],
    *,
    detokenize: bool = True,
    progress: Progress | None = None,
    roofline: bool = True,
    enough_s: float = math.inf,
) -> dict[str, Any]:
    """Run each workload on one engine made from `options` (keywords of LLM). Returns the result, with the best run at
    the top.

    roofline: compare with what the hardware could do; on a CPU this is measured after the run. enough_s: no further run
    begins when the runs have taken this long. Ctrl-C ends a later run, and the result holds the finished ones."""
    progress = progress or Silent()
    progress.start("loading", 1)
    started = time.perf_counter()
    llm = LLM(**options)
    try:
        startup = time.perf_counter() - started
        facts = llm.built.facts
        recorder = PlanRecorder(llm.engine.executor)
        if len(llm.engine.parts) == 1:
            llm.engine.executor = recorder
        detokenize = detokenize and llm.built.tokenizer is not None
        every = [_jobs(llm, workload) for workload in workloads]
        runs: list[dict[str, Any]] = []
        steps: list[Steps] = []
        stopped = False
        for workload, jobs in zip(workloads, every, strict=True):
            try:
                progress.start("warming up", 1)
                _drive(llm, _warm(llm, jobs), detokenize, Silent())
                llm.reset_prefix_cache()
                progress.start(workload.name, len(jobs))
                recorder.plans.clear()
                started = time.perf_counter()
                run = {"workload": workload.name, **_run_jobs(llm, jobs, detokenize, progress)}
            except KeyboardInterrupt:
                if not runs:
                    raise
                stopped = True
                break
            runs.append(run)
            steps.append([(when - started, plan) for when, plan in recorder.plans])
            if sum(run["seconds"] for run in runs) > enough_s:
                break
        notes: list[str] = []
        if runs[-1]["joules"] is None:
            notes.append("watts and joules are null: this device's energy counter (NVML, RAPL) cannot be read")
        memory = _peak_memory(llm, notes)  # before the ceilings, because measuring them takes memory too
        if len(llm.engine.parts) > 1:
            notes.append("mbu and mfu are null: several engines")
        elif roofline:
            _compare(runs, steps, llm, notes)
        best = max(runs, key=lambda run: run["output_tokens_per_s"])
        head = {
            "bench": "throughput",
            "tokenmill": __version__,
            "model": llm.built.config.model.model,
            "device": facts.device,
            "device_name": describe(facts.device),
            "dtype": facts.dtype,
            "weight_bytes": facts.weight_bytes,
            "options": {k: v for k, v in without_secrets(options).items() if k != "model"},
            "detokenize": detokenize,
        }
        return {
            **head,
            "startup_s": round(startup, 4),
            **best,
            "peak_memory_bytes": memory,
            "notes": notes + facts.reasons,
            "runs": runs,
            **({STOPPED: True} if stopped else {}),
        }
    finally:
        llm.close()


def _jobs(llm: LLM, workload: Workload) -> list[Job]:
    """The requests of a workload, checked to fit this engine."""
    tokenizer, facts = llm.built.tokenizer, llm.built.facts
    jobs = workload.jobs(None if tokenizer is None else tokenizer.encode, facts.vocab_size)
    for number, (ids, count) in enumerate(jobs, 1):
        if len(ids) + count > facts.max_model_len:
            raise ParameterError(
                f"{workload.name}, request {number}: {len(ids)} prompt and {count} output tokens exceed the context "
                f"of {facts.max_model_len}."
            )
    return jobs


def _warm(llm: LLM, jobs: list[Job]) -> list[Job]:
    """As many rows as the workload will run, one step's worth of prompt tokens, and a few tokens for each row."""
    rows = min(len(jobs), llm.built.config.schedule.max_num_seqs)
    share = max(1, llm.built.facts.max_step_tokens // rows)
    return [(ids[:share], min(count, WARM_TOKENS)) for ids, count in jobs[:rows]]


def _run_jobs(llm: LLM, jobs: list[Job], detokenize: bool, progress: Progress) -> dict[str, Any]:
    """One timed run and its figures."""
    before, calls = _counters(llm), _calls(llm)
    gc.collect()
    energy = energy_reader(llm.built.facts.device, llm.built.facts.device_uuid)
    traces = _drive(llm, jobs, detokenize, progress)
    joules = energy() if energy is not None else None
    counted = {name: value - before[name] for name, value in _counters(llm).items()}
    kernels = {name: _difference(now, calls.get(name, {})) for name, now in _calls(llm).items()}
    seconds = max(trace.end for trace in traces)
    prompts, outputs = sum(len(ids) for ids, _ in jobs), sum(count for _, count in jobs)
    return {
        "requests": len(jobs),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "seconds": round(seconds, 6),
        "output_tokens_per_s": round(outputs / seconds, 4),
        "total_tokens_per_s": round((prompts + outputs) / seconds, 4),
        **energy_figures(joules, seconds, prompts, outputs),
        **summaries(traces),
        "mbu": None,
        "mfu": None,
        "roofline": None,
        "steps": counted["steps"],
        "computed_prompt_tokens": counted["prompt_tokens"],
        **{name: counted[name] for name in _COUNTED[2:]},
        "kernels": {name: n for name, n in kernels.items() if n["calls"]},
    }


def energy_figures(joules: float | None, seconds: float, prompts: int, outputs: int) -> dict[str, float | None]:
    """The energy of a run, per second and per token. Null: the device does not report it."""
    if joules is None:
        return {"joules": None, "watts": None, "joules_per_output_token": None, "joules_per_token": None}
    return {
        "joules": round(joules, 3),
        "watts": round(joules / seconds, 3),
        "joules_per_output_token": round(joules / outputs, 6) if outputs else None,
        "joules_per_token": round(joules / (prompts + outputs), 6),
    }


def _drive(llm: LLM, jobs: list[Job], detokenize: bool, progress: Progress) -> list[Trace]:
    """Submit all requests, and step until all have ended. Returns one trace per job."""
    driver = llm.driver
    requests = [_request(number, ids, count, detokenize) for number, (ids, count) in enumerate(jobs)]
    traces = {request.id: Trace() for request in requests}
    left = len(requests)
    start = time.perf_counter()

    def hear(delta: TextDelta) -> None:
        nonlocal left
        trace, now = traces[delta.request_id], time.perf_counter() - start
        if delta.token_ids:
            trace.marks.append((now, len(delta.token_ids)))
        if delta.finish_reason is not None:
            if delta.error is not None:
                raise TokenmillError(f"Request {int(delta.request_id) + 1} failed: {delta.error}")
            trace.end = now
            progress.advance()
            left -= 1

    for request in requests:
        driver.add(request, hear)
    while left:
        driver.step()
    while driver.engine.has_work:
        driver.step()
    for (_, count), trace in zip(jobs, traces.values(), strict=True):
        assert trace.count == count, f"a request of {count} tokens gave {trace.count}"
    return list(traces.values())


def _request(number: int, ids: list[int], count: int, detokenize: bool) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=detokenize)
    return Request(id=str(number), prompt_ids=ids, params=params)


def summaries(traces: list[Trace]) -> dict[str, Any]:
    """Per request: the first token, the time per later token, the whole; and the gaps between tokens that arrived
    separately."""
    firsts = [trace.marks[0][0] for trace in traces]
    long = [trace for trace in traces if trace.count > 1]
    gaps = [b[0] - a[0] for trace in traces for a, b in zip(trace.marks, trace.marks[1:], strict=False)]
    times = {
        "ttft_ms": firsts,
        "tpot_ms": [(trace.end - trace.marks[0][0]) / (trace.count - 1) for trace in long],
        "itl_ms": gaps,
        "e2e_ms": [trace.end for trace in traces],
    }
    samples = {name: thin(values) for name, values in times.items()}
    return {**{name: summary_ms(values) for name, values in times.items()}, "samples": samples}


def _counters(llm: LLM) -> dict[str, int]:
    every = [part.scheduler.counters for part in llm.engine.parts]
    return {name: sum(getattr(counters, name) for counters in every) for name in _COUNTED}


def _calls(llm: LLM) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = llm.engine.executor.control({"what": "counters"})["kernels"]
    return {name: dict(counts) for name, counts in found.items()}


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {key: value - before.get(key, 0) for key, value in now.items()}


def _peak_memory(llm: LLM, notes: list[str]) -> int | None:
    if runs_here(llm.built.config):
        return peak_bytes(llm.built.facts.device)
    notes.append("peak_memory_bytes is null: the model runs in a process of its own")
    return None


def _compare(runs: list[dict[str, Any]], steps: list[Steps], llm: LLM, notes: list[str]) -> None:
    """Fill in mbu, mfu and roofline: the shares of what the hardware could do, from the work of each step."""
    config, facts = llm.built.config, llm.built.facts
    try:
        ranks = config.parallel.tensor_parallel_size
        planner = read_model(config, "cpu" if facts.device == "cpu" else "gpu", ranks)
    except TokenmillError as error:
        notes.append(f"mbu and mfu are null: {error}")
        return
    if not all(steps):
        notes.append("mbu and mfu are null: the steps of a run were not seen")
        return
    compared: list[dict[str, Any]] = []

    def passed(device: Device) -> bool:
        if speed_type(planner, device) not in device.flops:
            return False
        limits = speeds(device, speed_type(planner, device))
        compared[:] = [compare_run(planner, limits, s, r["seconds"]) for r, s in zip(runs, steps, strict=True)]
        return any(found[name] > 1 for found in compared for name in SHARES)

    device = ceilings(facts.device, tuple(dict.fromkeys((planner.dtype, planner.compute_type))), passed)
    kind = speed_type(planner, device)
    if kind not in device.flops:
        notes.append(f"mbu and mfu are null: no ceiling is known for {kind} on {device.title}")
        return
    passed(device)
    notes.append(_told(device, kind, compared))
    for run, found in zip(runs, compared, strict=True):
        run.update(found | {name: share(found[name]) for name in SHARES})
    if any(run[name] is None for run in runs for name in SHARES):
        notes.append(ABOVE)
    notes.append(
        "mbu: weights (of experts, as many as the step's tokens are expected to choose) and K/V that each step had to "
        "move; mfu: its products and attention; roofline: the least time of all steps over the time of the run"
    )
    if config.speculate.speculative_config:
        notes.append("with drafts, mbu and mfu count rows as long as if all drafts had been accepted")


def _told(device: Device, kind: str, compared: Sequence[Mapping[str, Any]]) -> str:
    """The ceilings of a device, with the reads with which these runs were compared."""
    rates = sorted(1e-9 * found["read_bytes_per_s"] for found in compared)
    reads = f"{rates[0]:.1f}" if f"{rates[0]:.1f}" == f"{rates[-1]:.1f}" else f"{rates[0]:.1f} to {rates[-1]:.1f}"
    cached = f" for what a step reads ({1e-9 * device.bytes_per_s:.1f} from memory)" if device.sets else ""
    return (
        f"ceilings of {device.title}: {reads} GB/s{cached}, {device.flops[kind] / 1e12:.3g} TFLOP/s in {kind} "
        f"({device.source})"
    )


def compare_run(planner: Planner, limits: Speeds, steps: Steps, seconds: float) -> dict[str, Any]:
    """mbu, mfu and roofline of one run, and the make-up of its steps over time."""
    total, least, moving = Cost(), 0.0, 0.0
    lengths: dict[int, int] = {}
    timeline, prefixes = [], SharedPrefixes()
    for (when, plan), grants in zip(steps, grants_of([plan for _, plan in steps], lengths), strict=True):
        shared = prefixes.positions(plan, planner.config.cache.block_size) if planner.kind == "gpu" else 0
        cost = step_cost(planner.sheet, grants, planner.kv_format, shared)
        least += floor(cost, limits).seconds
        moving += cost.total_bytes / limits.reading(cost.total_bytes)
        total.add(cost)
        ones = sum(grant.count == 1 for grant in grants)
        timeline.append([round(when, 5), ones, sum(grant.count for grant in grants) - ones])
    return {
        "mbu": round(moving / seconds, 6),
        "mfu": round(total.total_flops / seconds / limits.flops_per_s, 6),
        "roofline": round(least / seconds, 6),
        "bytes": {"weights": sum(total.weight_bytes.values()), "kv": total.kv_bytes},
        "flops": total.total_flops,
        "read_bytes_per_s": round(total.total_bytes / moving, 1) if moving else limits.bytes_per_s,
        "timeline": thinned(timeline),
    }


def thinned(timeline: list[list[float]]) -> list[list[float]]:
    """At most TIMELINE_POINTS of (seconds, decoding rows, prompt tokens), evenly chosen."""
    return timeline[:: -(-len(timeline) // TIMELINE_POINTS)] if timeline else []
