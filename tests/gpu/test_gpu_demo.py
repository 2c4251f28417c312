"""The demo model's golden prompts on the device: the ids that the CPU gives."""

from __future__ import annotations

import json

import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.demo import demo_dir

GOLDEN = [json.loads(line) for line in (demo_dir() / "golden.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {}, {"deterministic": True}, {"enforce_eager": True}])
def test_golden_answers(options):
    assert torch.cuda.is_available()
    with LLM(model="demo", max_model_len=1024, max_num_seqs=32, num_gpu_blocks_override=2000, **options) as llm:
        params = [SamplingParams(temperature=0, max_tokens=len(g["output_ids"])) for g in GOLDEN]
        outputs = llm.generate([{"prompt_token_ids": g["prompt_ids"]} for g in GOLDEN], params, use_tqdm=False)
    wrong = [g["prompt"] for g, o in zip(GOLDEN, outputs, strict=True) if o.outputs[0].token_ids != g["output_ids"]]
    assert not wrong
