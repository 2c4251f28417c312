"""What a person asks and what they get back. Owns: SamplingParams and its checks, Request, outputs, finish reasons.

Must not know: tokenizers, tensors, scheduling. Everything here is plain data that may cross a process border,
except `SamplingParams.logits_processors`, which are Python callables and therefore in-process only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import ParameterError, shown
from tokenmill.core.lora_request import LoRARequest
from tokenmill.core.samplers import (
    MOST_BREAKER_CHARS,
    MOST_BREAKERS,
    NOT_OF_BEAMS,
    SAMPLER_COUNTS,
    SAMPLER_RANGES,
    SamplerFields,
    read_samplers,
)
from tokenmill.core.spelled import SpelledOut
from tokenmill.core.step import RowLogprobs

MAX_N = 128
MAX_LOGPROBS = 1 << 20
"""More than any vocabulary has words. A server allows as many as `--max-logprobs` says."""
MAX_STOP = 16
MAX_STOP_CHARS = 256
SEED_BITS = 64

LogitsProcessor = Callable[..., Any]
"""(output_ids, logits) or (prompt_ids, output_ids, logits) -> logits, for one sequence; logits is a 1-D tensor."""


class ReasoningSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Where reasoning lies in an answer: it may begin with `open` and ends with `close`; without `open` the prompt has
    begun it. `tokens`: by text, the control tokens in these texts."""

    close: str
    open: str = ""
    tokens: dict[str, int] = {}


class SamplingParams(SamplerFields, kw_only=True, omit_defaults=True, metaclass=SpelledOut):
    """How to continue a prompt. Field names and meanings are vLLM's, or else llama.cpp's or text-generation-webui's.
    The defaults switch a feature off."""

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    dry_sequence_breakers: list[str] | None = None
    samplers: str | list[str] | None = None
    temperature_last: bool = False
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    structured_outputs: dict[str, Any] | None = None
    reasoning: ReasoningSpan | None = None
    thinking_token_budget: int | None = None
    logits_processors: list[LogitsProcessor] | None = None
    skip_reading_prefix_cache: bool = False
    output_kind: int = 0

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Make parameters from fields in which None means the default."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def check(self) -> None:
        """Raise a ParameterError that names an unusable field; for fields that were set after construction."""
        _check(self)

    def clone(self) -> SamplingParams:
        """An independent copy."""
        return copy.deepcopy(self)

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def greedy(self) -> bool:
        """Is always the most likely token taken?"""
        return self.temperature < 1e-5

    @property
    def num_sequences(self) -> int:
        """How many sequences are decoded at once: beams, best_of or n."""
        return max(self.n, self.best_of or 1)

    @property
    def multiplying(self) -> str:
        """The field that asks for so many sequences."""
        return "best_of" if (self.best_of or 1) > self.n else "n"

    @property
    def num_outputs(self) -> int:
        """How many outputs the engine reports: n of the beams, or all best_of candidates."""
        return self.n if self.use_beam_search else self.num_sequences


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(f"{name} must be a number, got {shown(value)}.", param=name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"{name} must be finite, got {value}.", param=name)
    if value < low or value > high or (open_low and value == low):
        raise ParameterError(
            f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {shown(value)}.", param=name
        )


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is no integer of this range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name} must be an integer, got {shown(value)}.", param=name)
    if not low <= value <= high:
        raise ParameterError(f"{name} must be in [{low}, {high}], got {shown(value)}.", param=name)


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(f"{name} must be true or false, got {shown(value)}.", param=name)


def _ids(name: str, value: object, most: int) -> None:
    if not isinstance(value, (list, tuple)) or len(value) > most:
        raise ParameterError(f"{name} must be a list of at most {most} token ids.", param=name)
    if not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31):
        return  # checking a whole vocabulary of them would delay others
    for item in value:
        check_integer(name, item, 0, 2**31 - 1)


def _strings(name: str, value: object, most: int, longest: int) -> None:
    if not isinstance(value, (list, tuple)) or len(value) > most:
        raise ParameterError(f"{name} must be a list of at most {most} strings.", param=name)
    for item in value:
        if not isinstance(item, str) or not item or len(item) > longest:
            raise ParameterError(f"{name} must hold non-empty strings of at most {longest} characters.", param=name)
        if any("\ud800" <= char <= "\udfff" for char in item):
            raise ParameterError(f"{name} holds half a character (a lone surrogate), which no text has.", param=name)


_RANGES: dict[str, tuple[float, float, bool]] = {
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, 100.0, True),
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, True),
    "length_penalty": (-100.0, 100.0, False),
    **SAMPLER_RANGES,
}
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "use_beam_search",
    "temperature_last",
    "skip_reading_prefix_cache",
)


