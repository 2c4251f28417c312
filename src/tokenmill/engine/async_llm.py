"""AsyncLLM: streaming use from Python. Owns: prompts in, growing RequestOutputs out, over a Service."""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from collections.abc import AsyncIterator
from typing import Any

from tokenmill.core.config import make_config
from tokenmill.core.request import EmbeddingOutput, Request, RequestOutput, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.outputs import Accumulator
from tokenmill.engine.prompts import Prompt, PromptReader, check_salt, default_params, make_request
from tokenmill.engine.service import Service


class AsyncLLM:
    """A loaded model for asyncio programs; keyword arguments as for LLM."""

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.service = Service(build_engine(make_config(model=model, **options)))
        self.reader = PromptReader(self.service.built.tokenizer, self.service.built.facts.max_model_len)
        # Dropped without close(), it must not leave a thread that holds the model.
        self._end = weakref.finalize(self, _close, self.reader, self.service)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, after every step that added to it; leaving the loop aborts the request."""
        text, ids, salt = await asyncio.to_thread(self.reader.read, prompt, sampling_params)
        request = self._request(text, ids, sampling_params, request_id, priority=priority, salt=salt)
        async for output in self._follow(request):
            yield output

    async def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        **template: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; `template`: tools, chat_template, ..."""
        self.reader.check_options(template)
        salt = check_salt(cache_salt)
        text, ids = await asyncio.to_thread(lambda: self.reader.chat(messages, sampling_params, **template))
        params = sampling_params or default_params(self.service.built.generation)
        params = self.reader.with_reasoning(text, params)
        async for output in self._follow(self._request(text, ids, params, request_id, salt=salt)):
            yield output

    async def embed(self, prompt: Prompt, *, pooling: str = "last") -> EmbeddingOutput:
        """One prompt's unit vector."""
        text, ids, salt = await asyncio.to_thread(self.reader.read, prompt)
        request = self._request(text, ids, SamplingParams(max_tokens=1), None, salt=salt)
        vector = await self.service.embed(request, pooling)
        return EmbeddingOutput(request_id=request.id, prompt_token_ids=ids, embedding=vector)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish_reason "abort"."""
        await self.service.abort(request_id)

    def close(self) -> None:
        """Free the model."""
        self._end()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _request(
        self, text: str | None, ids: list[int], params: SamplingParams | None, request_id: str | None, **fields: Any
    ) -> Request:
        params = params or default_params(self.service.built.generation)
        name = request_id or uuid.uuid4().hex
        return make_request(name, text, ids, params, arrival=time.perf_counter(), **fields)

    async def _follow(self, request: Request) -> AsyncIterator[RequestOutput]:
        accumulator = Accumulator(request)
        async for delta in self.service.generate(request):
            accumulator.add(delta)
            yield accumulator.output()


def _close(reader: PromptReader, service: Service) -> None:
    reader.close()
    service.close()
