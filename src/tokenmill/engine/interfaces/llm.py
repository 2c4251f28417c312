"""LLM: offline use in a few lines. Owns: running an engine in the caller's thread, progress, ordered results.

The API is vLLM's: `generate`, `chat` and `embed` take one or many prompts and return a list in the same order.
Must not know: HTTP, how steps are planned.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenmill.core.config import make_config
from tokenmill.core.config_file import DEFAULT_MODEL, with_config_file
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.core.params import BeamSearchParams, LoRARequest, PoolingParams
from tokenmill.core.pooled import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from tokenmill.core.request import CompletionOutput, Request, RequestOutput, SamplingParams, TextDelta, check_integer
from tokenmill.engine.interfaces.hub_tokenizer import HubTokenizer
from tokenmill.engine.interfaces.llm_arguments import (
    LoraRequests,
    about,
    as_list,
    check_connector,
    check_others,
    no_such,
    one_each,
    template_alone,
    with_ids,
)
from tokenmill.engine.interfaces.llm_engine import LLMEngine
from tokenmill.engine.interfaces.outputs import Accumulator
from tokenmill.engine.interfaces.pooling import Pooler, as_tensor, pooling_params_of
from tokenmill.engine.interfaces.profiling import Profiler
from tokenmill.engine.interfaces.progress import progress_of
from tokenmill.engine.interfaces.prompts import Prompt, PromptReader, check_priority, check_salt, make_request
from tokenmill.engine.options.engine_args import EngineArgs
from tokenmill.engine.options.generation import default_params
from tokenmill.engine.running.build import Built, build_llm
from tokenmill.engine.running.gauges import AllGauges
from tokenmill.engine.running.metrics import Metric, read_metrics
from tokenmill.engine.running.sleep_desk import fall_asleep, wake
from tokenmill.engine.running.weights import Weights, WeightUpdates, runner_of
from tokenmill.engine.steps.driver import Driver, wait_for_last_step

_CUT = "truncate_prompt_tokens"
ABSENT = {
    "set_tokenizer": "give tokenizer= to the constructor",
    "preprocess_chat": "get_tokenizer().apply_chat_template() renders a chat",
    "enqueue": "llm_engine.add_request() and llm_engine.step() do it",
    "wait_for_completion": "call llm_engine.step() while llm_engine.has_unfinished_requests()",
    "init_weight_transfer_engine": "update_weights() takes tensors or a file; there are no ranks to connect",
}
"""Methods of vLLM's LLM that this class lacks, and what to use instead."""


