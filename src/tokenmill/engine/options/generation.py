"""What a generation_config.json may say. Owns: which of its fields are applied, which have no effect here, and which
are named in a warning because they are not applied; refusing values that make no sense. Must not know: files, engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.core.request import SamplingParams

MAX_WORDS = 4096
MAX_WORD_TOKENS = 256
DONE = {
    "do_sample": "`false` makes temperature 0 the default",
    "temperature": "default",
    "top_k": "default",
    "top_p": "default",
    "min_p": "default",
    "typical_p": "default",
    "epsilon_cutoff": "default, in requests' units of 0.0001",
    "eta_cutoff": "default, in requests' units of 0.0001",
    "repetition_penalty": "default, with `do_sample: false` too",
    "no_repeat_ngram_size": "default, with `do_sample: false` too",
    "presence_penalty": "default, with `do_sample: false` too",
    "frequency_penalty": "default, with `do_sample: false` too",
    "repeat_last_n": "default, with `do_sample: false` too",
    "mirostat": "default",
    "mirostat_tau": "default",
    "mirostat_eta": "default",
    "stop": "default, with `do_sample: false` too",
    "seed": "default, with `do_sample: false` too",
    "max_new_tokens": "default of `max_tokens` offline and in chats",
    "suppress_tokens": "never chosen, in any request",
    "bad_words_ids": "never said, in any request",
    "eos_token_id": "ends an answer; then a word that config.json names as one does not",
}
"""Fields that are applied, and what they do."""

HARMLESS = frozenset(
    {
        *("max_length", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "use_mtp"),
        *("renormalize_logits", "remove_invalid_values", "output_attentions", "output_hidden_states", "output_scores"),
        *("output_logits", "return_dict_in_generate", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile"),
        *(
            "continuous_batching_config",
            "low_memory",
            "prefill_chunk_size",
            "transformers_version",
            "trust_remote_code",
        ),
        *("_from_model_config", "_commit_hash", "chat_format", "num_beam_groups", "diversity_penalty"),
        *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "token_healing", "early_stopping"),
        *("length_penalty", "generation_kwargs"),
    }
)
"""Storage, speed, what belongs to encoders, and what only matters beside a field that is named."""

NAMED: dict[str, tuple[Any, ...]] = {
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "stop_strings": ([], ""),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "top_h": (1.0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
}
"""Fields that are not applied, with the values that ask for nothing; a warning names any other value."""

IN_CONFIG: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_k": (0, 50),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "suppress_tokens": ([],),
    "bad_words_ids": ([],),
    **{
        name: NAMED[name]
        for name in (
            *("min_length", "num_beams", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id"),
            *("exponential_decay_length_penalty", "begin_suppress_tokens"),
        )
    },
}
"""Settings of answers that older config.json files hold, with the values that ask for nothing. Transformers reads them
there if a folder has no generation_config.json."""

_CUTOFFS = ("epsilon_cutoff", "eta_cutoff")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repeat_last_n")
_ANY_WAY = ("repetition_penalty", "no_repeat_ngram_size", *_PENALTIES, "stop", "seed")
_MIROSTAT = ("mirostat", "mirostat_tau", "mirostat_eta")
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "typical_p", *_CUTOFFS, *_MIROSTAT, *_ANY_WAY)
"""Fields of requests that a model's files set."""
UNITS = 1e4
"""Transformers writes the cut-offs as probabilities, requests count them in units of 0.0001."""


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """The defaults of a request, where generation_config.json states them; else the neutral ones."""
    kept = {name: generation[name] for name in DEFAULTS if generation.get(name) is not None}
    for name in _CUTOFFS:
        if isinstance(kept.get(name), float):
            kept[name] *= UNITS
    if generation.get("do_sample") is False:
        kept = {"temperature": 0.0, **{name: kept[name] for name in _ANY_WAY if name in kept}}
    if generation.get("max_new_tokens") is not None:
        kept["max_tokens"] = generation["max_new_tokens"]
    return SamplingParams(**kept)


def check_generation(generation: Mapping[str, Any], where: str) -> list[str]:
    """Refuse unusable values with the file's and the field's name; -> one sentence for each field not applied."""
    if not isinstance(generation.get("do_sample"), bool | None):
        raise _unusable(where, "do_sample", generation["do_sample"], "it must be true or false")
    try:
        default_params({**generation, "do_sample": True})
    except ParameterError as error:
        name = {"max_tokens": "max_new_tokens"}.get(str(error.param), str(error.param))
        raise _unusable(where, name, generation.get(name), str(error).rstrip(".")) from error
    ends = generation.get("eos_token_id")
    if ends is not None and not _ids(ends if isinstance(ends, list) else [ends]):
        raise _unusable(where, "eos_token_id", ends, "it must be a token id or a list of them")
    banned(generation, where)
    said = [
        f"{where}: {name!r} = {_short(generation[name])} is not applied here."
        for name, neutral in NAMED.items()
        if generation.get(name) is not None and generation[name] not in neutral
    ]
    known = {*DONE, *HARMLESS, *NAMED}
    return said + [f"{where}: {name!r} is not known here, and ignored." for name in generation if name not in known]


def left_in_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[str]:
    """One sentence for each setting of answers that a config.json holds and nothing else gives."""
    text = config.get("text_config")
    found = {**(text if isinstance(text, dict) else {}), **{n: v for n, v in config.items() if v is not None}}
    return [
        f"config.json: {name!r} = {_short(found[name])} is not applied here: "
        "settings of answers belong in generation_config.json."
        for name, neutral in IN_CONFIG.items()
        if found.get(name) is not None and found[name] not in neutral and name not in generation
    ]


def banned(generation: Mapping[str, Any], where: str = "generation_config.json") -> list[list[int]]:
    """Token sequences that no answer of this model may contain."""
    single, words = generation.get("suppress_tokens") or [], generation.get("bad_words_ids") or []
    if not isinstance(single, list) or len(single) > MAX_WORDS or not _ids(single):
        raise _unusable(where, "suppress_tokens", single, f"it must be a list of at most {MAX_WORDS} token ids")
    usable = isinstance(words, list) and len(words) <= MAX_WORDS
    if not usable or not all(isinstance(w, list) and 0 < len(w) <= MAX_WORD_TOKENS and _ids(w) for w in words):
        raise _unusable(where, "bad_words_ids", words, f"it must be a list of at most {MAX_WORDS} lists of token ids")
    ends = generation.get("eos_token_id")
    last = [[end] for end in (ends if isinstance(ends, list) else [ends])]
    return [*([token] for token in single), *(word for word in words if word not in last)]


def _ids(values: list[Any]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 31 for v in values)


def _unusable(where: str, name: str, value: Any, why: str) -> ModelError:
    return ModelError(f"{where}: '{name}' = {_short(value)} cannot be used: {why}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
