"""What may enter. Owns: checking a request against model, pool and limits, and turning it into a SequenceGroup.

Must not know: tensors, HTTP. Every mistake that a person can make in a request is refused here, before any work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from tokenmill.core.constraint import Constraint, ConstraintCompiler
from tokenmill.core.errors import BusyError, ContextError, ParameterError
from tokenmill.core.pooled import AS_STATED, Vectors
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.samplers import EDITS, SAMPLER_FIELDS, USUAL_BREAKERS, order_of, read_samplers
from tokenmill.core.sequence import Search, SequenceGroup
from tokenmill.core.step import RowSampling
from tokenmill.scheduler.search import BeamSearch, Sampling
from tokenmill.structured.sheltered import Sheltered

Encode = Callable[[str], list[int]]
WORD = 64
"""How many ids can be checked in the time that it takes to tokenise one bad word."""


def work_of(request: Request) -> int:
    """The work of checking a request, in units of one token id."""
    params = request.params
    ids = (request.prompt_ids, params.allowed_token_ids, params.logit_bias, params.stop_token_ids)
    return sum(len(each) for each in ids if each is not None) + WORD * len(params.bad_words or ())


def needs_head(request: Request, text: bool) -> None:
    """The `check_engine` of a model without a head: refuses requests for text."""
    if text:
        raise ParameterError(
            "This model has no head for tokens (its folder holds the layers alone): it gives vectors "
            "(/v1/embeddings, `LLM.embed`), and no text.",
            param="model",
        )


_OF_TEXT = ("stop", "bad_words", "structured_outputs", "reasoning", "dry_sequence_breakers")
"""Parameters that hold text, or are about it."""


@dataclass(slots=True)
class Admission:
    """The facts that requests are checked against. `encoders`: the ways in which a text becomes tokens (at a prompt's
    beginning, within one); none without a tokenizer."""

    vocab_size: int
    max_model_len: int
    max_rows: int
    max_waiting: int
    eos_ids: frozenset[int] = frozenset()
    encoders: tuple[Encode, ...] = ()
    compiler: ConstraintCompiler | None = None
    in_process: bool = True
    breakers: Callable[[str], tuple[tuple[list[int], list[int]], ...]] | None = None
    """All ways in which a text may lie in tokens; DRY needs them for texts that end a repetition."""
    banned: list[list[int]] = field(default_factory=list)
    """Token sequences that no answer of this model may contain."""
    vectors: Vectors = field(default_factory=Vectors)
    check_engine: Callable[[Request, bool], None] = lambda request, text: None
    """Refuses what the engine cannot accept now: an unknown adapter; anything while it sleeps; text (not vectors) from
    a model without a head."""

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        """Start to compile the grammar of these parameters, so that `check` need not; None: there is nothing to
        compile."""
        if params.structured_outputs is None or self.compiler is None:
            return None
        return self.compiler.prepare(params.structured_outputs, params.reasoning)

    def check(self, request: Request, num_open: int, pooling: str | None = None) -> SequenceGroup:
        """The group to schedule, or a UserError that says what to change. Compiles a grammar that is not prepared.
        `pooling`: the group ends with a hidden state, pooled in this way, instead of tokens."""
        if pooling is None:
            return self._group(request, num_open, text=True)
        return self._embedding(request, num_open, pooling)

    def _group(self, request: Request, num_open: int, *, text: bool) -> SequenceGroup:
        params, ids = request.params, request.prompt_ids
        if num_open >= self.max_waiting:
            raise BusyError(f"{num_open} requests are open already; try again later.")
        if not ids:
            raise ParameterError("The prompt is empty: give at least one token.", param="prompt")
        if len(ids) + text > self.max_model_len:  # before looking at each id
            raise ContextError(self.max_model_len, len(ids), text=text)
        self._check_ids("prompt", ids)
        most = self.max_model_len - len(ids)
        new = most if params.max_tokens is None else params.max_tokens
        if new > most and text:
            raise ContextError(self.max_model_len, len(ids), new)
        if params.min_tokens > new:
            raise ParameterError(f"min_tokens ({params.min_tokens}) is more than fits ({new}).", param="min_tokens")
        self._check_lists(params)
        self.check_engine(request, text)
        search = self._search(params, new)
        scored = max(0, min(request.scored_from, len(ids)) - 1)
        if search.width and params.structured_outputs is not None and not self._end_ids(params):
            raise ParameterError(
                "beam search in a structure needs an end token: leave out ignore_eos, or give stop_token_ids.",
                param="ignore_eos" if params.ignore_eos else "stop_token_ids",
            )
        return SequenceGroup(
            request=request,
            search=search,
            sampling=self._row_sampling(params, search),
            max_len=len(ids) + new,
            num_outputs=params.num_outputs,
            constraint=self._constraint(params),
            reads_cache=(params.prompt_logprobs is None or scored > 0) and not params.skip_reading_prefix_cache,
            scored=scored,
            reached=request.reached,
        )

    def _embedding(self, request: Request, num_open: int, pooling: str) -> SequenceGroup:
        pooling = self._pooling(pooling)
        group = self._group(request, num_open, text=False)
        group.max_len = len(request.prompt_ids) + 1
        group.embed = pooling
        group.reads_cache = pooling == "last"
        return group

    def _pooling(self, asked: str) -> str:
        files = self.vectors
        if asked not in ("last", "mean", AS_STATED):
            raise ParameterError(f"pooling must be 'last' or 'mean', got {asked!r}.", param="pooling")
        if files.layers:
            raise ParameterError(f"This model's vectors cannot be made here: {files.layers}.", param="model")
        if asked == AS_STATED and files.unbuilt:
            raise ParameterError(
                f"This model's way to pool is not built: {files.unbuilt}. Ask for pooling 'last' or 'mean' instead.",
                param="pooling",
            )
        return files.pooling if asked == AS_STATED else asked

    def _check_ids(self, name: str, ids: list[int]) -> None:
        if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < self.vocab_size)):
            return  # usually all is fine; a Python loop takes ten times as long
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ParameterError(f"{name} must hold integer token ids, got {token!r}.", param=name)
            if not 0 <= token < self.vocab_size:
                raise ParameterError(
                    f"{name} holds token id {token}, which is out of vocabulary (of {self.vocab_size} ids).", param=name
                )

    def _check_lists(self, params: SamplingParams) -> None:
        if params.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", params.allowed_token_ids)
        if params.stop_token_ids:
            self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.logit_bias:
            self._check_ids("logit_bias", list(params.logit_bias))
        if params.logits_processors and not self.in_process:
            raise ParameterError(
                "logits_processors are Python callables and need the model in-process: one engine of one rank, "
                "and executor='inprocess'.",
                param="logits_processors",
            )
        for name in () if self.encoders else _OF_TEXT:
            if getattr(params, name):
                raise ParameterError(f"{name} cannot be followed without a tokenizer.", param=name)

    def _search(self, params: SamplingParams, new: int) -> Search:
        if not params.use_beam_search:
            return Sampling()
        beams = params.best_of or params.n
        if beams > self.max_rows:
            raise ParameterError(
                f"{beams} beams need as many rows; this engine has {self.max_rows} (--max-num-seqs).", param="n"
            )
        return BeamSearch(
            beams,
            params.length_penalty,
            params.early_stopping,
            frozenset(self._end_ids(params)),
            new,
            params.min_tokens,
        )

    def _end_ids(self, params: SamplingParams) -> list[int]:
        eos = [] if params.ignore_eos else sorted(self.eos_ids)
        return [*eos, *(t for t in params.stop_token_ids or () if t not in eos)]

    def _row_sampling(self, params: SamplingParams, search: Search) -> RowSampling:
        given = {name: getattr(params, name) for name in SAMPLER_FIELDS}
        taken = EDITS if params.samplers is None else read_samplers(params.samplers)
        if "penalties" not in taken:
            given["repeat_last_n"] = 0
        if "dry" not in taken:
            given["dry_multiplier"] = 0.0
        ranked = params.best_of is not None and params.best_of > params.n
        wanted = 0 if params.logprobs is None and ranked else self._likely(params.logprobs)
        return RowSampling(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            **given,
            dry_breakers=self._breakers(params) if given["dry_multiplier"] > 0 else [],
            order=order_of(params),
            min_tokens=params.min_tokens,
            end_ids=self._end_ids(params),
            logit_bias=params.logit_bias or {},
            allowed_ids=params.allowed_token_ids,
            bad_words=self._bad_words(params),
            num_logprobs=wanted,
            num_prompt_logprobs=self._likely(params.prompt_logprobs),
            num_candidates=search.width,
            has_processors=bool(params.logits_processors),
        )

    def _breakers(self, params: SamplingParams) -> list[tuple[list[int], list[int]]]:
        """DRY's sequence breakers as tokens."""
        texts = USUAL_BREAKERS if params.dry_sequence_breakers is None else params.dry_sequence_breakers
        if self.breakers is None:
            return []
        return [way for text in texts for way in self.breakers(text)]

    def _likely(self, wanted: int | None) -> int:
        """How many of the likeliest tokens are reported. In a request -1 asks for all; in a row -1 stands for none
        asked for."""
        if wanted is None:
            return -1
        return self.vocab_size if wanted < 0 else min(wanted, self.vocab_size)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The tokens of each bad word: at the start of a text, within one, and after a space."""
        words = {tuple(ids): ids for ids in self.banned}
        for word in params.bad_words or ():
            for text in (word, " " + word.lstrip()):
                for encode in self.encoders:
                    if ids := encode(text):
                        words.setdefault(tuple(ids), ids)
        return list(words.values())

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        budget = params.thinking_token_budget if params.reasoning is not None else None
        if params.structured_outputs is None and (budget is None or budget < 0 or self.compiler is None):
            return None  # without a compiler this only checks for the engine that has one
        if params.structured_outputs is not None and not isinstance(params.structured_outputs, dict):
            raise ParameterError(
                "structured_outputs must be a dict such as {'choice': ['yes', 'no']}.", param="structured_outputs"
            )
        assert self.compiler is not None
        made = self.compiler.constraint(params.structured_outputs, params.reasoning, budget)
        return Sheltered(made, -(-self.vocab_size // 8))