def _check(p: SamplingParams) -> None:
    as_options = getattr(p.structured_outputs, "as_options", None)
    if as_options is not None:  # StructuredOutputsParams
        p.structured_outputs = as_options()
    for name in p.__struct_fields__:
        value = getattr(p, name)
        if type(value) is not float and getattr(value, "shape", None) == ():  # a scalar of numpy or torch
            setattr(p, name, value.item())
    for name, (low, high, open_low) in _RANGES.items():
        _number(name, getattr(p, name), low, high, open_low=open_low)
    for name in _FLAGS:
        _flag(name, getattr(p, name))
    _check_counts(p)
    if p.seed == -1:  # as in vLLM and llama.cpp: every request gets another one
        p.seed = None
    _check_lists(p)
    _check_contradictions(p)


def _check_counts(p: SamplingParams) -> None:
    check_integer("n", p.n, 1, MAX_N)
    if p.best_of is not None:
        check_integer("best_of", p.best_of, 1, MAX_N)
    check_integer("top_k", p.top_k, -1, 2**31 - 1)
    if p.max_tokens is not None:
        check_integer("max_tokens", p.max_tokens, 1, 2**31 - 1)
    check_integer("min_tokens", p.min_tokens, 0, 2**31 - 1)
    for name, (low, high) in SAMPLER_COUNTS.items():
        check_integer(name, getattr(p, name), low, high)
    if p.seed is not None:
        check_integer("seed", p.seed, -(2**63), 2**SEED_BITS - 1)
    if p.thinking_token_budget is not None:
        check_integer("thinking_token_budget", p.thinking_token_budget, -1, 2**31 - 1)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(p, name) is not None:
            check_integer(name, getattr(p, name), -1, MAX_LOGPROBS)
    if p.truncate_prompt_tokens is not None:
        check_integer("truncate_prompt_tokens", p.truncate_prompt_tokens, -1, 2**31 - 1)  # -1: as much as fits
        if p.truncate_prompt_tokens == 0:
            raise ParameterError("truncate_prompt_tokens must be -1 or at least 1.", param="truncate_prompt_tokens")
    check_integer("output_kind", p.output_kind, 0, 2)


def _check_lists(p: SamplingParams) -> None:
    if p.stop is not None:
        _strings("stop", p.stops, MAX_STOP, MAX_STOP_CHARS)
    if p.stop_token_ids is not None:
        _ids("stop_token_ids", p.stop_token_ids, 256)
    if p.bad_words is not None:
        _strings("bad_words", p.bad_words, 1024, MAX_STOP_CHARS)
    if p.reasoning is not None and not isinstance(p.reasoning, ReasoningSpan):
        raise ParameterError(f"reasoning must be a ReasoningSpan, got {shown(p.reasoning)}.", param="reasoning")
    if p.dry_sequence_breakers is not None:
        _strings("dry_sequence_breakers", p.dry_sequence_breakers, MOST_BREAKERS, MOST_BREAKER_CHARS)
    if p.samplers is not None:
        read_samplers(p.samplers)
    if p.allowed_token_ids is not None:
        _ids("allowed_token_ids", p.allowed_token_ids, 1 << 20)
        if not p.allowed_token_ids:
            raise ParameterError("allowed_token_ids is empty: no token could be chosen.", param="allowed_token_ids")
    if p.logit_bias is not None:
        if not isinstance(p.logit_bias, Mapping) or len(p.logit_bias) > 4096:
            raise ParameterError("logit_bias must map at most 4096 token ids to numbers.", param="logit_bias")
        for token, bias in p.logit_bias.items():
            if isinstance(token, str):
                raise ParameterError(f"logit_bias takes token ids as integers, got {shown(token)}.", param="logit_bias")
            check_integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)
    if p.logits_processors is not None:
        if not isinstance(p.logits_processors, Sequence) or not all(callable(f) for f in p.logits_processors):
            raise ParameterError("logits_processors must be a list of callables.", param="logits_processors")


