"""Several engines as one Backend. Owns: open requests, choosing an engine, watching progress, restarts, and replay.

What a request has said is kept here, so an engine's death costs its readers a pause and nothing else: the request is
sent again with its emitted tokens, and the text decoder on this side goes on where it was. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from tokenmill.core.errors import EngineDeadError, ParameterError, UserError
from tokenmill.core.request import Request, TextDelta, TokenDelta
from tokenmill.engine.admission import Admission
from tokenmill.engine.outputs import OutputProcessor
from tokenmill.engine.wire import Abort, Add, Failed, News, Ready, Report
from tokenmill.server.backend import MAX_CHUNKS, UNAVAILABLE, DeltaStream, EngineStats, ModelInfo, Timeline
from tokenmill.server.engines.links import Link
from tokenmill.server.engines.route import Router
from tokenmill.server.engines.state import Engine, FleetOptions, Open
from tokenmill.server.engines.turns import Turns
from tokenmill.text.codec import Tokenizer

log = logging.getLogger("tokenmill.server")
MakeLink = Callable[[int, int], Link]
"""(engine number, life number) -> a fresh link."""

MAX_BACKLOG = 16_384
"""Deltas that may wait for a slow reader."""


class Fleet:
    """See the module's text."""

    def __init__(self, make_link: MakeLink, names: tuple[str, ...], options: FleetOptions) -> None:
        self.make_link = make_link
        self.names = names
        self.options = options
        self.engines = [Engine(i) for i in range(options.engines)]
        self.router = Router()
        self.turns = Turns()
        self.open_requests: dict[str, Open] = {}
        self.parked: deque[str] = deque()
        self.deaths: deque[float] = deque()
        self.restarts = 0
        self.replays = 0
        self.broken: str | None = None
        self.on_broken: Callable[[str], None] = lambda reason: None
        self.observe: Callable[[int], None] = lambda tokens: None
        self.loaded: asyncio.Future[None] | None = None
        self.watcher: asyncio.Task[None] | None = None
        self._info: ModelInfo | None = None
        self.admission: Admission | None = None
        self.processor = OutputProcessor(None)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load all engines; raises what the first of them that fails reports."""
        self.loaded = asyncio.get_running_loop().create_future()
        for engine in self.engines:
            self._launch(engine)
        await self.loaded
        self.watcher = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Stop all engines; whoever still waits gets an error."""
        if self.watcher is not None:
            self.watcher.cancel()
        self.end_all("the server is shutting down")
        await asyncio.gather(*(e.link.stop() for e in self.engines if e.link is not None))

    def end_all(self, reason: str) -> None:
        """Every open request ends now, with an error that says why."""
        self._end_all(f"{UNAVAILABLE}{reason}")

    def _launch(self, engine: Engine) -> None:
        engine.life += 1
        engine.ready = False
        engine.heard = time.monotonic()
        engine.link = self.make_link(engine.number, engine.life)
        life = engine.life
        engine.link.start(
            lambda news: self._heard(engine, life, news),
            lambda reason: self._died(engine, life, reason),
        )

    # ------------------------------------------------------------ Backend

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "the fleet is not loaded"
        return self._info

    async def open(self, request: Request, stream: DeltaStream, pooling: str | None = None) -> Timeline:
        """Check a request and send it to an engine."""
        if self.broken is not None:
            raise EngineDeadError(self.broken)
        if request.id in self.open_requests:
            raise ParameterError(f"The request id {request.id!r} is in use.", param="request_id")
        if (stream.rank or 0) >= len(self.engines):
            raise ParameterError(f"There are {len(self.engines)} engines, counted from 0.", param="data_parallel_rank")
        admission = self.admission
        assert admission is not None, "the fleet is not loaded"
        late = request.params.structured_outputs is not None
        checked = request
        if late:  # compiled by the engine, which answers whether it could
            params = msgspec.structs.replace(request.params, structured_outputs=None)
            checked = msgspec.structs.replace(request, params=params)
        if pooling is not None:
            admission.check_embedding(checked, pooling)
            outputs = 1
        else:
            outputs = admission.check(checked, 0).num_outputs
        entry = Open(request, pooling, stream, Timeline(time.monotonic()), emitted=[[] for _ in range(outputs)])
        self.open_requests[request.id] = entry
        self.processor.add(request)
        if late:
            entry.ack = asyncio.get_running_loop().create_future()
        if self.turns.take(stream.owner, request.id, outputs, request.priority):
            entry.sent = True
            self._dispatch(entry)
        if entry.ack is not None:
            try:
                await entry.ack
            except BaseException:
                self.abandon(request.id)
                raise
            entry.ack = None
        return entry.timeline

    async def generate(self, request: Request) -> AsyncIterator[TextDelta]:
        """TextGenerator: deltas of all outputs; leaving early aborts the request."""
        stream = DeltaStream()
        await self.open(request, stream)
        left = self.open_requests[request.id].num_outputs if request.id in self.open_requests else 1
        try:
            while left:
                for delta in await stream.batch():
                    left -= delta.finish_reason is not None
                    yield delta
        finally:
            self.abandon(request.id)

    async def abort(self, request_id: str) -> None:
        """TextGenerator: end a request; its stream gets terminal deltas."""
        entry = self.open_requests.get(request_id)
        if entry is not None:
            self._fail(entry, None, "abort")

    def abandon(self, request_id: str, index: int | None = None) -> None:
        entry = self.open_requests.get(request_id)
        if entry is None:
            return
        self._tell(entry, Abort(request_id, index))
        if index is None:
            self._forget(entry)
        elif index not in entry.ended:
            self._ended(entry, index)

    def health(self) -> str | None:
        if self.broken is not None:
            return self.broken
        now = time.monotonic()
        for engine in self.engines:
            if not engine.ready:
                return f"engine {engine.number} is starting"
            if now - engine.heard > self.options.watchdog_s:
                return f"engine {engine.number} has made no progress for {now - engine.heard:.1f} s"
        return None

    def stats(self) -> list[EngineStats]:
        found = [engine.totals() for engine in self.engines]
        found[0].waiting += self.turns.num_waiting
        return found

    def counters(self) -> dict[str, float]:
        now = time.monotonic()
        age = max((now - e.heard for e in self.engines), default=0.0)
        return {"engine_restarts": self.restarts, "replayed_requests": self.replays, "last_step_age_seconds": age}

    # ------------------------------------------------------------ news

    def _heard(self, engine: Engine, life: int, news: News) -> None:
        if life != engine.life:
            return
        engine.heard = time.monotonic()
        if isinstance(news, Report):
            self._report(engine, news)
        elif isinstance(news, Ready):
            self._loaded(engine, news)
        else:
            self._start_failed(engine, news)

    def _loaded(self, engine: Engine, ready: Ready) -> None:
        if self._info is None:
            self._learn(ready)
        engine.ready = True
        if all(e.ready for e in self.engines) and self.loaded is not None and not self.loaded.done():
            self.loaded.set_result(None)
        while self.parked:
            entry = self.open_requests.get(self.parked.popleft())
            if entry is not None:
                self._dispatch(entry)

    def _start_failed(self, engine: Engine, failed: Failed) -> None:
        error = UserError(failed.message) if failed.user else EngineDeadError(failed.message)
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_exception(error)
        else:
            log.error("engine %d did not come back: %s", engine.number, failed.message)

    def _learn(self, ready: Ready) -> None:
        facts = ready.facts
        tokenizer = Tokenizer.from_state(ready.tokenizer) if ready.tokenizer is not None else None
        self._info = ModelInfo(
            names=self.names,
            root=facts["root"],
            vocab_size=facts["vocab_size"],
            max_model_len=facts["max_model_len"],
            tokenizer=tokenizer,
            generation=ready.generation,
            max_rows=facts["max_rows"],
            priorities=facts["priorities"],
            details={**facts, "load_s": ready.load_s},
        )
        self.admission = Admission(
            vocab_size=facts["vocab_size"],
            max_model_len=facts["max_model_len"],
            max_rows=facts["max_rows"],
            max_waiting=1,
            eos_ids=frozenset(ready.eos_ids),
            in_process=False,
        )
        if tokenizer is not None:
            self.admission.encode = lambda text: tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        self.processor = OutputProcessor(tokenizer)
        if self.options.fair:
            self.turns.limit = max(1, facts["max_rows"] * len(self.engines) * 5 // 4)

    def _report(self, engine: Engine, report: Report) -> None:
        for request_id in report.accepted:
            self._answer(request_id, None)
        for request_id, message, param in report.refused:
            self._refused(request_id, message, param)
        for request_id in report.started:
            entry = self.open_requests.get(request_id)
            if entry is not None and entry.timeline.started is None:
                entry.timeline.started = engine.heard
        for request_id, count in report.preempted.items():
            if request_id in self.open_requests:
                self.open_requests[request_id].timeline.preemptions = count
        for request_id, tokens in report.prefilled.items():
            entry = self.open_requests.get(request_id)
            if entry is not None and len(entry.timeline.prefill) < MAX_CHUNKS:
                entry.timeline.prefill.append((engine.heard, tokens))
        if report.deltas:
            self._deliver(report.deltas)
        if report.stats is not None:
            engine.stats = report.stats
        self.observe(report.tokens)

    def _answer(self, request_id: str, error: Exception | None) -> None:
        entry = self.open_requests.get(request_id)
        if entry is not None and entry.ack is not None and not entry.ack.done():
            entry.ack.set_exception(error) if error is not None else entry.ack.set_result(None)

    def _refused(self, request_id: str, message: str, param: str | None) -> None:
        entry = self.open_requests.get(request_id)
        if entry is None:
            return
        if entry.ack is not None and not entry.ack.done():
            entry.ack.set_exception(UserError(message, param=param))
        else:
            self._fail(entry, message, "error")

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        opens = self.open_requests
        for delta in deltas:
            entry = opens.get(delta.request_id)
            if entry is None:
                continue
            if entry.deaths and delta.prompt_logprobs is not None:
                self._drop_seen_rows(entry, delta)
            entry.emitted[delta.index] += delta.tokens
            entry.prompt_rows += len(delta.prompt_logprobs or ())
        texts = self.processor.process(deltas)
        for request_id, index in self.processor.stopped:  # stop strings are found on this side
            self._tell(opens[request_id], Abort(request_id, index))
        self.processor.stopped.clear()
        for text in texts:
            entry = opens.get(text.request_id)
            if entry is None:
                continue
            entry.stream.put(text)
            if text.finish_reason is not None:
                self._ended(entry, text.index)
            elif len(entry.stream) > MAX_BACKLOG:
                self._fail(entry, "the client reads more slowly than the server may wait for", "error")

    def _drop_seen_rows(self, entry: Open, delta: TokenDelta) -> None:
        rows = delta.prompt_logprobs or []
        seen = min(len(rows), entry.skip_rows)
        entry.skip_rows -= seen
        delta.prompt_logprobs = rows[seen:] or None

    def _ended(self, entry: Open, index: int) -> None:
        entry.ended.add(index)
        if len(entry.ended) == entry.num_outputs:
            self._forget(entry)

    def _forget(self, entry: Open) -> None:
        self.open_requests.pop(entry.request.id, None)
        self.processor.drop(entry.request.id)
        if entry.engine >= 0:
            self.engines[entry.engine].requests.discard(entry.request.id)
        entry.timeline.ended = time.monotonic()
        owner = entry.stream.owner
        if entry.sent:
            self.turns.done(owner, entry.num_outputs)
        else:
            self.turns.drop(owner, entry.request.id, entry.request.priority)
        while (waiting := self.turns.next()) is not None:
            following = self.open_requests[waiting]
            following.sent = True
            self._dispatch(following)

    def _fail(self, entry: Open, error: str | None, reason: str) -> None:
        """Terminal deltas for every output that has none."""
        self._tell(entry, Abort(entry.request.id))
        for index in range(entry.num_outputs):
            if index not in entry.ended:
                entry.stream.put(TextDelta(request_id=entry.request.id, index=index, finish_reason=reason, error=error))
        self._answer(entry.request.id, EngineDeadError(error or reason))
        self._forget(entry)

    def _end_all(self, reason: str) -> None:
        for entry in list(self.open_requests.values()):
            self._fail(entry, reason, "error")

    # ------------------------------------------------------------ sending

    def _dispatch(self, entry: Open) -> None:
        loads = {e.number: len(e.requests) for e in self.engines if e.ready}
        request = entry.request
        if not loads:
            self.parked.append(request.id)
            return
        rank = entry.stream.rank
        if rank is None or rank not in loads:
            rank = self.router.choose(loads, request.prompt_ids, request.salt, entry.stream.session)
        entry.engine = rank
        self.engines[entry.engine].requests.add(request.id)
        if entry.deaths:
            request = entry.replayed()
        self._tell(entry, Add(request, entry.pooling, ack=entry.ack is not None))

    def _tell(self, entry: Open, command: Add | Abort) -> None:
        link = self.engines[entry.engine].link if entry.engine >= 0 else None
        if link is not None:
            link.send(command)

    # ------------------------------------------------------------ death

    def _died(self, engine: Engine, life: int, reason: str) -> None:
        if life != engine.life or self.broken is not None:
            return
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_exception(EngineDeadError(f"the engine ended while loading ({reason})"))
            return
        log.error("engine %d died (%s) with %d requests", engine.number, reason, len(engine.requests))
        now = time.monotonic()
        self.deaths.append(now)
        while self.deaths and now - self.deaths[0] > 60.0:
            self.deaths.popleft()
        engine.before, engine.stats = engine.totals(), EngineStats()
        engine.ready, engine.link = False, None
        self.router.forget(engine.number)
        orphans = [self.open_requests[i] for i in engine.requests if i in self.open_requests]
        engine.requests.clear()
        if len(self.deaths) > self.options.max_restarts_per_minute:
            self.broken = f"engines died {len(self.deaths)} times within a minute; giving up"
            for entry in orphans:
                entry.engine = -1
            self._end_all(f"{UNAVAILABLE}{self.broken}")
            self.on_broken(self.broken)
            return
        self.restarts += 1
        self._launch(engine)
        for entry in sorted(orphans, key=lambda e: e.timeline.arrival):
            self._replay(entry)

    def _replay(self, entry: Open) -> None:
        entry.engine = -1
        entry.deaths += 1
        entry.timeline.replays += 1
        if entry.deaths > self.options.max_deaths_per_request:
            self._fail(entry, "engines died repeatedly while they worked on this request", "error")
            return
        self.replays += 1
        self._dispatch(entry)

    async def _watch(self) -> None:
        """Kill engines that stopped talking; their death does the rest."""
        limit = self.options.watchdog_s
        period = min(1.0, limit / 4)
        while True:
            began = time.monotonic()
            await asyncio.sleep(period)
            late = time.monotonic() - began - period
            if late > period:  # this process stood still itself, so nobody could be heard
                for engine in self.engines:
                    engine.heard += late
            silent = [e for e in self.engines if self._silent(e)]
            if silent:
                await asyncio.sleep(0.05)  # it may be us who were late to listen
            for engine in silent:
                if self._silent(engine) and engine.link is not None:
                    log.error("engine %d is hung: no progress for %.1f s", engine.number, limit)
                    engine.link.dump_stacks()
                    await asyncio.sleep(0.2)
                    engine.ready = False
                    await engine.link.kill()

    def _silent(self, engine: Engine) -> bool:
        return engine.ready and time.monotonic() - engine.heard > self.options.watchdog_s
