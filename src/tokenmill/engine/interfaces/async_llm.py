"""AsyncLLM: streaming use from Python. Owns: prompts in, growing RequestOutputs out, and which of several engines
answers a request. Must not know: HTTP, how an engine is driven.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from tokenmill.core.config import make_config
from tokenmill.core.config_file import DEFAULT_MODEL, with_config_file
from tokenmill.core.errors import EngineDeadError, IdInUseError, SequenceError
from tokenmill.core.params import LoRARequest, PoolingParams, RequestOutputKind
from tokenmill.core.pooled import AS_STATED, EmbeddingOutput, EmbeddingRequestOutput, PoolingRequestOutput
from tokenmill.core.request import Request, RequestOutput, SamplingParams, TextDelta
from tokenmill.core.sleeping import check_level, check_mode
from tokenmill.engine.interfaces.hub_tokenizer import HubTokenizer
from tokenmill.engine.interfaces.llm_arguments import (
    PINS,
    check_around,
    check_connector,
    check_others,
    no_such,
    template_alone,
)
from tokenmill.engine.interfaces.outputs import Accumulator
from tokenmill.engine.interfaces.pooling import as_tensor, pooling_params_of, sampling_of
from tokenmill.engine.interfaces.prompts import Prompt, PromptReader, check_priority, check_salt, make_request
from tokenmill.engine.interfaces.scores import shorten
from tokenmill.engine.options.engine_args import EngineArgs
from tokenmill.engine.options.generation import default_params
from tokenmill.engine.running.crew import Crew
from tokenmill.engine.running.picking import EnginePicker, asked_of
from tokenmill.engine.running.said import REPEATEDLY
from tokenmill.engine.running.service import Caller, OrphanedError, Service, ends_of
from tokenmill.engine.running.trials import Trials
from tokenmill.engine.running.weights import Weights, WeightUpdates
from tokenmill.engine.running.wire import Add

ABSENT = {
    "pin_lora": PINS,
    **dict.fromkeys(
        ("pause_generation", "resume_generation", "is_paused", "wait_for_requests_to_drain"),
        "sleep() waits for open requests or ends them, and wake_up() takes new ones",
    ),
    **dict.fromkeys(("collective_rpc", "start_profile", "stop_profile"), "LLM has it"),
    "do_log_stats": "the server's /metrics and LLM.get_metrics() have the engine's numbers",
    "scale_elastic_ep": "the number of engines is data_parallel_size, from the start",
}
"""Methods of vLLM's AsyncLLM that this class lacks, and what to use instead."""
LOOK_S = 0.01
"""How often a model that is about to sleep checks whether its requests have ended."""


