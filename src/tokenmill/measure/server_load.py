"""`bench serve`: users that ask a server. Owns: closed and open loops, sweeps to the knee, the fields of the result.

Must not know: terminals, engines. The client's own lateness is part of the result, so that a client that cannot keep
up is seen.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from tokenmill.core.errors import UserError
from tokenmill.measure.arrivals import BURSTINESS, arrival_times
from tokenmill.measure.client import Answer, Target, find_model, send_request
from tokenmill.measure.conversations import Conversation
from tokenmill.measure.result_files import STOPPED
from tokenmill.measure.server_work import ask_totals, spent_since
from tokenmill.measure.stats import summary_ms, thin
from tokenmill.measure.throughput import Progress, Silent

KNEE_SHARE = 0.9
"""A rate is beyond the knee if a smaller share of requests than this meets the objective, or if requests pile up."""
SWEEP_SECONDS = 10.0
_CALM = 3.0
_GROWTH = 1.6
_MAX_SWEEP = 16
_REFINEMENTS = 3
_FEWEST = 20


@dataclass(frozen=True, slots=True)
class Pattern:
    """How users arrive: `users` at a time (closed loop), at `rate` per second in this pattern, or as in a trace."""

    kind: str = "closed"
    users: int = 1
    rate: float = 0.0
    shape: float = BURSTINESS
    think: float = 0.0
    max_open: int = 0
    seed: int = 0


@dataclass(slots=True)
class Drive:
    """One run in progress."""

    session: aiohttp.ClientSession
    target: Target
    pattern: Pattern
    progress: Progress
    answers: list[Answer]
    gate: asyncio.Semaphore | None = None

    async def converse(self, conversation: Conversation, planned: float) -> None:
        """Send all turns of one user, each after the previous answer and a pause for thought."""
        history: list[Any] = []
        for index, turn in enumerate(conversation.turns):
            if index:
                await asyncio.sleep(self.pattern.think)
                planned = time.perf_counter()
            prompt = _prompt(history, turn.prompt, self.target.chat)
            answer = await self._send(prompt, turn.max_tokens, planned)
            self.answers.append(answer)
            if answer.error is not None:
                break
            history = _remember(prompt, answer, self.target.chat)
        self.progress.advance()

    async def _send(self, prompt: Any, max_tokens: int, planned: float) -> Answer:
        if self.gate is None:
            return await send_request(self.session, self.target, prompt, max_tokens, planned)
        async with self.gate:
            return await send_request(self.session, self.target, prompt, max_tokens, time.perf_counter())


async def serve_load(
    target: Target,
    conversations: Sequence[Conversation],
    pattern: Pattern,
    *,
    slo: dict[str, float] | None = None,
    warmup: int = 1,
    progress: Progress | None = None,
    percentiles: Sequence[float] = (),
) -> dict[str, Any]:
    """Put this load on the server, and sum up the results. If this is cancelled, the result holds the answers that had
    ended."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        target = await ready(session, target, conversations, warmup)
        shown = progress or Silent()
        return await _run_load(session, target, conversations, pattern, slo or {}, shown, percentiles, cut=True)


async def ready(
    session: aiohttp.ClientSession, target: Target, conversations: Sequence[Conversation], warmup: int
) -> Target:
    """The target with a model that the server has. The first requests are sent before the load, one after the other."""
    target = replace(target, model=await find_model(session, target))
    for conversation in conversations[:warmup]:
        turn = conversation.turns[0]
        answer = await send_request(session, target, _prompt([], turn.prompt, target.chat), turn.max_tokens, 0.0)
        if answer.error is not None:
            raise UserError(
                f"The server does not answer a first request ({answer.error}): {''.join(answer.text)[:500]}"
            )
    return target


