"""LLM: offline use in a few lines. Owns: running an engine in the caller's thread, progress, ordered results.

The API is vLLM's: `generate`, `chat` and `embed` take one or many prompts and return a list in the same order.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tokenmill.core.config import make_config
from tokenmill.core.errors import ParameterError, SequenceError, UserError
from tokenmill.core.request import EmbeddingOutput, Request, RequestOutput, SamplingParams, TextDelta
from tokenmill.engine.build import Built, build_engine
from tokenmill.engine.driver import Driver
from tokenmill.engine.outputs import Accumulator
from tokenmill.engine.prompts import Prompt, PromptReader, check_salt, default_params, make_request

EXIT_S = 10.0
"""Seconds that an exit waits for a step of another thread."""


class LLM:
    """A loaded model: `LLM(model="demo")`; keyword arguments are the flags of `serve` with underscores.

    Calls from several threads run one after the other; AsyncLLM lets them share steps.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.built: Built = build_engine(make_config(model=model, **options))
        self.engine = self.built.engine
        self.driver = Driver(self.engine, self.built.tokenizer)
        self.reader = PromptReader(self.built.tokenizer, self.built.facts.max_model_len)
        self._names = itertools.count(1)
        self._closed = False
        self._ending = threading.Event()
        weakref.finalize(self, _end, self._ending, self.driver.lock)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; bad input raises before any work, failures of single prompts do not end others."""
        self._check_open()
        many = _as_list(prompts)
        params = self._params(sampling_params, len(many))
        if priority is not None and len(priority) != len(many):
            raise ParameterError(f"{len(many)} prompts but {len(priority)} priorities.", param="priority")
        requests = []
        for i, prompt in enumerate(many):
            text, ids, salt = self.reader.read(prompt, params[i])
            requests.append(self._request(text, ids, params[i], priority=priority[i] if priority else 0, salt=salt))
        return self._run_requests(requests, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of message dicts) or several; `template`: tools, chat_template, ..."""
        self._check_open()
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ParameterError(
                "messages must be a list of at least one message, or of conversations.", param="messages"
            )
        many = messages if isinstance(messages[0], (list, tuple)) else [messages]
        self.reader.check_options(template)
        salt = check_salt(cache_salt)
        params = self._params(sampling_params, len(many))
        requests = []
        for conversation, each in zip(many, params, strict=True):
            text, ids = self.reader.chat(conversation, each, **dict(template))
            requests.append(self._request(text, ids, self.reader.with_reasoning(text, each), salt=salt))
        return self._run_requests(requests, use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True, *, pooling: str = "last"
    ) -> list[EmbeddingOutput]:
        """Unit vectors: the last token's final hidden state, or the mean over the prompt."""
        self._check_open()
        requests = []
        for prompt in _as_list(prompts):
            text, ids, salt = self.reader.read(prompt)
            requests.append(self._request(text, ids, SamplingParams(max_tokens=1), salt=salt))
        found = []
        for place, done in enumerate(self._drive(requests, use_tqdm, pooling)):
            if done.pooled is None:
                raise SequenceError(f"Prompt {place} has no embedding: {done.outputs[0].stop_reason}")
            ids = done.request.prompt_ids
            found.append(EmbeddingOutput(request_id=done.request.id, prompt_token_ids=ids, embedding=done.pooled))
        return found

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.built.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json suggests."""
        return default_params(self.built.generation)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        with self.driver.alone():
            self.engine.scheduler.tables.cache.clear()
        return True

    def close(self) -> None:
        """Free the model; the object cannot be used afterwards."""
        self._closed = True
        self.reader.close()
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("This LLM is closed: make another one, or close it later.")

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, (list, tuple)) or not all(isinstance(p, SamplingParams) for p in given):
            raise ParameterError(
                "sampling_params must be a SamplingParams, or a list with one for each prompt.", param="sampling_params"
            )
        if len(given) != count:
            raise ParameterError(f"{count} prompts but {len(given)} sampling_params.", param="sampling_params")
        return list(given)

    def _request(self, text: str | None, ids: list[int], params: SamplingParams, **fields: Any) -> Request:
        return make_request(str(next(self._names)), text, ids, params, arrival=time.perf_counter(), **fields)

    def _run_requests(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        return [accumulator.output() for accumulator in self._drive(requests, use_tqdm, None)]

    def _drive(self, requests: list[Request], use_tqdm: bool, pooling: str | None) -> list[Accumulator]:
        """Add all, step until all have ended; other calls wait, programs that share the engine get on."""
        found = {request.id: Accumulator(request) for request in requests}
        driver = self.driver
        with driver.alone(), _progress(use_tqdm and len(requests) > 1) as progress:
            self._check_all(requests, pooling)
            task = progress.add_task("Generating", total=len(found))
            left = len(found)

            def hear(delta: TextDelta) -> None:
                nonlocal left
                accumulator = found[delta.request_id]
                accumulator.add(delta)
                if delta.finish_reason is not None and accumulator.finished:
                    left -= 1
                    progress.advance(task)

            try:
                for request in requests:
                    driver.add(request, hear, pooling)
                while left:
                    if self._ending.is_set():
                        raise SystemExit  # of this thread, silently
                    driver.step()
            finally:
                driver.leave(found if left else ())
        return list(found.values())

    def _check_all(self, requests: list[Request], pooling: str | None) -> None:
        """What is wrong with one of them is told before any work begins."""
        admission = self.engine.admission
        for place, request in enumerate(requests):
            if pooling is None:
                admission.check(request, place)
            else:
                admission.check_embedding(request, pooling)


def _end(ending: threading.Event, turn: Any) -> None:
    """At the interpreter's exit: a daemon thread that is inside native code when Python goes down ends the process."""
    ending.set()
    turn.acquire(timeout=EXIT_S)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt or several: a list of integers is one prompt, and so is what cannot be a list (to be refused)."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    many = list(prompts)
    return [many] if many and all(isinstance(p, int) for p in many) else many


def _progress(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=not shown,
        transient=False,
    )
