"""Models through Transformers on the device: with paged attention, with their own caches, and computed anew."""

from __future__ import annotations

from typing import Any

import pytest

hf = pytest.importorskip("transformers")
from tests.cpu.models.foreign_configs import SMALL, tiny  # noqa: E402
from tests.cpu.models.parity import chosen, make  # noqa: E402

from tokenmill import LLM, SamplingParams  # noqa: E402

PROMPTS = [[3 + (7 * i + k) % 60 for i in range(count)] for k, count in enumerate((40, 9, 61))]
TOKENS = 12
HOW = {"llama": "Transformers computes llama", "diffllama": "keeps its own cache", "openai-gpt": "computes every"}


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", HOW)
def test_says_what_transformers_says(kind: str, options: dict[str, Any], tmp_path: Any) -> None:
    try:
        config = hf.LlamaConfig(**SMALL) if kind == "llama" else tiny(kind)
    except Exception as error:
        pytest.skip(f"this Transformers makes no {kind}: {error}")
    reference, _, _ = make(config, tmp_path)
    expected = [chosen(reference, asked, TOKENS) for asked in PROMPTS]
    asked: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(
        model=str(tmp_path), skip_tokenizer_init=True, max_model_len=80, dtype="float32", model_impl="transformers",
        kv_cache_memory_bytes=1 << 26, max_num_seqs=4, **options,
    ) as llm:  # fmt: skip
        assert any(HOW[kind] in reason for reason in llm.built.facts.reasons)
        for _ in range(2):
            found = llm.generate(asked, params, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in found] == expected