async def sweep(
    target: Target,
    conversations: Callable[[int, int], Sequence[Conversation]],
    pattern: Pattern,
    *,
    seconds: float = SWEEP_SECONDS,
    slo: dict[str, float] | None = None,
    warmup: int = 1,
    progress: Progress | None = None,
    percentiles: Sequence[float] = (),
) -> dict[str, Any]:
    """Raise the rate from pattern.rate until the server falls behind twice (the knee), then close in on it. If this is
    cancelled, the result holds the finished runs.

    `conversations(count, number)` gives the load of one rate, which lasts about `seconds`."""
    runs: list[dict[str, Any]] = []
    good, bad = 0.0, 0.0
    stopped = False
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:
        target = await ready(session, target, conversations(warmup, 0) if warmup else (), warmup)

        async def once(rate: float) -> bool:
            at = replace(pattern, rate=rate)
            load = conversations(max(_FEWEST, round(rate * seconds)), len(runs) + 1)
            runs.append(await _run_load(session, target, load, at, slo or {}, progress or Silent(), percentiles))
            return keeps_up(runs[-1])

        async def held(rate: float) -> bool:
            return await once(rate) or await once(rate)  # one short pause of the machine is not the server's limit

        try:
            rate = pattern.rate
            for _ in range(_MAX_SWEEP):
                if not await held(rate):
                    bad = rate
                    break
                good, rate = rate, rate * _GROWTH
            for _ in range(_REFINEMENTS if good and bad else 0):
                middle = (good * bad) ** 0.5
                good, bad = (middle, bad) if await held(middle) else (good, middle)
        except asyncio.CancelledError:
            if not runs:
                raise
            stopped = True
    runs.sort(key=lambda run: run["offered_rate"])
    knee = max((run for run in runs if keeps_up(run)), key=lambda run: run["offered_rate"], default=runs[0])
    found = knee["offered_rate"] if good and not (stopped and not bad) else None
    return {**knee, "bench": "sweep", "knee_rate": found, "runs": runs, **({STOPPED: True} if stopped else {})}


def keeps_up(run: dict[str, Any]) -> bool:
    """Did the server keep up with this rate: without errors, without requests piling up, and within the objective if
    there is one?"""
    if run["errors"] or run["piled_up"]:
        return False
    return run["goodput"] is None or bool(run["goodput"]["share"] >= KNEE_SHARE)


