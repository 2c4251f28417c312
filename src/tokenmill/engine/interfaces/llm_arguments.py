"""What the methods of LLM are called with. Owns: one prompt or many, older ways to give token ids, and arguments of
vLLM's methods that are taken only if they ask for nothing. Also which of many requests an error is about.

Must not know: engines, what a prompt holds (prompts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tokenmill.core.errors import ParameterError, UserError, shown
from tokenmill.core.params import LoRARequest, refuse_prompt_adapter
from tokenmill.engine.interfaces.prompts import Prompt

LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None
FORMAT = "chat_template_content_format"
LOST = {
    "mm_processor_kwargs": "this engine reads text and token ids",
    "tokenization_kwargs": "truncate_prompt_tokens, of SamplingParams or PoolingParams, cuts prompts; token ids are "
    "taken as they are",
    "truncate_prompt_tokens": "SamplingParams and PoolingParams take it; texts with labels are read whole",
    "pooling_params": "embed(), encode() and score() make vectors, and nothing else does",
    "score_template": "score() takes an instruction=",
    "timeout": "the worker is called in this thread, where nothing can interrupt it",
    "arrival_time": "a request arrives when it is added",
    "reasoning_ended": "the prompt itself shows whether reasoning has ended",
    "guided_options_request": "give SamplingParams(structured_outputs=...)",
    "chat_template": "only chat() renders a template; score() and classify() take an instruction=",
    "chat_template_content_format": "it is auto, string or openai, and all are the same here",
    "trace_headers": "a server sends traces (--otlp-traces-endpoint)",
    "prompt_text": "the prompt itself may hold both: {'prompt': text, 'prompt_token_ids': ids}",
    "data_parallel_rank": "engines are picked by their load; a server takes X-data-parallel-rank",
    "stat_loggers": "the server's /metrics and LLM.get_metrics() have the engine's numbers",
}
"""Arguments of vLLM's methods that would have no effect, and why."""
PINS = "adapters in use keep their slots; a larger max_loras keeps more of them on the device"
_CONFIGS = ("model_config", "vllm_config", "cache_config", "parallel_config", "scheduler_config")
"""Attributes of vLLM's engines."""
_AROUND = frozenset(
    {
        *("usage_context", "enable_multiprocessing", "start_engine_loop"),
        *("enable_log_requests", "disable_log_requests", "disable_log_stats"),
    }
)
"""What vLLM's engines are made with that concerns its processes and logs."""


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """The prompts as a list. A list of integers is one prompt; so is anything but a list (refused later)."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    many = list(prompts)
    return [many] if many and all(isinstance(p, int) for p in many) else many


def with_ids(prompts: Any, ids: Any) -> Any:
    """The prompts of older programs, which give token ids besides the texts or instead of them."""
    if ids is None:
        return prompts
    many = isinstance(ids, (list, tuple)) and not (ids and isinstance(ids[0], int))
    rows = ids if many else [ids]
    texts = [None] * len(rows) if prompts is None else as_list(prompts)
    if len(texts) != len(rows):
        raise ParameterError(f"{len(texts)} prompts but {len(rows)} prompt_token_ids.", param="prompt_token_ids")
    return [{"prompt": text, "prompt_token_ids": row} for text, row in zip(texts, rows, strict=True)]


def one_each(given: LoraRequests, count: int) -> list[LoRARequest | None]:
    """Each prompt's adapter, from one adapter for all or a list."""
    many: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(many) != count:
        raise ParameterError(f"{count} prompts but {len(many)} adapters.", param="lora_request")
    return many


@contextmanager
def about(place: int, count: int) -> Iterator[None]:
    """Let an error say which of many requests it is about."""
    try:
        yield
    except UserError as error:
        if count > 1:
            error.add_note(f"It is about request {place} of {count}, counted from 0.")
        raise


def check_around(others: Mapping[str, Any]) -> None:
    """Accept what from_engine_args is given besides the engine's arguments, if it asks for nothing here."""
    check_others("from_engine_args", {name: value for name, value in others.items() if name not in _AROUND})


def check_others(verb: str, others: Mapping[str, Any]) -> None:
    """Accept vLLM's keyword arguments if they ask for nothing; refuse others by name."""
    for name, value in others.items():
        if name == "prompt_adapter_request":
            refuse_prompt_adapter(value, name)
        elif name not in LOST:
            raise ParameterError(f"{verb} has no argument {name!r}.", param=name)
        elif value is not None and value != {}:
            raise ParameterError(f"{name} = {shown(value)} cannot be used: {LOST[name]}.", param=name)


def template_alone(template: Mapping[str, Any]) -> dict[str, Any]:
    """What chat() hands to the chat template; vLLM's other arguments are accepted if they ask for nothing."""
    own = {name: value for name, value in template.items() if name in LOST and name != "chat_template"}
    if own.get(FORMAT) in ("auto", "string", "openai"):
        del own[FORMAT]
    check_others("chat", own)
    return {name: value for name, value in template.items() if name not in LOST or name == "chat_template"}


def check_connector(reset_connector: bool) -> None:
    """Refuse to reset what is not there."""
    if reset_connector:
        raise ParameterError(
            "reset_connector=True cannot be done: keys and values do not leave the engine.", param="reset_connector"
        )


def no_such(whose: str, name: str, absent: Mapping[str, str]) -> AttributeError:
    """The error about an attribute; absent: those of vLLM that are lacking, and what to use instead."""
    why = absent.get(name)
    if why is None and name.removeprefix("get_") in _CONFIGS:
        built = "service.built" if whose == "AsyncLLM" else "built"
        why = f"{built}.config holds the options, {built}.facts what was loaded (max_model_len, ...)"
    return AttributeError(f"{whose} has no {name!r}{f': {why}' if why else ''}")
