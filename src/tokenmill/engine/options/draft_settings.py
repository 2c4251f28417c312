"""vLLM's methods and entries of --speculative-config that have no name here. Owns: what becomes of each, with its
reason.

A method is an alias of one that exists here, or refused. An entry is accepted with the value that is the behaviour
anyway, and refused with any other. Must not know: the methods and entries that work (drafting.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SAME_AS: Mapping[str, str] = {
    f"{family}_mtp": "mtp"
    for family in (
        *("bailing_hybrid", "bailing_hybrid_v3", "deepseek", "dots3_note", "ernie", "exaone4_5", "exaone_moe"),
        *("gemma4", "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_ocr", "hy_v3", "hy_v4", "inkling", "kimi_k3"),
        *("longcat_flash", "mimo", "mimo_v2", "minimax_m3", "nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next"),
        *("qwen4_exp", "step3p5"),
    )
}
"""Other names of a method. The model decides which layers guess; families without such layers are refused."""

NOT_BUILT: Mapping[str, str] = {
    "mlp_speculator": 'MLP speculators are not built; Medusa heads are ("medusa")',
    "ngram_gpu": 'say "ngram": where n-grams are looked up follows from the device',
    "dflash": 'drafters that guess a block at a time are not built; EAGLE heads are ("eagle3")',
    "dspark": 'drafters that guess a block at a time are not built; EAGLE heads are ("eagle3")',
    "custom_class": "classes of other programs are not loaded; docs/add-a-drafter.md says how a drafter is added",
    "extract_hidden_states": "hidden states are not given out; tokenmill distill reads a model's own",
}
"""Methods that are not implemented, with the reason or a replacement."""


@dataclass(frozen=True, slots=True)
class EntryRule:
    """What to do with an entry. same: values that ask for what is done anyway (null always does)."""

    why: str
    same: tuple[Any, ...] = ()

    def asks(self, value: Any) -> bool:
        """Does this value ask for anything else?"""
        return value is not None and not any(type(value) is type(each) and value == each for each in self.same)


def _entries(why: str, *names: str, same: tuple[Any, ...] = ()) -> dict[str, EntryRule]:
    return dict.fromkeys(names, EntryRule(why, same))


_EXACT = "guesses are verified exactly: what stands is what would have been said without them"
_MEASURED = (
    'how many guesses pay is measured; "disable_by_batch_size" says with more than how many requests there are none'
)
ENTRIES: Mapping[str, EntryRule] = {
    **_entries("every rank holds the whole drafter", "draft_tensor_parallel_size", same=(1,)),
    **_entries('say "draft_tensor_parallel_size", which may be 1', "tensor_parallel_size"),
    **_entries("a drafter reads as far as the model: --max-model-len", "max_model_len"),
    **_entries("no code is loaded from hubs", "code_revision"),
    **_entries("a drafter is loaded as the model is: --load-format", "draft_load_config"),
    **_entries("kernels are chosen by device and shape", "moe_backend", "attention_backend", same=("auto",)),
    **_entries("a drafter's keys and values are stored as the model's: --kv-cache-dtype", "kv_cache_dtype",
               same=("auto",)),
    **_entries("each pass of a drafter attends by itself", "index_share_for_mtp_iteration", same=(False,)),
    **_entries("rows of any lengths share a step", "disable_padded_drafter_batch", same=(False,)),
    **_entries("what a head has not seen of a kept prefix it does without", "disable_eagle_block_drop", same=(False,)),
    **_entries("every rank guesses by itself and gathers nothing", "use_local_argmax_reduction", same=(False,)),
    **_entries("a draft model must have the model's tokenizer", "use_heterogeneous_vocab", same=(False,)),
    **_entries('guesses follow one another; "medusa" heads and "lookahead" windows guess at once', "parallel_drafting",
               same=(False,)),
    **_entries(_MEASURED, "num_speculative_tokens_per_batch_size"),
    **_entries(_MEASURED, "enable_adaptive_verification", same=(False,)),
    **_entries("a match of n tokens is worth at most n guesses", "suffix_decoding_max_spec_factor", same=(1.0, 1)),
    **_entries("how often a request's guesses were right says how many are made", "suffix_decoding_min_token_prob"),
    **_entries(_EXACT, "rejection_sample_method", same=("standard",)),
    **_entries(_EXACT, "acceptance_method", same=("rejection_sampler",)),
    **_entries(_EXACT, "synthetic_acceptance_rates", "synthetic_acceptance_length", "synthetic_acceptance_rate",
               "typical_acceptance_sampler_posterior_threshold", "typical_acceptance_sampler_posterior_alpha",
               "posterior_threshold", "posterior_alpha"),
    **_entries("a row that samples is guessed for with its own noise, which is right most often", "draft_sample_method",
               same=("probabilistic",)),
    **_entries("log-probabilities are those of the model, always", "disable_logprobs", same=(False,)),
    **_entries("all guesses of a row are verified in one step", "disable_mqa_scorer", same=(False,)),
    **_entries('drafters of this kind ("dspark") are not built', "dspark_draft_topk"),
    **_entries("the engine works it out by itself", "target_model_config", "target_parallel_config",
               "draft_model_config", "draft_parallel_config"),
    **_entries('say "prompt_lookup_max" and "prompt_lookup_min"', "ngram_prompt_lookup_max", "ngram_prompt_lookup_min"),
}  # fmt: skip
"""vLLM's entries, including older ones."""
