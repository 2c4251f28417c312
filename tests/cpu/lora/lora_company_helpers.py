"""What test_lora_company.py and other tests share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenmill import LLM, LoRARequest
from tokenmill.core.request import RequestOutput

ON = {"enable_lora": True, "max_num_seqs": 32}
PROMPTS = [[3 + random.Random(i).randrange(300) for _ in range(3 + 5 * i % 23)] for i in range(32)]
"""Of 3 to 25 tokens."""


def asked(adapters: dict[str, Path], count: int = 32) -> list[LoRARequest | None]:
    """Eight adapters and none, in turn."""
    made = [LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(adapters.items())]
    return [None if i % 9 == 8 else made[i % 9] for i in range(count)]


def said(llm: LLM, prompts: Any, params: Any, adapters: Any) -> list[Any]:
    """Tokens and log-probabilities of each prompt."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, False, lora_request=adapters)
    return [shown(output) for output in outputs]


def shown(output: RequestOutput) -> Any:
    """Everything of an output that must be the same."""
    found = []
    for out in output.outputs:
        rows = [{k: v.logprob for k, v in row.items()} for row in out.logprobs or ()]
        found.append((out.token_ids, rows, out.finish_reason))
    return found
