"""Parameters of requests besides SamplingParams, under vLLM's names. Owns: pooling, beams, structures, adapters,
prompts as dicts, and the checks of each.

Must not know: engines. Parameters that need something that is not built are refused here by name.
"""

from __future__ import annotations

import enum
from typing import Any, NotRequired, TypedDict

import msgspec

from tokenmill.core.errors import ParameterError
from tokenmill.core.lora_request import LoRARequest as LoRARequest
from tokenmill.core.request import MAX_N, SamplingParams, check_integer
from tokenmill.core.spelled import SpelledOut


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


class RequestOutputKind(enum.IntEnum):
    """What AsyncLLM yields after a step: all so far, what is new, or everything at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of which one is given."""


class StructuredOutputsParams(msgspec.Struct, kw_only=True, metaclass=SpelledOut):
    """What an answer must match: exactly one of json, regex, choice, grammar, json_object and structural_tag."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ParameterError(
                f"A structure is one of {', '.join(FORMS)}; this has {', '.join(given) or 'none of them'}.",
                param="structured_outputs",
            )

    @classmethod
    def from_optional(cls, **given: Any) -> StructuredOutputsParams | None:
        """The same from fields in which None asks for nothing; None: no form is asked for."""
        asked = {name: value for name, value in given.items() if value is not None}
        return cls(**asked) if asked.keys() & set(FORMS) else None

    def as_options(self) -> dict[str, Any]:
        """The dict for `SamplingParams.structured_outputs`. Backends and fallbacks are dropped: all enforce the
        same."""
        names = set(self.__struct_fields__) - {"backend", "disable_fallback"}
        return {name: value for name in sorted(names) if (value := getattr(self, name)) not in (None, False)}


GuidedDecodingParams = StructuredOutputsParams
"""An older name of the class."""


class BeamSearchParams(msgspec.Struct, kw_only=True, metaclass=SpelledOut):
    """How to search; beams are ranked by log-probability per output token to the power of length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def as_sampling(self) -> SamplingParams:
        """The same parameters as SamplingParams; refuses values that make no sense."""
        check_integer("beam_width", self.beam_width, 1, MAX_N)
        return SamplingParams(
            use_beam_search=True,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=2 * self.beam_width,
        )


class PoolingParams(msgspec.Struct, kw_only=True, metaclass=SpelledOut):
    """How a prompt becomes a vector. pooling: "last" takes the last token's final hidden state, "mean" the mean of
    all; None: as the model's files say, or "last"."""

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: str | None = None
    pooling: str | None = None

    def check(self) -> None:
        """Raise a ParameterError that names a value which is not supported."""
        for name in ("truncate_prompt_tokens", "dimensions"):
            value = getattr(self, name)
            if name == "truncate_prompt_tokens" and value == -1:
                continue  # -1: as many tokens as the context holds
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ParameterError(f"{name} must be a positive integer, got {value!r}.", param=name)
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is False:
                raise ParameterError(f"{name}=False cannot be done: vectors have length 1 here.", param=name)
        if self.task not in (None, "embed"):
            raise ParameterError(
                f"The pooling task {self.task!r} needs a model with a head for it, and those are not built: "
                "embed() gives vectors, classify(labels=...) and score() read the language model.",
                param="task",
            )


def refuse_prompt_adapter(given: Any, name: str = "prompt_adapter_request") -> None:
    """Refuse prompt adapters: they are not implemented."""
    if given is not None and given != []:
        raise ParameterError(f"{name}: prompt adapters are not built; LoRA adapters are (lora_request).", param=name)
