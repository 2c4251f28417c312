"""The demo model's golden prompts, end to end: their answers have margins, so every path must give the same ids.

Chat prompts are stored with their token ids; the text must come out of the tokenizer as stored too.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.thinned import WHOLE
from tests.warm_starts_helpers import warm_starts

from tokenmill import LLM, SamplingParams
from tokenmill.demo import demo_dir

__all__ = ["warm_starts"]

GOLDEN = [json.loads(line) for line in (demo_dir() / "golden.jsonl").read_text().splitlines()]
PROMPTS = [{"prompt_token_ids": g["prompt_ids"]} for g in GOLDEN]
WANTED = [g["output_ids"] for g in GOLDEN]

WAYS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "reference": {"dtype": "float32", "kernels": "reference"},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "no prefix cache": {"enable_prefix_caching": False},
    "one row": {"max_num_seqs": 1},
    "few blocks": {"num_blocks": 60, "max_model_len": 512},
    "own process": {"executor": "process"},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def greedy(most: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=most)


def answers(every: int = 1, **options: Any) -> list[list[int]]:
    """What it says to every so many-th prompt."""
    with LLM(model="demo", **{"max_model_len": 1024, **options}) as llm:
        params = [greedy(len(w)) for w in WANTED[::every]]
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS[::every], params, use_tqdm=False)]


@pytest.mark.parametrize("way", WAYS)
def test_golden_answers(way: str) -> None:
    every = 3 if way == "reference" and not WHOLE else 1  # it takes several times as long
    found = answers(every, **WAYS[way])
    wrong = [g["prompt"] for g, ids, want in zip(GOLDEN[::every], found, WANTED[::every], strict=True) if ids != want]
    assert not wrong


def test_int8_weights_keep_the_answers() -> None:
    found = answers(quantization="int8")
    kept = sum(ids == want for ids, want in zip(found, WANTED, strict=True))
    assert kept >= 0.95 * len(WANTED), f"{kept} of {len(WANTED)}"


def test_fp8_weights_keep_the_answers() -> None:
    few = [i for i, want in enumerate(WANTED) if len(want) <= 24][:8]
    with LLM(model="demo", max_model_len=1024, quantization="fp8") as llm:
        outs = llm.generate([PROMPTS[i] for i in few], [greedy(len(WANTED[i])) for i in few], use_tqdm=False)
    kept = sum(list(out.outputs[0].token_ids) == WANTED[i] for out, i in zip(outs, few, strict=True))
    assert few and kept >= len(few) - 1, f"{kept} of {len(few)}"


def test_logits_equal_transformers() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_dir(), dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, logprobs=5)
    with LLM(model="demo", dtype="float32", max_model_len=1024) as llm:
        for golden, prompt in list(zip(GOLDEN, PROMPTS, strict=True))[:8]:
            out = llm.generate(prompt, params, use_tqdm=False)[0]
            with torch.inference_mode():
                want = model(torch.tensor([golden["prompt_ids"]])).logits[0].log_softmax(-1)
            assert out.prompt_logprobs is not None and out.outputs[0].logprobs is not None
            scored = [*out.prompt_logprobs[1:], out.outputs[0].logprobs[0]]
            for line, found in zip(want, scored, strict=True):
                assert found is not None
                for token, entry in found.items():
                    assert abs(entry.logprob - line[token].item()) <= 1e-4


def test_text_and_chat() -> None:
    texts = [g for g in GOLDEN if g["kind"] == "completion"]
    with LLM(model="demo", max_model_len=1024) as llm:
        outputs = llm.generate([g["prompt"] for g in texts], [greedy(len(g["output_ids"])) for g in texts], False)
        assert [o.outputs[0].text for o in outputs] == [g["output"] for g in texts]
        reply = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy(32), use_tqdm=False)
    assert "Paris" in reply[0].outputs[0].text and reply[0].outputs[0].finish_reason == "stop"
