"""--speculative-config as vLLM has it: each method and entry works, or is refused by its name with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.core.config import SpeculateOptions
from tokenmill.core.errors import UserError
from tokenmill.engine.options.draft_settings import ENTRIES, NOT_BUILT, SAME_AS
from tokenmill.engine.options.drafting import COMMON, METHODS, Speculation, read_speculation

VLLM_METHODS = [
    *("ngram", "medusa", "mlp_speculator", "draft_model", "suffix", "custom_class", "eagle", "eagle3"),
    *("extract_hidden_states", "dflash", "ngram_gpu", "dspark", "mtp", "deepseek_mtp", "dots3_note_mtp"),
    *("mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp"),
    *("nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp"),
    *("qwen3_5_mtp", "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp"),
    *("bailing_hybrid_mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp"),
    *("gemma4_mtp", "inkling_mtp", "glm5_next_mtp"),
]
VLLM_ENTRIES = [
    *("enforce_eager", "num_speculative_tokens", "model", "method", "draft_tensor_parallel_size"),
    *("tensor_parallel_size", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype"),
    *("max_model_len", "revision", "code_revision", "index_share_for_mtp_iteration"),
    *("disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction"),
    *("use_heterogeneous_vocab", "prompt_lookup_max", "prompt_lookup_min", "parallel_drafting"),
    *("target_model_config", "target_parallel_config", "num_speculative_tokens_per_batch_size"),
    *("draft_model_config", "draft_parallel_config", "suffix_decoding_max_tree_depth"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_min_token_prob", "draft_load_config", "rejection_sample_method"),
    *("synthetic_acceptance_rates", "synthetic_acceptance_length"),
    *("enable_adaptive_verification", "draft_sample_method", "dspark_draft_topk"),
    *("speculative_token_tree", "disable_by_batch_size", "disable_logprobs", "disable_mqa_scorer"),
    *("acceptance_method", "typical_acceptance_sampler_posterior_threshold"),
    "typical_acceptance_sampler_posterior_alpha",
]
"""Of 2026, and those of 2024 and 2025 that are gone by now."""
OTHERS: dict[str, Any] = {
    "num_speculative_tokens": 3,
    "disable_by_batch_size": 9,
    "prompt_lookup_max": 6,
    "prompt_lookup_min": 1,
    "suffix_decoding_max_tree_depth": 9,
    "suffix_decoding_max_cached_requests": 9,
    "model": "other",
    "quantization": "int8",
    "revision": "v2",
    "enforce_eager": True,
    "speculative_token_tree": "best",
    "lookahead_window": 5,
    "lookahead_ngram": 4,
    "lookahead_candidates": 2,
}
"""Of each entry that works, a value that is not its default."""


def read(**said: Any) -> Speculation:
    found = read_speculation(SpeculateOptions(speculative_config=said))
    assert found is not None
    return found


def least(method: str) -> dict[str, Any]:
    """What a method cannot do without."""
    return {"method": method} | ({"model": "some"} if "model" in METHODS[method] else {})


@pytest.mark.parametrize("method", VLLM_METHODS)
def test_every_method_works_or_is_refused_with_a_reason(method: str) -> None:
    assert (method in METHODS) + (method in SAME_AS) + (method in NOT_BUILT) == 1
    if method in NOT_BUILT:
        with pytest.raises(UserError, match=f"method '{method}' is not available: ") as told:
            read(method=method, model="some", num_speculative_tokens=3)
        assert NOT_BUILT[method] in str(told.value)
    else:
        ours = SAME_AS.get(method, method)
        assert read(**least(ours) | {"method": method}).method == ours


@pytest.mark.parametrize("name", VLLM_ENTRIES)
def test_every_entry_is_known(name: str) -> None:
    works = {*COMMON, *(each for names in METHODS.values() for each in names)}
    assert (name in works) + (name in ENTRIES) == 1


@pytest.mark.parametrize("method", METHODS)
def test_every_entry_that_works_does_something_and_others_are_refused(method: str) -> None:
    windows = {"lookahead_window": 4} if method == "lookahead" else {}
    for name, value in OTHERS.items():
        said = least(method) | (windows if name.startswith("lookahead") else {})
        if name in (*COMMON, *METHODS[method]):
            assert read(**said | {name: value}) != read(**said), name
        else:
            with pytest.raises(UserError, match=f"without meaning for '{method}' .*{name}"):
                read(**said | {name: value})
        assert read(**least(method) | ({name: None} if name != "model" else {})) == read(**least(method))
    assert {"method", *OTHERS} == {*COMMON, *(each for names in METHODS.values() for each in names)}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_without_effect_is_refused_unless_it_says_what_is_done(name: str) -> None:
    entry = ENTRIES[name]
    for method in METHODS:
        for same in (None, *entry.same):
            assert read(**least(method), **{name: same}) == read(**least(method))
        for value in ("other", 7, -1, [], {}, 0.5, "", 0):
            with pytest.raises(UserError, match=f"speculative_config: {name}: ") as told:
                read(**least(method), **{name: value})
            assert entry.why in str(told.value)
    for same in entry.same:
        if isinstance(same, bool):
            with pytest.raises(UserError, match=name):
                read(method="ngram", **{name: not same})


def test_ngrams_as_vllm_says_them() -> None:
    for said in ({"model": "ngram"}, {"model": "[ngram]"}, {"method": "ngram", "model": "[ngram]"}):
        assert read(**said, num_speculative_tokens=3) == read(method="ngram", num_speculative_tokens=3)
    for most, least_, lengths in ((None, None, (4, 2)), (1, None, (1, 1)), (3, None, (3, 2)), (None, 7, (7, 7))):
        found = read(method="ngram", prompt_lookup_max=most, prompt_lookup_min=least_)
        assert (found.longest, found.shortest) == lengths


@pytest.mark.parametrize("said", [{"method": ""}, {"method": 3}, {"method": {}}, {"method": None}, {"model": None}])
def test_no_method(said: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"method .* is not available; use one of"):
        read(**said)


@pytest.mark.parametrize("said", [[], "", 0, False, [{"method": "ngram"}]])
def test_no_object(said: Any) -> None:
    with pytest.raises(UserError, match="must be an object"):
        read_speculation(SpeculateOptions(speculative_config=said))


@pytest.mark.parametrize("value", ["true", 1, [], {}])
def test_eager_is_a_switch(value: Any) -> None:
    with pytest.raises(UserError, match="enforce_eager must be true or false"):
        read(method="mtp", enforce_eager=value)


def test_an_entry_that_is_no_word() -> None:
    with pytest.raises(UserError, match=r"unknown entries \(7\)"):
        read_speculation(SpeculateOptions(speculative_config={"method": "ngram", 7: 1}))  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_a_limit_of_requests_is_a_number_that_means_something(value: Any) -> None:
    with pytest.raises(UserError, match=r"disable_by_batch_size must be an integer in \[1, "):
        read(method="ngram", disable_by_batch_size=value)
    assert read(method="ngram", disable_by_batch_size=3).most_rows == 3
