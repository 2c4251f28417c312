"""Every weight format over two and four ranks: the bytes of one process, plainly, from cached beginnings, with
grammars, in chunks, through preemption, and with guesses.

Long: TOKENMILL_RELIABILITY=1 runs all, TOKENMILL_ONLY="gptq q4_k" those whose names hold one of these words."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.engine.engine_ranks_helpers import FULL, NGRAM, SCHEMA
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, open_llm, run
from tests.cpu.quant.stored_forms_helpers import FORMS
from tests.cpu.quant.stored_model import DENSE, write

from tokenmill import LLM, SamplingParams
from tokenmill.testing.tiny import make_tiny

ONLY = os.environ.get("TOKENMILL_ONLY", "").split()
"""Of the long list."""
AT_LOAD = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    **{f"load {form}": {"quantization": form} for form in ("int8", "int4", "w4a8", "fp8")},
}
GGUF = (
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)
NAMES = [*AT_LOAD, *FORMS, *(f"gguf {kind}" for kind in GGUF)]
SIZES = {"vocab_size": 320, "max_position_embeddings": 256}


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 320 words."""
    return make_tiny(tmp_path_factory.mktemp("words"), hidden=128, heads=4, kv_heads=2, architecture="llama")


def made(name: str, words: Path, folder: Path) -> dict[str, Any]:
    """A model in this format with that tokenizer, as options of LLM."""
    if name in AT_LOAD:
        return {"folder": words, **AT_LOAD[name]}
    if name.startswith("gguf"):
        from tests.cpu.gguf.writing import Writer
        from tests.cpu.models.parity import make
        from transformers import LlamaConfig

        config = LlamaConfig(
            vocab_size=320, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        _, said, tensors = make(config, folder)
        path = folder / "m.gguf"
        Writer(path, said, {key: value.float() for key, value in tensors.items()}, name.split()[1]).write()
        return {"folder": path, "tokenizer": str(words), "dtype": "bfloat16"}
    write(name, {**DENSE, **SIZES}, folder)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(words / each, folder / each)
    return {"folder": folder, "dtype": "bfloat16"}


SHARED = [7, 8, 9, 10] * 6


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[*SHARED, 3], [*SHARED, 5, 6], [1, 2], [40, 41, 42] * 9, [9]]
    params = [
        greedy(24, logprobs=2),
        SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=4, top_k=20, top_p=0.9, max_tokens=24, ignore_eos=True, n=2),
        greedy(24),
        SamplingParams(temperature=0.7, seed=5, max_tokens=40, structured_outputs={"json": SCHEMA}),
    ]
    return prompts, params


def cells(llm: LLM, *, rough: bool) -> dict[str, Any]:
    """What was answered, by what was in its way."""
    prompts, params = asked()
    counters = llm.engine.scheduler.counters
    found = {"plain": [exact(each) for each in run(llm, prompts[2:4], params[2:4])]}
    found["grammar"] = [exact(each) for each in run(llm, prompts[4:], params[4:])]
    found["first"] = [exact(each) for each in run(llm, prompts[:1], params[:1])]
    before = counters.cached_tokens
    found["prefix hit"] = [exact(each) for each in run(llm, prompts[:2], params[:2])]
    assert counters.cached_tokens > before
    if rough:
        found["together"] = [exact(each) for each in run(llm, prompts, params)]
        assert counters.preemptions and counters.drafted
    check_nothing_left(llm.engine)
    return found


@pytest.mark.skipif(not FULL, reason="long: set TOKENMILL_RELIABILITY=1")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_give_the_bytes_of_one_in_every_format(name: str, ranks: int, words: Path, tmp_path: Path) -> None:
    if ONLY and not any(word.lower() in name.lower() for word in ONLY):
        pytest.skip("TOKENMILL_ONLY names others")
    options = {"kernels": "auto", "max_model_len": 100, "block_size": 4, **made(name, words, tmp_path)}
    with open_llm(**options) as llm:
        wanted = cells(llm, rough=False)
        prompts, params = asked()
        wanted["together"] = [exact(each) for each in run(llm, prompts, params)]
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "chunks, preemption and guesses": {
            "long_prefill_token_threshold": 7, "num_blocks": 26, "speculative_config": NGRAM
        },
    }  # fmt: skip
    for way, more in ways.items():
        with open_llm(tensor_parallel_size=ranks, **options, **more) as llm:
            for cell, said in cells(llm, rough=bool(more)).items():
                assert said == wanted[cell], (name, ranks, way, cell)
