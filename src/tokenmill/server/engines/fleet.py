"""Several engines as one Backend. Owns: open requests, choosing an engine, handling engines' news, and replay.

The fleet keeps what each request has said. So an engine's death costs readers only a pause: the request is sent again
with its emitted tokens, and the text decoder on this side goes on where it was. An exception in our own handling of one
request ends that request only. Must not know: HTTP, processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from tokenmill.core.errors import (
    SHUTTING_DOWN,
    BusyError,
    EngineDeadError,
    EngineFaultError,
    EngineLostError,
    IdInUseError,
    ParameterError,
    SequenceError,
    UserError,
)
from tokenmill.core.request import Request, TextDelta, TokenDelta
from tokenmill.engine.running.picking import EnginePicker, asked_of
from tokenmill.engine.running.said import REPEATEDLY
from tokenmill.engine.running.trials import Trials
from tokenmill.engine.running.wire import Abort, Add, Beat, Failed, News, Ready, Refused, Report, check_carried
from tokenmill.engine.steps.admission import Admission, work_of
from tokenmill.engine.steps.deliveries import Deliveries
from tokenmill.server.adapters import AdapterBook
from tokenmill.server.backend import MAX_CHUNKS, UNAVAILABLE, DeltaStream, EngineStats, ModelInfo, Timeline
from tokenmill.server.engines.adapters import AdapterTraffic
from tokenmill.server.engines.engine_sleep import RestTraffic
from tokenmill.server.engines.fair_queue import FairQueue
from tokenmill.server.engines.keeper import Keeper, MakeLink, Reports
from tokenmill.server.engines.ready_message import learn_admission, learn_model
from tokenmill.server.engines.state import EngineRecord, FleetOptions, Open
from tokenmill.text.codec import Tokenizer

log = logging.getLogger("tokenmill.server")

MAX_BACKLOG = 16_384
"""Most deltas that may wait for a slow reader."""
MUDDLED = "what the engine said could not be handled"
QUICK = 8192
"""Checking this many token ids takes a fraction of a millisecond. Longer requests are checked in a thread."""


class Fleet:
    """The engines of one model. The module's text describes it."""

    def __init__(self, make_link: MakeLink, names: tuple[str, ...], options: FleetOptions) -> None:
        self.names = names
        self.adapters = AdapterTraffic(self, AdapterBook())
        self.options = options
        self.keeper = Keeper(make_link, options, Reports(self._heard, self._lost, self._broken, self._hopeless))
        self.engines = self.keeper.engines
        self.rest = RestTraffic(self.keeper)
        self.picker = EnginePicker()
        self.queue = FairQueue()
        self.open_requests: dict[str, Open] = {}
        self.trials = Trials(
            lambda: {name: entry.engine for name, entry in self.open_requests.items() if entry.engine >= 0},
            options.max_deaths_per_request,
        )
        self.parked: deque[str] = deque()
        self.replays = 0
        self.ended_well = 0
        """Outputs that have ended normally, and trials that were passed, since the last death that was explained."""
        self.on_broken: Callable[[str], None] = lambda reason: None
        self.observe: Callable[..., None] = lambda tokens, engine: None
        self.loaded: asyncio.Future[None] | None = None
        self._info: ModelInfo | None = None
        self.admission: Admission | None = None
        self.deliveries = self._deliveries(None)

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load all engines. Raises the report of the first one that fails."""
        self.loaded = asyncio.get_running_loop().create_future()
        self.keeper.start()
        for engine in self.engines:
            if engine.trouble is not None:
                raise UserError(f"Engine {engine.number}: {engine.trouble}.")
        await self.loaded

    async def close(self) -> None:
        """Stop all engines. Callers that still wait get an error."""
        self.end_all(SHUTTING_DOWN)
        await self.keeper.close()

    def end_all(self, reason: str) -> None:
        """End every open request now, with an error that says why."""
        for entry in list(self.open_requests.values()):
            self._fail(entry, f"{UNAVAILABLE}{reason}", "error")

    @property
    def restarts(self) -> int:
        """How many lives of engines began because an earlier one had ended."""
        return self.keeper.restarts

    @property
    def broken(self) -> str | None:
        """Why no engine is left."""
        return self.keeper.broken

    # ------------------------------------------------------------ Backend

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "the fleet is not loaded"
        return self._info

    async def open(self, request: Request, stream: DeltaStream, pooling: str | None = None) -> Timeline:
        """Check a request and send it to an engine."""
        if (reason := self.broken or self.keeper.trouble()) is not None:
            raise EngineDeadError(reason)
        if self.rest.asleep:
            raise BusyError("The model sleeps.")
        if request.id in self.open_requests:
            raise IdInUseError(request.id)
        if (stream.rank or 0) >= len(self.engines):
            there = "one engine, number 0" if len(self.engines) == 1 else f"engines 0 to {len(self.engines) - 1}"
            raise ParameterError(
                f"There is no engine {stream.rank}; this server has {there}.", param="data_parallel_rank"
            )
        admission = self.admission
        assert admission is not None, "the fleet is not loaded"
        late = request.params.structured_outputs is not None
        checked = request
        if late:  # the engine compiles the structure, and answers whether it succeeded
            params = msgspec.structs.replace(request.params, structured_outputs=None)
            checked = msgspec.structs.replace(request, params=params)

        def check() -> int:
            check_carried(Add(request, pooling))
            return admission.check(checked, 0, pooling).num_outputs

        outputs = check() if work_of(request) <= QUICK else await asyncio.to_thread(check)
        if request.id in self.open_requests:  # another request with this id came during the check
            raise IdInUseError(request.id)
        request = self.adapters.current(request)
        entry = Open(request, pooling, stream, Timeline(time.monotonic()), emitted=[[] for _ in range(outputs)])
        self.open_requests[request.id] = entry
        self.deliveries.add(request, self._show)
        if late:
            entry.ack = asyncio.get_running_loop().create_future()
        try:
            if self.queue.take(stream.owner, request.id, outputs, request.priority):
                entry.sent = True
                self._dispatch(entry)
            if entry.ack is not None:
                await entry.ack
        except BaseException:
            self.abandon(request.id)
            raise
        entry.ack = None
        return entry.timeline

    async def abort(self, request_id: str) -> None:
        """End a request. Its stream gets terminal deltas."""
        entry = self.open_requests.get(request_id)
        if entry is not None:
            self._fail(entry, None, "abort")

    def abandon(self, request_id: str) -> None:
        entry = self.open_requests.get(request_id)
        if entry is None:
            return
        try:
            self._tell_end(entry)
        finally:
            self._forget(entry)

    def health(self) -> str | None:
        """None while any engine serves: it takes the requests of those that do not."""
        if self.broken is not None or self.rest.asleep:  # an engine that died asleep is loaded when it is woken
            return self.broken
        found = [engine.absence(self.options.watchdog_s) for engine in self.engines]
        return found[0] if all(found) else None

    def stats(self) -> list[EngineStats]:
        found = [engine.totals() for engine in self.engines]
        for engine, stats in zip(self.engines, found, strict=True):
            stats.up = int(engine.absence(self.options.watchdog_s) is None)
        found[0].waiting += self.queue.num_waiting
        return found

    def counters(self) -> dict[str, float]:
        age = max((time.monotonic() - e.heard for e in self.engines), default=0.0)
        return {
            "engine_restarts": self.restarts,
            "engine_failed_starts": self.keeper.failed_starts,
            "replayed_requests": self.replays,
            "last_step_age_seconds": age,
        }

    # ------------------------------------------------------------ news

    def _heard(self, engine: EngineRecord, life: int, news: News) -> None:
        if life != engine.life:  # said before it died
            return
        if isinstance(news, Beat):
            engine.beat(news.done)
            return
        engine.heard = time.monotonic()
        if isinstance(news, Ready):
            return self._loaded(engine, news)
        if isinstance(news, Failed):
            return self._start_failed(engine, news)
        self._note_fates(engine, news)
        for delta in news.deltas:
            self.deliveries.safely(delta.request_id, self._note, delta)
        self.deliveries.deliver(news.deltas)  # this side looks for stop strings
        if news.adapted:
            self.adapters.heard(engine, news.adapted)
        self.rest.heard(engine, news.slept)
        if news.stats is not None:
            engine.stats, engine.counted_at = news.stats, engine.heard
        self.deliveries.safely("", self.observe, news.tokens, engine.number)

    def _mistake(self, request_id: str) -> None:
        """Call this in an exception handler. It ends the request that caused the exception, and nothing else."""
        log.exception("what an engine said of a request could not be handled")
        entry = self.open_requests.get(request_id)
        if entry is None:
            return
        try:
            self._fail(entry, MUDDLED, "error")
        except Exception:
            log.exception("a request could not be ended in an orderly way")
            for end in (partial(self._end_stream, entry, MUDDLED, "error"), partial(self._forget, entry)):
                with suppress(Exception):
                    end()
            entry.answer(SequenceError(MUDDLED))

    def _loaded(self, engine: EngineRecord, ready: Ready) -> None:
        if self._info is None:
            self._learn(ready)
            self.tell_names()
        engine.serves()
        self.adapters.introduce(engine)
        self.rest.loaded(engine)
        if all(e.ready for e in self.engines) and self.loaded is not None and not self.loaded.done():
            self.loaded.set_result(None)
        self._unpark()

    def _unpark(self) -> None:
        """Send the requests that waited for an engine. Some may have to wait longer."""
        waited = list(self.parked)
        self.parked.clear()
        for request_id in waited:
            if (entry := self.open_requests.get(request_id)) is not None:
                self._try_again(entry)

    def _start_failed(self, engine: EngineRecord, failed: Failed) -> None:
        kind = UserError if failed.user else EngineLostError if failed.lost else EngineFaultError
        error = kind(failed.message)
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_exception(error)
        else:
            if not failed.lost:  # the model was loaded before: what is missing now (memory, files) may be back later
                self.keeper.failed_to_load(engine, failed.message)
            self.rest.lost(engine, failed.message)

    def tell_names(self) -> None:
        """Update the served names: the model's, then its adapters'."""
        self._info = self.adapters.named(self.info, self.names)

    def _learn(self, ready: Ready) -> None:
        self._info = learn_model(self.names, ready)
        tokenizer = self._info.tokenizer
        self.admission = learn_admission(ready, tokenizer)
        self.picker.block_size = ready.facts.get("prefix_block", 0)
        self.deliveries = self._deliveries(tokenizer)
        if self.options.fair:
            self.queue.limit = max(1, self._info.max_rows * len(self.engines) * 5 // 4)

    def _note_fates(self, engine: EngineRecord, report: Report) -> None:
        """Note which requests the engine has begun, refused or failed, and how far it has read them."""
        safely = self.deliveries.safely
        safely("", self.picker.cached, engine.number, report.published, report.gone)
        for request_id in report.accepted:
            safely(request_id, self._answer, request_id, None)
        for refused in report.refused:
            safely(refused.request_id, self._refused, refused)
        for request_id, message in report.failed.items():
            safely(request_id, self._failed, request_id, message)
        for request_id, ago in report.started.items():
            safely(request_id, self._started, request_id, engine.heard - ago)
        for request_id, count in report.preempted.items():
            if request_id in self.open_requests:
                self.open_requests[request_id].timeline.preemptions = count
        for request_id, tokens in report.prefilled.items():
            safely(request_id, self._prefilled, request_id, engine.heard, tokens)

    def _started(self, request_id: str, now: float) -> None:
        entry = self.open_requests.get(request_id)
        if entry is not None and entry.timeline.started is None:
            entry.timeline.started = max(now, entry.timeline.arrival)

    def _prefilled(self, request_id: str, now: float, tokens: int) -> None:
        entry = self.open_requests.get(request_id)
        if entry is not None:
            self.picker.computed(entry.engine, request_id, tokens, len(entry.request.prompt_ids))
            if len(entry.timeline.prefill) < MAX_CHUNKS:
                entry.timeline.prefill.append((now, tokens))

    def _failed(self, request_id: str, message: str) -> None:
        entry = self.open_requests.get(request_id)
        if entry is not None:
            self._fail(entry, message, "error")

    def _answer(self, request_id: str, error: Exception | None) -> None:
        entry = self.open_requests.get(request_id)
        if entry is not None:
            entry.answer(error)

    def _refused(self, refused: Refused) -> None:
        entry = self.open_requests.get(refused.request_id)
        if entry is None:
            return
        if not entry.answer(refused.error()):
            self._fail(entry, f"{UNAVAILABLE}{refused.message}" if refused.busy else refused.message, "error")

    def _deliveries(self, tokenizer: Tokenizer | None) -> Deliveries:
        return Deliveries(tokenizer, lambda name, index: self._stop(name, index), lambda name: self._mistake(name))

    def _note(self, delta: TokenDelta) -> None:
        """Keep what the output has said, so that another engine can continue it."""
        entry = self.open_requests.get(delta.request_id)
        if entry is None:
            return
        entry.say(delta)
        self.picker.said(entry.engine, delta.request_id, len(delta.tokens))
        if self.trials.answered(delta.request_id):
            self.ended_well += 1
            self._unpark()

    def _stop(self, request_id: str, index: int) -> None:
        if request_id in self.open_requests:
            self._tell_end(self.open_requests[request_id], index)

    def _show(self, text: TextDelta) -> None:
        entry = self.open_requests.get(text.request_id)
        if entry is None:
            return
        entry.stream.put(text)
        if text.finish_reason is not None:
            self.ended_well += text.finish_reason in ("stop", "length")
            self._ended(entry, text.index)
        elif len(entry.stream) > MAX_BACKLOG:
            self._fail(entry, "the client reads more slowly than the server may wait for", "error")

    def _ended(self, entry: Open, index: int) -> None:
        entry.ended.add(index)
        if len(entry.ended) == entry.num_outputs:
            self._forget(entry)

    def _forget(self, entry: Open) -> None:
        self.open_requests.pop(entry.request.id, None)
        self.deliveries.drop(entry.request.id)
        if entry.request.adapter:
            self.adapters.let_go()
        if entry.engine >= 0:
            self.engines[entry.engine].requests.discard(entry.request.id)
            self.picker.done(entry.engine, entry.request.id)
        entry.timeline.ended = time.monotonic()
        owner = entry.stream.owner
        if entry.sent:
            self.queue.done(owner, entry.num_outputs)
        else:
            self.queue.drop(owner, entry.request.id, entry.request.priority)
        while (waiting := self.queue.next()) is not None:
            following = self.open_requests[waiting]
            following.sent = True
            self._try_again(following)
        trying = self.trials.engine >= 0
        self.trials.leave(entry.request.id, doubt=len(entry.ended) < entry.num_outputs)
        if trying:
            self._unpark()

    def _fail(self, entry: Open, error: str | None, reason: str) -> None:
        """End a request here and in its engine."""
        try:
            self._tell_end(entry)
        finally:
            self._end_stream(entry, error, reason)
            self._forget(entry)

    def _end_stream(self, entry: Open, error: str | None, reason: str) -> None:
        """Put a terminal delta for every output that has none."""
        for index in range(entry.num_outputs):
            if index not in entry.ended:
                entry.stream.put(TextDelta(request_id=entry.request.id, index=index, finish_reason=reason, error=error))
        missing = error is None or error.startswith(UNAVAILABLE)
        self._answer(entry.request.id, (EngineDeadError if missing else SequenceError)(error or reason))

    # ------------------------------------------------------------ sending

    def _dispatch(self, entry: Open) -> None:
        """Send a request to an engine, or park it while there is none for it."""
        request, stream = entry.request, entry.stream
        coming = [e.number for e in self.engines if not e.ready and e.trouble is None]
        ready = self.trials.engines([e.number for e in self.engines if e.ready], entry, coming)
        if not ready:
            return self.parked.append(request.id)
        present = [number for number in ready if self.engines[number].absence(self.options.watchdog_s) is None]
        able = present or ready
        asked = asked_of(request, stream.session, stream.owner)
        number = self.picker.pick_engine(able, asked, only=stream.rank if stream.rank in able else None)
        entry.engine = entry.timeline.engine = number
        engine = self.engines[number]
        engine.requests.add(request.id)
        if entry.deaths:
            request = entry.replayed()
        try:
            if engine.link is not None:
                engine.link.send(Add(request, entry.pooling, ack=entry.ack is not None))
        except Exception:
            log.exception("a request could not be sent")
            # not at once: the caller may be ending another request
            asyncio.get_running_loop().call_soon(self._failed, request.id, "it could not be sent")

    def _try_again(self, entry: Open) -> None:
        """The same for a request that waited: an exception ends it."""
        self.deliveries.safely(entry.request.id, self._dispatch, entry)

    def _tell_end(self, entry: Open, index: int | None = None) -> None:
        """Tell the request's engine to end it, or one of its outputs."""
        link = self.engines[entry.engine].link if entry.engine >= 0 else None
        try:
            if link is not None:
                link.send(Abort(entry.request.id, index))
        except Exception:
            log.exception("a command could not be sent")

    # ------------------------------------------------------------ death

    def _lost(self, engine: EngineRecord, reason: str) -> None:
        """An engine has died. Other engines, or its next life, continue its requests."""
        if self.loaded is not None and not self.loaded.done():
            if not engine.hung:
                self.loaded.set_exception(EngineLostError(f"the engine ended while loading ({reason})"))
            return
        self.rest.lost(engine, reason)
        self.deliveries.safely("", self.picker.forget, engine.number)
        known = (self.open_requests[i] for i in engine.requests if i in self.open_requests)
        orphans = sorted(known, key=lambda e: e.timeline.arrival)
        engine.requests.clear()
        for entry in orphans:
            entry.lost(engine.counted_at)
        guilty = [entry for entry in orphans if self.trials.died(entry, alone=len(orphans) == 1)]
        for entry in orphans if self.broken is None else ():
            self.deliveries.safely(entry.request.id, self._blame if entry in guilty else self._replay, entry)

    def _broken(self, reason: str) -> None:
        if self.loaded is not None and not self.loaded.done():
            self.loaded.set_exception(EngineDeadError(reason))
        self.end_all(reason)
        self.on_broken(reason)

    def _hopeless(self, reason: str) -> None:
        """No engine could be started for a long time. End the requests that wait for one."""
        if not any(engine.ready for engine in self.engines):
            self.end_all(reason)

    def _replay(self, entry: Open) -> None:
        self.replays += 1
        self._dispatch(entry)

    def _blame(self, entry: Open) -> None:
        """An engine died with only this request. If other requests were served well meanwhile, this one explains all
        those deaths."""
        if self.ended_well:
            self.keeper.deaths.pardon(entry.deaths)
            self.ended_well = 0
        self._fail(entry, REPEATEDLY, "error")