class AsyncLLM:
    """A loaded model for asyncio programs; keyword arguments as for LLM."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        config = make_config(**with_config_file({"model": model, **options}))
        self.crew = Crew(config)
        self.services = self.crew.services
        self.service = self.services[0]
        self.picker = EnginePicker(self.service.built.prefix_block) if len(self.services) > 1 else None
        self.routed = list(self.services)
        """The services that the picker knows of."""
        self.owners: dict[str, int] = {}
        self.trials = Trials(lambda: self.owners)
        self.ended_well = 0
        """Requests since one of them was found to be what engines died of."""
        self.waiting: list[str] = []
        """The names of requests that wait until any engine has loaded again; "" for the adapter of one."""
        self._weights = WeightUpdates(self.service.built)
        self.reader = PromptReader(self.service.built.tokenizer, self.service.built.facts.max_model_len)
        # If the object is dropped without close(), no thread may keep the model.
        self._end = weakref.finalize(self, _close, self.reader, self.crew)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> AsyncLLM:
        """The model that these arguments describe."""
        check_around(others)
        return cls(**engine_args.given())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output so far after every step that added to it, or what `output_kind` asks for. Leaving the loop
        aborts the request."""
        check_others("generate", others)
        check_priority(priority, self.service.built.config.schedule.scheduling_policy)
        text, ids, salt = await asyncio.to_thread(self.reader.read, prompt, sampling_params)
        adapter = await self._adapter(lora_request)
        request = self._request(text, ids, sampling_params, request_id, priority=priority, salt=salt, adapter=adapter)
        async for output in self._follow(request, lora_request):
            yield output

    async def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; `template`: tools, chat_template, ..."""
        template = template_alone(template)
        self.reader.check_options(template)
        salt = check_salt(cache_salt)
        text, ids = await asyncio.to_thread(lambda: self.reader.chat(messages, sampling_params, **template))
        params = sampling_params or default_params(self.service.built.generation)
        params = self.reader.with_reasoning(text, params, messages, template)
        adapter = await self._adapter(lora_request)
        request = self._request(text, ids, params, request_id, salt=salt, adapter=adapter)
        async for output in self._follow(request, lora_request):
            yield output

    async def embed(
        self, prompt: Prompt, *, pooling: str | None = None, lora_request: LoRARequest | None = None
    ) -> EmbeddingRequestOutput:
        """One prompt's unit vector."""
        return await self._vector(prompt, pooling_params_of(None, pooling=pooling), None, 0, lora_request)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
        **others: Any,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """The same vector as a tensor in `outputs.data`; it is all that is yielded."""
        check_others("encode", others)
        params = pooling_params_of(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        yield as_tensor(await self._vector(prompt, params, request_id, priority, lora_request))

    async def _vector(
        self, prompt: Prompt, params: PoolingParams, name: str | None, priority: int, lora_request: LoRARequest | None
    ) -> EmbeddingRequestOutput:
        check_priority(priority, self.service.built.config.schedule.scheduling_policy)
        sampling = sampling_of(params, self.service.built.context)
        text, ids, salt = await asyncio.to_thread(self.reader.read, prompt, sampling)
        adapter = await self._adapter(lora_request)
        request = self._request(text, ids, sampling, name, priority=priority, salt=salt, adapter=adapter)
        async for delta in self._deltas(request, AS_STATED if params.pooling is None else params.pooling):
            if delta.error is not None:
                raise (SequenceError if self.alive[0].dead is None else EngineDeadError)(delta.error)
            if delta.pooled is not None:
                outputs = EmbeddingOutput(embedding=shorten(delta.pooled, params.dimensions))
                return EmbeddingRequestOutput(
                    request_id=request.id, prompt_token_ids=request.prompt_ids, outputs=outputs
                )
        raise EngineDeadError("the request was aborted")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several; an iterator ends with finish_reason "abort"."""
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        self.waiting = [name for name in self.waiting if name not in names]
        for name in names & self.owners.keys():
            await self.services[self.owners[name]].abort(name)

    async def get_tokenizer(self) -> HubTokenizer | None:
        """The model's tokenizer, with the method names of Transformers' tokenizers; None if there is none."""
        built = self.service.built
        if built.tokenizer is None:
            return None
        return HubTokenizer(
            built.tokenizer, self.reader.render, built.config.model.model, built.context, built.facts.vocab_size
        )

    @property
    def alive(self) -> list[Service]:
        """The engines that have not died; if all have, the first, which says so."""
        return self.crew.alive

    async def check_health(self) -> None:
        """Raises EngineDeadError while an engine is dead; others go on."""
        for service in self.services:
            if service.dead is not None:
                raise EngineDeadError(self.crew.successors.explain(service.dead))

    @property
    def errored(self) -> bool:
        """Have all engines died, so that none takes a request and none is to come?"""
        return not self._may_go_on

    @property
    def is_running(self) -> bool:
        """The opposite."""
        return self._may_go_on

    is_stopped = errored

    @property
    def dead_error(self) -> BaseException:
        """What requests are told then."""
        dead = self.alive[0].dead
        return EngineDeadError("the engine is alive" if dead is None else self.crew.successors.explain(dead))

    async def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of media."""

    def __getattr__(self, name: str) -> Any:
        raise no_such("AsyncLLM", name, ABSENT)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. reset_running_requests: open requests are computed again, too."""
        check_connector(reset_connector)
        await self._tell(lambda service: service.engine.forget_prefixes(running=reset_running_requests))
        return True

    async def update_weights(self, weights: Weights) -> int:
        """Replace weights in place, while no request is open: see LLM.update_weights."""
        return await self.service.call(functools.partial(self._weights.update, weights))

    async def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Give the model's memory back (see LLM.sleep). Open requests end first, or at once (mode="abort"); new ones
        are refused."""
        check_level(level)
        check_mode(mode)
        for service in self.services:
            service.built.sleep.closing = True
        try:
            for name in [*self.owners, *filter(None, self.waiting)] if mode == "abort" else ():
                await self.abort(name)
            await self._quiet()
            self.crew.successors.rest()
            await self._quiet()  # one that has loaded sleeps with the others
            for service in self.alive:
                await _unless_dead(service, functools.partial(service.built.sleep.sleep, level))
            if self.alive[0].dead is not None:
                raise self.dead_error
        except BaseException:  # all engines sleep, or none
            await self._wake_all(None)
            raise
        finally:
            for service in self.services:
                service.built.sleep.closing = False

    async def _quiet(self) -> None:
        """Wait until no request is open. Engines that load meanwhile refuse new ones, too, once none waits for them."""
        while True:
            arriving = self.crew.successors.arriving  # before those that have come are told
            for service in self.services if not self.waiting else ():
                service.built.sleep.closing = True
            if not (arriving or self.waiting or any(service.has_work for service in self.services)):
                return
            await asyncio.sleep(LOOK_S)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again: all of it, or only "weights" or "kv_cache"."""
        await self._wake_all(tags)

    async def _wake_all(self, tags: list[str] | None) -> None:
        """Wake the engines, and load those that have died meanwhile, or die now."""
        for service in [service for service in self.services if service.dead is None]:
            await _unless_dead(service, functools.partial(service.built.sleep.wake, tags))
        if not any(service.built.sleep.asleep for service in self.services if service.dead is None):
            self.crew.successors.rise()
        if self.errored:
            raise self.dead_error

    async def is_sleeping(self) -> bool:
        """Is any of the model's memory given back?"""
        living = [service for service in self.services if service.dead is None]
        return self.crew.successors.resting or any(service.built.sleep.asleep for service in living)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Add an adapter by name and files; it is read while steps go on."""
        return bool(await self._adapter(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, once no request uses it; False: there was none."""
        return any(await self._tell(lambda service: service.built.adapters.remove_given(lora_id)))

    async def list_loras(self) -> set[int]:
        """The numbers of all adapters."""
        found: list[set[int]] = await self._tell(lambda service: service.built.adapters.list_given())
        return found[0]

    @property
    def first_adapter(self) -> LoRARequest | None:
        """The first of lora_modules, for verbs that have no way to name an adapter."""
        entry = next(iter(self.service.built.adapters.names.values()), None)
        return None if entry is None else LoRARequest(entry.name, entry.number, entry.path)

    async def _adapter(self, lora_request: LoRARequest | None) -> int:
        """The number of an adapter; the engine reads it before the request begins."""
        if lora_request is None:
            return 0
        number: int | None = None

        def note(service: Service) -> None:
            nonlocal number
            adapters = service.built.adapters
            number = adapters.note(adapters.checked(lora_request), number)

        await self._tell(note)
        return number or 0

    async def _tell(self, ask: Callable[[Service], Any]) -> list[Any]:
        """Ask the engines, each in its thread, and wait if none is there and one will come. One that dies meanwhile is
        left out: its successor follows the others."""
        while True:
            await self._engine()
            found = []
            for service in self.alive:
                try:
                    found.append(await service.call(functools.partial(ask, service)))
                except EngineDeadError:
                    if not self._may_go_on:
                        raise self.dead_error from None
            if found:
                return found

    def close(self) -> None:
        """Free the model."""
        self._end()

    shutdown = close

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _request(
        self, text: str | None, ids: list[int], params: SamplingParams | None, request_id: str | None, **fields: Any
    ) -> Request:
        params = params or default_params(self.service.built.generation)
        name = request_id or uuid.uuid4().hex
        context = self.service.built.context
        return make_request(name, text, ids, params, context=context, arrival=time.perf_counter(), **fields)

    async def _follow(self, request: Request, lora_request: LoRARequest | None = None) -> AsyncIterator[RequestOutput]:
        accumulator = Accumulator(request, lora_request)
        kind = accumulator.kind
        async with contextlib.aclosing(self._deltas(request)) as deltas:
            async for delta in deltas:
                accumulator.add(delta)
                if kind == RequestOutputKind.DELTA:
                    yield accumulator.news([delta])
                elif kind == RequestOutputKind.CUMULATIVE or accumulator.finished:
                    yield accumulator.output()

    async def _deltas(self, request: Request, pooling: str | None = None) -> AsyncGenerator[TextDelta]:
        """What is said to the request; if its engine dies, another one goes on."""
        if request.id in self.owners or request.id in self.waiting:
            raise IdInUseError(request.id)
        lost: Caller | None = None
        try:
            while True:
                if not await self._engine(request.id, lost):
                    for i in sorted(lost.left) if lost is not None else range(Add(request, pooling).num_outputs):
                        yield TextDelta(request_id=request.id, index=i, finish_reason="abort")
                    return
                try:
                    async with contextlib.aclosing(self._said(request, pooling, lost)) as deltas:
                        async for delta in deltas:
                            yield delta
                    self.ended_well += 1
                    return
                except OrphanedError as orphaned:
                    lost = orphaned.caller
                    guilty = self.trials.died(lost.said, alone=orphaned.alone)
                    if guilty and self.ended_well:  # it explains its deaths
                        self.crew.successors.deaths.pardon(lost.said.deaths)
                        self.ended_well = 0
                    if guilty or not self._may_go_on:
                        reason = REPEATEDLY if guilty else self.crew.successors.explain(orphaned.reason)
                        for delta in ends_of(request.id, lost, reason):
                            yield delta
                        return
                except EngineDeadError:  # just now, before it got the request
                    if not self._may_go_on:
                        raise self.dead_error from None
        finally:
            self.trials.leave(request.id)

    async def _said(self, request: Request, pooling: str | None, lost: Caller | None) -> AsyncGenerator[TextDelta]:
        """The same from one engine."""
        with self._owner(request, lost) as service:
            async with contextlib.aclosing(service.generate(request, pooling, lost)) as deltas:
                async for delta in deltas:
                    if self.picker is not None:
                        self.picker.answered(self.owners[request.id], request.id, len(delta.token_ids))
                        self.trials.answered(request.id)
                    yield delta

    @property
    def _may_go_on(self) -> bool:
        """Is there an engine, or will one come?"""
        return self.alive[0].dead is None or self.crew.must_wait

    async def _engine(self, name: str = "", lost: Caller | None = None) -> bool:
        """Wait while there is no engine for the request and one will come. False: it was aborted meanwhile."""
        self.waiting.append(name)
        try:
            while name in self.waiting and (self.crew.must_wait or (name and not self._able(lost))):
                await asyncio.sleep(LOOK_S)
            return name in self.waiting
        finally:
            with contextlib.suppress(ValueError):
                self.waiting.remove(name)

    def _able(self, lost: Caller | None) -> Sequence[int]:
        """The numbers of the engines that may have a request now."""
        living = [number for number, service in enumerate(self.services) if service.dead is None] or [0]
        found = self.trials.engines(living, None if lost is None else lost.said)
        return found or ([] if len(living) > 1 or self.crew.successors.expected else living)

    @contextlib.contextmanager
    def _owner(self, request: Request, lost: Caller | None) -> Iterator[Service]:
        """Choose the engine for this request; it counts as that engine's while the context is open."""
        number = 0
        if self.picker is not None:
            for each, service in enumerate(self.services):
                if service is not self.routed[each]:
                    self.routed[each] = service
                    self.picker.forget(each)
                while service.cached:
                    self.picker.cached(each, *service.cached.popleft())
            number = self.picker.pick_engine(self._able(lost) or [0], asked_of(request))
        self.owners[request.id] = number
        try:
            yield self.services[number]
        finally:
            del self.owners[request.id]
            if self.picker is not None:
                self.picker.done(number, request.id)


async def _unless_dead(service: Service, sleep_or_wake: Callable[[], Any]) -> None:
    """Have an engine sleep or wake. One that dies has given its memory back, and another one is loaded in its place."""
    try:
        await service.call(sleep_or_wake)
    except EngineDeadError:
        while service.dead is None:  # its thread looks after ranks between steps
            await asyncio.sleep(LOOK_S)


def _close(reader: PromptReader, crew: Crew) -> None:
    reader.close()
    crew.close()
