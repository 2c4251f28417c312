"""An engine that a program steps by hand, as vLLM's LLMEngine. Owns: requests by id, and the outputs of each step.

Must not know: batches of prompts, threads, HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from tokenmill.core.errors import IdInUseError
from tokenmill.core.params import LoRARequest, RequestOutputKind
from tokenmill.core.request import RequestOutput, SamplingParams, TextDelta
from tokenmill.engine.interfaces.llm_arguments import PINS, check_around, check_others, no_such
from tokenmill.engine.interfaces.outputs import Accumulator
from tokenmill.engine.interfaces.prompts import Prompt, PromptReader, check_priority, make_request
from tokenmill.engine.options.engine_args import EngineArgs
from tokenmill.engine.options.generation import default_params
from tokenmill.engine.running.build import Built, build_llm
from tokenmill.engine.steps.driver import Driver

_ABSENT = {
    "pin_lora": PINS,
    **dict.fromkeys(
        ("reset_prefix_cache", "sleep", "wake_up", "is_sleeping", "collective_rpc", "apply_model", "start_profile",
         "stop_profile", "get_metrics", "get_tokenizer", "tokenizer"),
        "LLM has it, and LLM(...).llm_engine is its engine",
    ),
}  # fmt: skip


class LLMEngine:
    """add_request(), then step() while has_unfinished_requests()."""

    def __init__(self, built: Built, driver: Driver, reader: PromptReader) -> None:
        self.built, self.driver, self.reader = built, driver, reader
        self.open: dict[str, Accumulator] = {}
        self._new: dict[Accumulator, list[TextDelta]] = {}
        """What has been said since the last step, to each request that was told anything."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> LLMEngine:
        """A loaded model; `close()` frees it."""
        check_around(others)
        built = build_llm(engine_args.config())
        return cls(built, Driver(built.engine, built.tokenizer), PromptReader(built.tokenizer, built.context))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Accept a request, or raise a UserError that says why not; returns its id. The arguments and their order are
        vLLM's."""
        check_others("add_request", {"arrival_time": arrival_time, **others})
        text, ids, salt = self.reader.read(prompt, params)
        request = make_request(
            request_id,
            text,
            ids,
            params or default_params(self.built.generation),
            context=self.built.context,
            arrival=time.perf_counter(),
            priority=check_priority(priority, self.built.config.schedule.scheduling_policy),
            salt=salt,
            adapter=self._adapter(lora_request),
        )
        if request_id in self.open:  # its last output may not have been returned yet
            raise IdInUseError(request_id)
        accumulator = Accumulator(request, lora_request)

        def hear(delta: TextDelta) -> None:
            accumulator.add(delta)
            self._new.setdefault(accumulator, []).append(delta)

        self.driver.add(request, hear)
        self.open[request_id] = accumulator
        return request_id

    def step(self) -> list[RequestOutput]:
        """Make one step; returns the output so far of every request that got new tokens, or what its `output_kind`
        asks for."""
        self.driver.step()
        new, self._new = self._new, {}
        told = []
        for accumulator, deltas in new.items():
            if accumulator.finished:
                self.open.pop(accumulator.request.id, None)
            if accumulator.kind == RequestOutputKind.DELTA:
                told.append(accumulator.news(deltas))
            elif accumulator.kind == RequestOutputKind.CUMULATIVE or accumulator.finished:
                told.append(accumulator.output())
        return told

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests that nobody waits for any more."""
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.driver.leave([name for name in names if self.open.pop(name, None) is not None])

    def has_unfinished_requests(self) -> bool:
        """Is any request open?"""
        return bool(self.open)

    def get_num_unfinished_requests(self) -> int:
        """How many requests are open."""
        return len(self.open)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, so that its first request need not wait."""
        with self.driver.alone():
            return bool(self.built.adapters.take(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, once no request uses it; False: there was none."""
        with self.driver.alone():
            return self.built.adapters.remove_given(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of all adapters."""
        return self.built.adapters.list_given()

    def _adapter(self, lora_request: LoRARequest | None) -> int:
        with self.driver.alone():
            return self.built.adapters.take(lora_request)

    def __getattr__(self, name: str) -> Any:
        raise no_such("LLMEngine", name, _ABSENT)

    def close(self) -> None:
        """Free the model."""
        self.reader.close()
        self.built.engine.close()