def piled_up(answers: Sequence[Answer], start: float, span: float) -> bool:
    """Did requests still run long after the last one came? Long means more than a tenth of the time in which they came,
    and more than a few times the duration of the first requests."""
    if not answers:
        return False
    first = sorted(answers, key=lambda a: a.sent)[: max(1, len(answers) // 10)]
    calm = sorted(map(e2e, first))[len(first) // 2]
    drain = max(a.end for a in answers) - start - span
    return drain > (1 / KNEE_SHARE - 1) * span + _CALM * calm


async def _run_load(
    session: aiohttp.ClientSession,
    target: Target,
    conversations: Sequence[Conversation],
    pattern: Pattern,
    slo: dict[str, float],
    progress: Progress,
    percentiles: Sequence[float] = (),
    *,
    cut: bool = False,
) -> dict[str, Any]:
    """One timed run. cut: if it is cancelled, what it has is its result."""
    progress.start(describe(pattern), len(conversations))
    gate = asyncio.Semaphore(pattern.max_open) if pattern.max_open else None
    drive = Drive(session, target, pattern, progress, [], gate)
    before = await ask_totals(session, target)
    start, times, stopped = time.perf_counter(), [0.0], False
    try:
        if pattern.kind == "closed":
            await _closed(drive, conversations)
        else:
            times = _times(conversations, pattern)
            await _open(drive, conversations, [start + at for at in times])
    except asyncio.CancelledError:
        if not (cut and drive.answers):
            raise
        stopped = True
    offered = (len(times) - 1) / times[-1] if len(times) > 1 and times[-1] > 0 else None
    found = sum_up(drive.answers, start, slo, percentiles)
    # What the server did for answers that were cut off cannot be told from the rest.
    spent = None if stopped else await spent_since(session, target, before, found["output_tokens"])
    return {
        "bench": "serve",
        "base_url": target.base_url,
        "model": target.model,
        "workload": describe(pattern),
        **found,
        "offered_rate": offered,
        "piled_up": piled_up(drive.answers, start, times[-1] or float("inf")),
        "mbu": None,
        "mfu": None,
        **(spent or {"flops": None, "bytes": None, "engines": None, "server_device": {}}),
        **({STOPPED: True} if stopped else {}),
    }


async def _closed(drive: Drive, conversations: Sequence[Conversation]) -> None:
    """`users` users. Each takes the next conversation when its last one has ended."""
    left = deque(conversations)

    async def user() -> None:
        while left:
            await drive.converse(left.popleft(), time.perf_counter())

    await asyncio.gather(*(user() for _ in range(min(drive.pattern.users, len(conversations)))))


async def _open(drive: Drive, conversations: Sequence[Conversation], times: Sequence[float]) -> None:
    """Start each conversation at its time, however busy the server is."""
    tasks = []
    try:
        for conversation, at in zip(conversations, times, strict=True):
            wait = at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(drive.converse(conversation, at)))
        await asyncio.gather(*tasks)
    finally:  # if it is cancelled between two of them
        for task in tasks:
            task.cancel()


def _times(conversations: Sequence[Conversation], pattern: Pattern) -> list[float]:
    if pattern.kind != "trace":
        return arrival_times(pattern.kind, pattern.rate, len(conversations), seed=pattern.seed, shape=pattern.shape)
    missing = sum(c.at is None for c in conversations)
    if missing:
        raise UserError(f"The trace gives no time for {missing} of its requests; choose another --arrivals.")
    times = [c.at or 0.0 for c in conversations]
    if times != sorted(times):
        raise UserError("The times of the trace do not ascend.")
    return [at / pattern.rate for at in times] if pattern.rate else times


def describe(pattern: Pattern) -> str:
    """Describe a load in words."""
    if pattern.kind == "closed":
        return f"{pattern.users} users"
    if pattern.kind == "trace":
        return "trace" + (f" at {pattern.rate:g} times its speed" if pattern.rate else "")
    return f"{pattern.kind}, {pattern.rate:.4g} requests/s"


def sum_up(
    answers: Sequence[Answer], start: float, slo: dict[str, float], percentiles: Sequence[float] = ()
) -> dict[str, Any]:
    """The figures of one run. Latencies are those of requests that succeeded."""
    good = [a for a in answers if a.error is None]
    seconds = max((a.end for a in answers), default=start) - start
    times = {name: [t for t in map(of, good) if t is not None] for name, of in METRICS.items()}
    gaps = [later[0] - sooner[0] for a in good for sooner, later in zip(a.marks, a.marks[1:], strict=False)]
    prompts, outputs = sum(a.prompt_tokens for a in good), sum(a.tokens for a in good)
    return {
        "requests": len(answers),
        "completed": len(good),
        "errors": dict(Counter(a.error for a in answers if a.error is not None)),
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "seconds": round(seconds, 6),
        "requests_per_s": _rate(len(good), seconds),
        "requests_per_minute": _rate(60 * len(good), seconds),
        "output_tokens_per_s": _rate(outputs, seconds),
        "total_tokens_per_s": _rate(prompts + outputs, seconds),
        "ttft_ms": summary_ms(times["ttft"], percentiles),
        "tpot_ms": summary_ms(times["tpot"], percentiles),
        "itl_ms": summary_ms(gaps, percentiles),
        "e2e_ms": summary_ms(times["e2e"], percentiles),
        "goodput": _goodput(answers, slo, seconds) if slo else None,
        "client_late_ms": summary_ms([a.sent - a.planned for a in answers]),
        "most_open": most_open(answers),
        "tokens_counted": all(a.counted for a in good) if good else None,
        "samples": {**{f"{name}_ms": thin(values) for name, values in times.items()}, "itl_ms": thin(gaps)},
    }


def ttft(answer: Answer) -> float | None:
    """Seconds from sending to the first token."""
    return answer.marks[0][0] - answer.sent if answer.marks else None


def tpot(answer: Answer) -> float | None:
    """Seconds per token after the first. None: there is only one token."""
    return (answer.marks[-1][0] - answer.marks[0][0]) / (answer.tokens - 1) if answer.tokens > 1 else None


def e2e(answer: Answer) -> float:
    """Seconds from sending to the last byte."""
    return answer.end - answer.sent


METRICS: dict[str, Any] = {"ttft": ttft, "tpot": tpot, "e2e": e2e}


def _goodput(answers: Sequence[Answer], slo: dict[str, float], seconds: float) -> dict[str, Any]:
    """The requests that met every term of the objective. Failed ones did not. itl: every gap of the answer."""

    def met(answer: Answer) -> bool:
        if answer.error is not None:
            return False
        gaps = [later[0] - sooner[0] for sooner, later in zip(answer.marks, answer.marks[1:], strict=False)]
        reached = {name: of(answer) for name, of in METRICS.items()} | {"itl": max(gaps, default=None)}
        return all(value is None or 1000 * value <= slo[name] for name, value in reached.items() if name in slo)

    count = sum(map(met, answers))
    return {"slo_ms": slo, "requests_per_s": _rate(count, seconds), "share": round(count / max(len(answers), 1), 6)}


def most_open(answers: Sequence[Answer]) -> int:
    """The most requests that were open at once."""
    changes = sorted([(a.sent, 1) for a in answers] + [(a.end, -1) for a in answers])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, 4) if seconds > 0 else 0.0


def _prompt(history: list[Any], said: list[int] | str, chat: bool) -> Any:
    """The history with the user's next text: messages, one text, or one list of ids."""
    if chat:
        return [*history, {"role": "user", "content": said}]
    if isinstance(said, str):
        return "".join(history) + said
    return [*history, *said]


def _remember(prompt: Any, answer: Answer, chat: bool) -> list[Any]:
    """The history with which the next turn begins."""
    text = "".join(answer.text)
    if chat:
        return [*prompt, {"role": "assistant", "content": text}]
    return [prompt, text, "\n"] if isinstance(prompt, str) else [*prompt, *answer.token_ids]
