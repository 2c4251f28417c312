"""`tokenmill tune`: which options serve these users best. Owns: what is tried, in which order, and what counts as
better.

One option is changed after the other, starting from the best so far. Each value is first predicted (real scheduler,
roofline clock), and only those that the prediction does not rule out are run, for seconds. Must not know: terminals,
files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenmill.core.config import make_config, without_secrets
from tokenmill.core.errors import TokenmillError, UserError
from tokenmill.engine.interfaces.llm import LLM
from tokenmill.measure.closed_loop import closed_loop, share_within
from tokenmill.measure.plan import Planner, Setup, read_model
from tokenmill.measure.result_files import STOPPED
from tokenmill.measure.simulate import predict
from tokenmill.measure.throughput import WARM_TOKENS, Progress, Silent
from tokenmill.measure.workloads import Job, Workload

MET = 0.9
"""An objective is met if this share of the requests meets it."""
HOPELESS = 0.8
"""Options are not run if they are predicted to reach less than this share of the best prediction."""
GAIN = 1.02
"""A change must gain at least this factor. Less is noise."""
SAMPLE = 64
"""The most jobs that a prediction looks at."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The users to serve, the objective, and the time for the search."""

    users: int
    slo: Mapping[str, float]
    seconds: float = 300.0
    trial_seconds: float = 10.0
    lossy: bool = False


@dataclass(slots=True)
class Trial:
    """One set of options: the prediction and the measurement (None: not run, and `why` says so)."""

    options: dict[str, Any]
    predicted: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    why: str = ""
    tried: str = ""
    kept: bool = False

    def score(self) -> tuple[bool, float]:
        """Higher is better. Options that meet the objective come first, by tokens per second; then the others, by how
        near they are."""
        return score(self.measured) if self.measured is not None else (False, -1.0)


@dataclass(slots=True)
class Tuner:
    """A search in progress."""

    base: dict[str, Any]
    workload: Workload
    goal: Goal
    setup: Setup
    progress: Progress = field(default_factory=Silent)
    trials: list[Trial] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    planners: dict[str, Planner] = field(default_factory=dict)
    best: Trial | None = None

    @property
    def in_time(self) -> bool:
        """Is there time for another run?"""
        return time.monotonic() - self.began + self.goal.trial_seconds <= self.goal.seconds

    def search(self) -> Trial:
        """The best trial, which `best` is at any time. The search starts from the given options, and changes one option
        at a time while that helps."""
        self.best = best = self.attempt({}, None)
        if best.measured is None:
            raise UserError(f"The options as given do not run: {best.why}")
        for name, values in dimensions(self.base, self.goal, self.setup.device.kind).items():
            for value in self._promising(best, name, values):
                trial = self.attempt({**best.options, name: value}, best, name)
                met, reached = best.score()
                if trial.score() > (met, GAIN * reached):
                    self.best = best = trial
                    trial.kept = True
        return best

    def _promising(self, best: Trial, name: str, values: list[Any]) -> list[Any]:
        """The values that differ from the best so far, the most promising ones first."""
        now = make_config(**{**self.base, **best.options})
        current = next(getattr(group, name) for group in _groups(now) if hasattr(group, name))
        others = [value for value in values if value != current]
        hopes = {i: score(self._predict({**best.options, name: value})) for i, value in enumerate(others)}
        return [others[i] for i in sorted(hopes, key=lambda i: hopes[i], reverse=True)]

    def attempt(self, options: dict[str, Any], best: Trial | None, tried: str = "") -> Trial:
        """Run these options, unless the prediction rules them out."""
        trial = Trial(options, self._predict(options), tried=tried)
        self.trials.append(trial)
        if best is not None and not self.in_time:
            trial.why = "no time was left"
        elif best is not None and _ruled_out(trial, best):
            trial.why = "predicted to be worse"
        else:
            try:
                trial.measured = self._measure(options)
            except TokenmillError as error:
                trial.why = str(error)
            except KeyboardInterrupt:
                trial.why = "stopped"
                raise
        self.progress.advance()
        return trial

    def _predict(self, options: Mapping[str, Any]) -> dict[str, Any] | None:
        """The prediction of the hardware model. None: it does not cover these options (speculation, unknown types)."""
        if options.get("speculative_config"):
            return None
        try:
            config = make_config(**{**self.base, **options})
            key = str((config.model.quantization, config.schedule.max_num_batched_tokens))
            if key not in self.planners:
                self.planners[key] = read_model(config, self.setup.device.kind, self.setup.ranks)
            planner = replace(self.planners[key], config=config)
            jobs = self.workload.jobs(_no_text, planner.sheet.spec.vocab_size)[:SAMPLE]
            found = predict(planner, self.setup, jobs, self.goal.users)
        except UserError:
            return None
        return _judged(found, self.goal)

    def _measure(self, options: Mapping[str, Any]) -> dict[str, Any]:
        llm = LLM(**{**self.base, **options})
        try:
            tokenizer = llm.built.tokenizer
            encode = None if tokenizer is None else tokenizer.encode
            jobs = self.workload.jobs(encode, llm.built.facts.vocab_size)
            closed_loop(llm.engine, time.perf_counter, _warm(jobs, self.goal.users), self.goal.users)
            llm.reset_prefix_cache()
            found = closed_loop(llm.engine, time.perf_counter, jobs, self.goal.users, self.goal.trial_seconds)
        finally:
            llm.close()
        return _judged(found, self.goal)