class LLM:
    """A loaded model: `LLM(model="demo")`; keyword arguments are the flags of `serve` with underscores, and
    `config=FILE` names a YAML file of them.

    Calls from several threads run one after the other; AsyncLLM lets them share steps.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self.built: Built = build_llm(make_config(**with_config_file({"model": model, **options})))
        self.engine = self.built.engine
        self.driver = Driver(self.engine, self.built.tokenizer)
        self.reader = PromptReader(self.built.tokenizer, self.built.facts.max_model_len)
        self._by_hand = LLMEngine(self.built, self.driver, self.reader)
        self._names = itertools.count(1)
        self._weights = WeightUpdates(self.built)
        self._gauges = AllGauges(self.built)
        self._profiler = Profiler()
        self._closed = False
        self._ending = threading.Event()
        weakref.finalize(self, wait_for_last_step, self._ending, self.driver.lock)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """The model that these arguments describe."""
        return cls(**engine_args.given())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
        prompt_token_ids: Any = None,
        lora_request: LoraRequests = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt. Bad input raises before any work; if one prompt fails, the others go on."""
        self._check_open()
        check_others("generate", others)
        many = as_list(with_ids(prompts, prompt_token_ids))
        params = self._params(sampling_params, len(many))
        if priority is not None and not isinstance(priority, (list, tuple)):
            raise ParameterError("priority must be a list with a number for each prompt.", param="priority")
        if priority is not None and len(priority) != len(many):
            raise ParameterError(f"{len(many)} prompts but {len(priority)} priorities.", param="priority")
        loras = one_each(lora_request, len(many))
        return self._answers(self._requests(many, params, loras, priority), loras, use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoraRequests = None,
        *,
        cache_salt: str | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of message dicts) or several; `template`: tools, chat_template, ..."""
        self._check_open()
        template = template_alone(template)
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ParameterError(
                "messages must be a list of at least one message, or of conversations.", param="messages"
            )
        many = messages if isinstance(messages[0], (list, tuple)) else [messages]
        self.reader.check_options(template)
        salt = check_salt(cache_salt)
        params = self._params(sampling_params, len(many))
        loras = one_each(lora_request, len(many))
        adapters = self._adapters(loras)
        requests = []
        for i, conversation in enumerate(many):
            with about(i, len(many)):
                text, ids = self.reader.chat(conversation, params[i], **dict(template))
                each = self.reader.with_reasoning(text, params[i], conversation, template)
                requests.append(self._request(text, ids, each, salt=salt, adapter=adapters[i]))
        return self._answers(requests, loras, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoraRequests = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt. At most `concurrency_limit` prompts are searched at the
        same time."""
        if not isinstance(params, BeamSearchParams):
            raise ParameterError("beam_search needs BeamSearchParams(beam_width=..., max_tokens=...).", param="params")
        self._check_open()
        if concurrency_limit is not None:
            check_integer("concurrency_limit", concurrency_limit, 1, 2**31 - 1)
        many, sampling = as_list(prompts), params.as_sampling()
        loras = one_each(lora_request, len(many))
        requests = self._requests(many, [sampling] * len(many), loras)
        outputs = self._answers(requests, loras, use_tqdm, concurrency_limit)
        return [BeamSearchOutput(sequences=[self._beam(found, out) for out in found.outputs]) for found in outputs]

    # ------------------------------------------------------------ vectors, scores, labels

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        pooling: str | None = None,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoraRequests = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """A unit vector of each prompt: the last token's final hidden state, or the mean of all (pooling="mean");
        without `pooling`, as the model's files say."""
        check_others("embed", others)
        params = pooling_params_of(pooling_params, pooling=pooling, truncate_prompt_tokens=truncate_prompt_tokens)
        return self._embed(prompts, params, use_tqdm, lora_request)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        truncate_prompt_tokens: int | None = None,
        pooling_task: str = "embed",
        lora_request: LoraRequests = None,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """The same vectors as `embed`, as tensors in `outputs.data`."""
        check_others("encode", others)
        params = pooling_params_of(pooling_params, task=pooling_task, truncate_prompt_tokens=truncate_prompt_tokens)
        return [as_tensor(each) for each in self._embed(prompts, params, use_tqdm, lora_request)]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        method: str = "embedding",
        instruction: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        **more: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts match, one with all or pair by pair, as the server's /score says it: the cosine of their
        embeddings, or how likely the model says that the second answers the first (method="likelihood")."""
        params = pooling_params_of(more.pop("pooling_params", None), truncate_prompt_tokens=more.pop(_CUT, None))
        check_others("score", more)
        return self._pooler(use_tqdm, lora_request).score(data_1, data_2, params, method, instruction)

    def classify(
        self,
        prompts: Any,
        *,
        labels: Sequence[str] | None = None,
        instruction: str | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """How well each of `labels` fits each text: its share of the labels' likelihoods as answers of the language
        model."""
        check_others("classify", others)
        if labels is None:
            raise ParameterError(
                "models with a classification head are not built yet: give labels=[...], and the language model "
                "chooses among them.",
                param="labels",
            )
        return self._pooler(use_tqdm, lora_request).classify(prompts, labels, instruction)

    def reward(self, prompts: Any, /, **_: Any) -> list[PoolingRequestOutput]:
        """Refused: reward models need a head that is not implemented."""
        raise UserError(
            "models with a reward head are not built yet: score(query, answer, method='likelihood') asks the language "
            "model whether an answer is right."
        )

    # ------------------------------------------------------------ the engine

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, with the method names of Transformers' tokenizers; None if there is none."""
        inner, size = self.built.tokenizer, self.built.facts.vocab_size
        name, longest = self.built.config.model.model, self.built.context
        return None if inner is None else HubTokenizer(inner, self.reader.render, name, longest, size)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that generation_config.json suggests."""
        return default_params(self.built.generation)

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, to be stepped by hand: always the same object."""
        self._check_open()
        return self._by_hand

    def get_metrics(self) -> list[Metric]:
        """The engine's current numbers, under the names of the server's metrics."""
        self._check_open()
        with self.driver.alone():
            name = self.built.config.model.model
            return [one for i, stats in enumerate(self._gauges.read()) for one in read_metrics(stats, name, i)]

    def update_weights(self, weights: Weights) -> int:
        """Replace weights in place, from pairs of name and tensor, a dict of them, or a safetensors file or folder.

        Returns how many tensors were taken. Cached prefixes are forgotten; recorded steps stay. All tensors of a layer
        must come in one call, unless the rest of the layer is still as it was loaded. Between start_weight_update() and
        finish_weight_update() nothing is applied, so parts may come one by one."""
        self._check_open()
        with self.driver.alone():
            return self._weights.update(weights)

    def start_weight_update(self) -> None:
        """From now on only collect what update_weights() is given, until finish_weight_update()."""
        self._check_open()
        self._weights.start()

    def finish_weight_update(self) -> int:
        """Apply what was given since start_weight_update(); returns how many tensors were taken."""
        self._check_open()
        with self.driver.alone():
            return self._weights.finish()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with the only worker, or one of the worker's methods by name."""
        self._check_open()
        check_others("collective_rpc", {"timeout": timeout})
        worker = runner_of(self.built)
        if isinstance(method, str) and (method.startswith("_") or not callable(getattr(worker, method, None))):
            raise ParameterError(f"the worker has no method {method!r}: give a function that takes it.", param="method")
        call = functools.partial(method, worker) if callable(method) else getattr(worker, method)
        with self.driver.alone():
            return [call(*args, **(kwargs or {}))]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Return [func(model)]. Weights that it changes are not noticed: use update_weights() for that."""
        self._check_open()
        with self.driver.alone():
            return [func(runner_of(self.built).model)]

    def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Give the model's memory back (docs/sleep.md). mode: let open requests end first ("wait"), or end them
        ("abort")."""
        self._check_open()
        fall_asleep(self.built.sleep, self.driver, level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again: all of it, or only "weights" or "kv_cache"."""
        self._check_open()
        wake(self.built.sleep, self.driver, tags)

    @property
    def is_sleeping(self) -> bool:
        """Is any of the model's memory given back?"""
        return bool(self.built.sleep.asleep)

    def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of media."""

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many ranks the model is spread over; include_dp: in all engines."""
        parallel = self.built.config.parallel
        return parallel.ranks * (parallel.data_parallel_size if include_dp else 1)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what torch does from now on."""
        self._check_open()
        runner_of(self.built)  # elsewhere the model's work would be missing from the trace
        self._profiler.start(profile_prefix)

    def stop_profile(self) -> Path:
        """Write the recording; returns the trace's file, which browsers' tracing pages can read."""
        return self._profiler.stop()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. reset_running_requests: open requests are computed again, too."""
        self._check_open()
        check_connector(reset_connector)
        with self.driver.alone():
            self.engine.forget_prefixes(running=reset_running_requests)
        return True

    def __getattr__(self, name: str) -> Any:
        raise no_such("LLM", name, ABSENT)

    def close(self) -> None:
        """Free the model; the object cannot be used afterwards."""
        self._closed = True
        if self.driver.home.here:
            self._profiler.close()
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
        in_use, context = self.driver.deliveries.asked, self.built.context  # by ids that callers of llm_engine chose
        name = next(name for name in map(str, self._names) if name not in in_use)
        return make_request(name, text, ids, params, context=context, arrival=time.perf_counter(), **fields)

    def _requests(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        loras: Sequence[LoRARequest | None],
        priority: Sequence[int] | None = None,
    ) -> list[Request]:
        adapters, requests = self._adapters(loras), []
        for i, prompt in enumerate(prompts):
            with about(i, len(prompts)):
                text, ids, salt = self.reader.read(prompt, params[i])
                rank = check_priority(priority[i], self.built.config.schedule.scheduling_policy) if priority else 0
                requests.append(self._request(text, ids, params[i], priority=rank, salt=salt, adapter=adapters[i]))
        return requests

    def _answers(
        self, requests: list[Request], loras: list[LoRARequest | None], use_tqdm: Any, at_once: int | None = None
    ) -> list[RequestOutput]:
        """The outputs of all requests, of which at most `at_once` are open at the same time."""
        if at_once is not None:  # bad input is refused before any work
            with self.driver.alone():
                self._check_all(requests, None)
        done, step = list[Accumulator](), at_once or max(1, len(requests))
        for start in range(0, len(requests), step):
            done += self._drive(requests[start : start + step], use_tqdm)
        for each, lora in zip(done, loras, strict=True):
            each.lora_request = lora
        return [each.output() for each in done]

    def _embed(
        self, prompts: Any, params: PoolingParams, use_tqdm: bool | Callable[..., Any], lora_request: LoraRequests
    ) -> list[EmbeddingRequestOutput]:
        pooler, many = self._pooler(use_tqdm), as_list(prompts)
        return pooler.embed(many, params, self._adapters(one_each(lora_request, len(many))))

    def _pooler(self, use_tqdm: bool | Callable[..., Any], lora_request: LoRARequest | None = None) -> Pooler:
        self._check_open()
        if isinstance(lora_request, (list, tuple)):
            raise ParameterError("score() and classify() take one adapter for all texts.", param="lora_request")
        make = functools.partial(self._request, adapter=self._adapters([lora_request])[0])
        return Pooler(
            self.reader, self.built.context, make, lambda found, pooling: self._drive(found, use_tqdm, pooling)
        )

    def _adapters(self, loras: Sequence[LoRARequest | None]) -> list[int]:
        """The number of each prompt's adapter; reads the adapters' files."""
        with self.driver.alone():
            return [self.built.adapters.take(each) for each in loras]

    def _beam(self, found: RequestOutput, out: CompletionOutput) -> BeamSearchSequence:
        tokens, tokenizer = found.prompt_token_ids + out.token_ids, self.built.tokenizer
        return BeamSearchSequence(
            tokens=tokens,
            text=None if tokenizer is None else tokenizer.decode(tokens),
            cum_logprob=out.cumulative_logprob or 0.0,
            logprobs=out.logprobs or [],
            finish_reason=out.finish_reason,
            stop_reason=out.stop_reason,
        )

    def _drive(self, requests: list[Request], use_tqdm: Any, pooling: str | None = None) -> list[Accumulator]:
        """Add all requests and step until all have ended. Other calls wait; programs that share the engine go on."""
        found = {request.id: Accumulator(request) for request in requests}
        driver = self.driver
        with driver.alone(), progress_of(use_tqdm, len(found)) as advance:
            self._check_all(requests, pooling)
            left = len(found)

            def hear(delta: TextDelta) -> None:
                nonlocal left
                accumulator = found[delta.request_id]
                accumulator.add(delta)
                if delta.finish_reason is not None and accumulator.finished:
                    left -= 1
                    advance(1)

            try:
                tokens, in_turn = 0, not any(request.priority for request in requests)
                for request in requests:
                    driver.add(request, hear, pooling)
                    tokens += len(request.prompt_ids) if in_turn else 0
                    driver.begin(tokens)
                while left:
                    if self._ending.is_set():
                        raise SystemExit  # ends this thread, silently
                    driver.step()
                    driver.signals.let_in()
            finally:
                driver.leave(found if left else ())
        return list(found.values())

    def _check_all(self, requests: list[Request], pooling: str | None) -> None:
        """Raise the error of a bad request before any work begins."""
        admission = self.engine.admission
        for place, request in enumerate(requests):
            with about(place, len(requests)):
                admission.check(request, place, pooling)
