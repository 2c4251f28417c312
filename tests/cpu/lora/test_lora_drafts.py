"""Adapters and whoever guesses: drafters know no adapters, some rows have one, and no byte differs from a plain run.

Rows without adapters are guessed for as ever, beside others; a model that drafts for itself is right about them alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cpu.engine.drafters import MOST, make_eagle, make_medusa
from tests.cpu.engine.engines import BACKENDS, all_of_them, check_nothing_left, exact, greedy, open_llm
from tests.cpu.lora.making import write_adapter

from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.testing.tiny import make_tiny

STEM = [5, 9, 200, 17, 5, 9, 200, 17, 33, 5, 9]
PROMPTS = [STEM + tail for tail in ([], [8], [1, 2, 3, 1, 2], [9] * 20)] * 2
PARAMETERS = [
    greedy(24, logprobs=1),
    greedy(21, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, n=2, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=4, max_tokens=24, structured_outputs={"regex": "([0-9]{3} [a-z]{4} ){3}done"}),
] * 2
CASES: dict[str, dict[str, Any]] = {
    "itself": {"num_blocks": 24, "block_size": 8},
    "other": {"depth": 2, "max_num_batched_tokens": 24},
    "medusa": {"depth": 2},
    "eagle": {"max_num_batched_tokens": 16},
    "eagle3": {"num_blocks": 24, "block_size": 8, "pipeline_depth": 3},
    "suffix": {"max_loras": 1},
    "lookahead": {"kv_cache_dtype": "int8"},
    "windows": {"depth": 2, "num_blocks": 24, "block_size": 8},
}


@pytest.fixture(scope="module")
def drafters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    return {
        "itself": base,
        "other": make_tiny(root / "other", hidden=32, heads=2, kv_heads=1, layers=1, architecture="llama", seed=1),
        "medusa": make_medusa(root / "medusa", hidden=128),
        "eagle": make_eagle(root / "eagle", hidden=128),
        "eagle3": make_eagle(root / "eagle3", words=100, hidden=128),
    }


@pytest.fixture(scope="module")
def wearing(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Whose adapter each prompt asks for: two and none, by turns."""
    root = tmp_path_factory.mktemp("worn")
    made = [LoRARequest(f"w{i}", i + 1, str(write_adapter(root / f"w{i}", base, seed=i))) for i in range(2)]
    return [made[0], None, made[1], made[0], None, made[1], None, made[0]]


def generate(llm: LLM, adapters: Any) -> list[Any]:
    prompts: Any = [{"prompt_token_ids": p} for p in PROMPTS]
    return [exact(o) for o in llm.generate(prompts, PARAMETERS, use_tqdm=False, lora_request=adapters)]


@pytest.fixture(scope="module")
def plain(base: Path, wearing: list[LoRARequest | None]) -> Any:
    known: dict[str, Any] = {}

    def outputs(**options: Any) -> Any:
        key = repr(options)
        if key not in known:
            with open_llm(base, enable_lora=True, max_model_len=64, enforce_eager=True, **options) as llm:
                known[key] = generate(llm, wearing)
        return known[key]

    return outputs


@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes(
    name: str, base: Path, drafters: dict[str, Path], wearing: list[LoRARequest | None], plain: Any
) -> None:
    options = {"kernels": BACKENDS[-1], **CASES[name]}
    wanted = plain(**{k: v for k, v in options.items() if k in ("kernels", "kv_cache_dtype")})
    method = {} if name in ("itself", "other") else {"method": name}
    model = {"model": str(drafters[name])} if name in drafters else {}
    config = {**method, **model, "num_speculative_tokens": MOST}
    if name == "windows":
        config = {"method": "lookahead", "lookahead_window": 4, "lookahead_ngram": 3}
    with open_llm(base, enable_lora=True, max_model_len=64, speculative_config=config, **options) as llm:
        all_of_them(llm)
        for _ in range(2):  # the second time prefixes are cached
            assert generate(llm, wearing) == wanted
        counters = llm.engine.scheduler.counters
        assert counters.drafted > 60 and counters.cached_tokens > 0
        if name == "itself":
            assert counters.preemptions > 0
            assert 0.2 * counters.drafted < counters.accepted < 0.8 * counters.drafted
        check_nothing_left(llm.engine)
