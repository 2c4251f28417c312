"""Names of vLLM's parameters of requests that are not fields here. Owns: what becomes of each of them.

Must not know: the fields, requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Names:
    """older: other names of fields. harmless: accepted without effect, because nothing is lost. refused: unless their
    value asks for nothing. Both with the reason. unset: fields that None leaves at their default."""

    older: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()


_STRUCTURE = "give structured_outputs={'json': ...}, 'regex', 'choice' or 'grammar'"
SAMPLING = Names(
    older={"guided_decoding": "structured_outputs"},
    unset=frozenset({"skip_reading_prefix_cache"}),
    harmless={
        "skip_clone": "only about speed: parameters are never changed, so none are copied",
        "stream_interval": "only about speed: each step tells what it added",
        "flat_logprobs": "only about memory: log-probabilities come as one dict per token",
    },
    refused={
        "extra_args": "it is read by plugins, and there are none: give logits_processors=[f], whose f may hold "
        "anything",
        "repetition_detection": "ends at repetitions are not built: penalties prevent them",
        **dict.fromkeys(
            ("logprob_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start"),
            "log-probabilities are told by rank: -1 as logprobs or prompt_logprobs asks for those of all tokens",
        ),
        "routed_experts_prompt_start": "experts' choices are not told",
        "trace_decode_token_ids": "what an answer must be is said with structured_outputs, and score() rates a text",
        "prompt_adapter_request": "prompt adapters are not built",
    },
)
_HEADS = "models with such heads are not built"
OTHERS: Mapping[str, Names] = {
    "SamplingParams": SAMPLING,
    "PoolingParams": Names(
        older={"activation": "use_activation", "softmax": "use_activation"},
        harmless={
            "output_kind": "a vector comes whole",
            "skip_reading_prefix_cache": "only about speed: a vector is the same with the cache and without",
            "requires_token_ids": "token ids are always there",
        },
        refused={
            **dict.fromkeys(("step_tag_id", "returned_token_ids", "late_interaction_params"), _HEADS),
            "extra_kwargs": "it is read by plugins, and there are none",
        },
    ),
    "LoRARequest": Names(
        older={"lora_local_path": "lora_path"},
        harmless={
            "base_model_name": "the base is the engine's model",
            "is_3d_lora_weight": "the file shows how experts are stored",
        },
        refused={
            "load_inplace": "a name keeps its adapter until it is removed: choose another name",
            "tensorizer_config_dict": "adapters are PEFT folders and GGUF files",
            "long_lora_max_len": "an adapter does not change how far the model reads",
        },
    ),
}
"""By class."""
ELSEWHERE: Mapping[str, str] = {
    "do_sample": "temperature=0 takes the likeliest token, any other temperature draws one",
    "num_beams": "LLM.beam_search() searches",
    "stop_sequences": "its name is stop",
    "max_length": "max_tokens counts the tokens of the answer",
    **dict.fromkeys(("response_format", "json_schema", "guided_json", "guided_regex"), _STRUCTURE),
    **dict.fromkeys(("guided_choice", "guided_grammar"), _STRUCTURE),
}
"""Names of requests over HTTP and of Transformers -> what to give in place of them."""


def fields_alone(whose: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only our own fields: rename older names, drop harmless ones, and refuse values that would be lost."""
    names, fields = OTHERS.get(whose, Names()), dict[str, Any]()
    for name, value in given.items():
        if name in names.harmless:
            continue
        if name in names.refused:
            if value not in (None, False) and value != {}:
                raise ParameterError(f"{whose}: {name!r} cannot be used: {names.refused[name]}.", param=name)
            continue
        ours = names.older.get(name, name)
        if value is None and (ours != name or ours in names.unset):
            continue
        if ours in fields or (ours != name and given.get(ours) is not None):
            raise ParameterError(f"{name} is an older name of {ours}: give one of them.", param=name)
        fields[ours] = value
    return fields