def tune(
    options: Mapping[str, Any], workload: Workload, goal: Goal, setup: Setup, progress: Progress | None = None
) -> dict[str, Any]:
    """Search. Returns the best options, what they reached, and every trial. After Ctrl-C: the best until then, if the
    options as given had been measured."""
    tuner = Tuner(dict(options), workload, goal, setup, progress or Silent())
    count = 1 + sum(len(v) - 1 for v in dimensions(tuner.base, goal, setup.device.kind).values())
    tuner.progress.start("tuning", count)
    stopped = False
    try:
        best = tuner.search()
    except KeyboardInterrupt:
        if tuner.best is None:
            raise
        best, stopped = tuner.best, True
    first = tuner.trials[0]
    assert best.measured is not None and first.measured is not None
    return {
        "bench": "tune",
        "model": make_config(**options).model.model,
        "device": setup.device.title,
        "workload": workload.name,
        "users": goal.users,
        "slo_ms": dict(goal.slo),
        "met": score(best.measured)[0],
        "options": without_secrets({**options, **best.options}),
        "changed": best.options,
        "measured": best.measured,
        "before": first.measured,
        "worth": round(best.measured["output_tokens_per_s"] / first.measured["output_tokens_per_s"], 4),
        "trials": [
            {name: getattr(t, name) for name in ("tried", "kept", "options", "predicted", "measured", "why")}
            for t in tuner.trials
        ],
        "seconds": round(time.monotonic() - tuner.began, 1),
        **({STOPPED: True} if stopped else {}),
    }


def dimensions(base: Mapping[str, Any], goal: Goal, kind: str) -> dict[str, list[Any]]:
    """What to try, the options that matter most first. Options that were typed stay as they are."""
    users = goal.users
    rows = sorted({max(1, users // 4), max(1, users // 2), users, 2 * users})
    found: dict[str, list[Any]] = {
        # Values beside the usual one (2048, on a GPU 8192), which the first run has.
        "max_num_batched_tokens": [256, 512, 1024] + ([2048, 4096, 16384] if kind == "gpu" else [4096]),
        "max_num_seqs": rows,
        "long_prefill_token_threshold": [0, 128, 512],
        "speculative_config": [None, {"method": "ngram"}],
    }
    if base.get("enable_chunked_prefill") is False:  # prompts are computed whole
        del found["long_prefill_token_threshold"]
    if goal.lossy:
        small: dict[str, list[Any]] = {
            "quantization": [None, "int8", "int4"],
            "kv_cache_dtype": ["auto", "int8" if kind == "cpu" else "fp8"],
        }
        found = {**small, **found}
    return {name: values for name, values in found.items() if name not in base}


def score(found: Mapping[str, Any] | None) -> tuple[bool, float]:
    """(objective met, tokens per second), or (False, share of requests that meet it). If nothing is known: in
    between."""
    if found is None:
        return True, 0.0
    return (True, found["output_tokens_per_s"]) if found["share"] >= MET else (False, found["share"])


def _judged(found: dict[str, Any], goal: Goal) -> dict[str, Any]:
    """The figures by which options are judged."""
    return {
        "output_tokens_per_s": found["output_tokens_per_s"],
        "share": round(share_within(found, goal.slo), 4),
        "requests": found["requests"],
        **{f"{name}_ms": found[f"{name}_ms"] for name in ("ttft", "tpot", "itl")},
    }


def _ruled_out(trial: Trial, best: Trial) -> bool:
    """Is the prediction clearly worse than that of the best options so far?"""
    if trial.predicted is None or best.predicted is None:
        return False
    mine, theirs = score(trial.predicted), score(best.predicted)
    return mine[0] < theirs[0] or (mine[0] == theirs[0] and mine[1] < HOPELESS * theirs[1])


def _warm(jobs: list[Job], users: int) -> list[Job]:
    return [(ids[:128], min(count, WARM_TOKENS)) for ids, count in jobs[:users]]


def _no_text(text: str) -> list[int]:
    """Replace text by its length, because predictions need only lengths: a token has about four characters."""
    return [1] * max(1, len(text) // 4)


def _groups(config: Any) -> list[Any]:
    return [config.model, config.cache, config.schedule, config.execute, config.speculate]