def _check_contradictions(p: SamplingParams) -> None:
    if p.best_of is not None and p.best_of < p.n:
        raise ParameterError(f"best_of ({p.best_of}) must be at least n ({p.n}).", param="best_of")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ParameterError(
            f"min_tokens ({p.min_tokens}) is larger than max_tokens ({p.max_tokens}).", param="min_tokens"
        )
    if p.stops and not p.detokenize:
        raise ParameterError("stop strings need detokenize=True; use stop_token_ids instead.", param="stop")
    if not isinstance(p.early_stopping, bool) and not (
        isinstance(p.early_stopping, str) and p.early_stopping == "never"
    ):
        raise ParameterError("early_stopping must be true, false or 'never'.", param="early_stopping")
    if p.use_beam_search:
        if p.temperature not in (0.0, 1.0) or p.top_p != 1.0 or p.top_k not in (0, -1) or p.min_p or p.typical_p != 1.0:
            raise ParameterError(
                "beam search takes no sampling parameters: leave out temperature, top_p, top_k, min_p and typical_p.",
                param="use_beam_search",
            )
        for name, neutral in NOT_OF_BEAMS.items():
            if getattr(p, name) > neutral:
                raise ParameterError(f"beam search does not sample: leave out {name}.", param="use_beam_search")
        return
    for name in ("length_penalty", "early_stopping"):
        if getattr(p, name) != (1.0 if name == "length_penalty" else False):
            raise ParameterError(f"{name} ranks beams: it needs use_beam_search=True.", param=name)
    if p.greedy and p.num_sequences > 1:
        name = p.multiplying
        raise ParameterError(
            f"{name} = {p.num_sequences} greedy samples would all be equal: set temperature > 0 or {name} = 1.",
            param=name,
        )


class Request(msgspec.Struct, kw_only=True):
    """One accepted prompt with its parameters; the engine checks `prompt_ids` against the vocabulary.

    A replayed request carries the output of an engine that died: `emitted[i]` are the tokens of output i, `ended` the
    outputs that are complete, `mus` mirostat's states behind them. The border between prompt and output stays where it
    was. `prompt_keys`: the keys of the prompt's tokens in the prefix cache, if they are not the ids: all placeholders
    of a picture have the same id, but each stands for another part of it. `scored_from`: the first prompt token whose
    log-probability is reported; tokens before it may come from the cache. `reached`: how many of the prompt's tokens an
    earlier engine has counted. `again`: an earlier engine has accepted it, so it is not refused because others wait.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    prompt_keys: list[int] | None = None
    priority: int = 0
    arrival: float = 0.0
    salt: str = ""
    adapter: int = 0
    seed: int = 0
    emitted: list[list[int]] = []
    ended: list[int] = []
    mus: list[float | None] = []
    scored_from: int = 0
    reached: int = 0
    again: bool = False


class TokenLogprob(msgspec.Struct, gc=False):
    """Log-probability and rank (1 = most likely) of one candidate token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class TokenDelta(msgspec.Struct, gc=False):
    """What one commit added to one sequence. `finish` is set exactly once per sequence, on its last delta. `drafted`,
    `accepted`: how many drafts the step tried, and how many were right. `saved`: an estimate of the seconds that drafts
    have saved."""

    request_id: str
    index: int
    tokens: list[int]
    logprobs: list[RowLogprobs] | None = None
    finish: str | None = None
    stop_token: int | None = None
    error: str | None = None
    prompt_logprobs: list[RowLogprobs] | None = None
    cached: int = 0
    score: float | None = None
    pooled: list[float] | None = None
    mu: float | None = None
    drafted: int = 0
    accepted: int = 0
    saved: float = 0.0


class ScoredRows:
    """Log-probabilities of a part of a prompt, as the engine gave them. Iterating makes them into objects. A long
    prompt has very many, so code that must not wait leaves this to another thread."""

    __slots__ = ("_read", "rows")

    def __init__(self, rows: list[RowLogprobs], read: Callable[[RowLogprobs], dict[int, TokenLogprob]]) -> None:
        self.rows = rows
        self._read = read

    def __iter__(self) -> Iterator[dict[int, TokenLogprob]]:
        return map(self._read, self.rows)

    @property
    def count(self) -> int:
        """How many log-probabilities there are."""
        return sum(len(row.ids) for row in self.rows)


class TextDelta(msgspec.Struct, kw_only=True):
    """What one step added to one output of a request, as text. `finish_reason` is set on its last delta only. `score`:
    the sum of log-probabilities of all its tokens so far, where candidates are ranked by it."""

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, TokenLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prompt_logprobs: ScoredRows | None = None
    num_cached_tokens: int = 0
    score: float | None = None
    pooled: list[float] | None = None
    drafted: int = 0
    accepted: int = 0
    saved: float = 0.0


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, TokenLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Has it ended?"""
        return self.finish_reason is not None


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Host clock readings of one request, in seconds of a monotonic clock."""

    arrival: float = 0.0
    first_token: float | None = None
    last_token: float | None = None
    num_cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_saved_s: float = 0.0
    """An estimate of the time that drafts have saved in all outputs together; below zero: they have cost time."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """A prompt with its continuations, as `LLM.generate` returns it; streaming yields growing copies."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
