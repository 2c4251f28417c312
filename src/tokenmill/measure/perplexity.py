"""Perplexity of a model on a text. Owns: cutting the text into windows and adding up. Must not know: formats, files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tokenmill.core.errors import UserError
from tokenmill.core.request import SamplingParams

WINDOW = 512
MOST_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp(mean negative log-likelihood) over `tokens` predicted tokens."""

    value: float
    tokens: int


def perplexity(options: dict[str, Any], text: str, window: int = WINDOW) -> Perplexity:
    """Load a model, read the text in windows that do not overlap, and score every token. (A window begins with what
    every text of this model begins with; if that is nothing, its first token is not scored.)"""
    from tokenmill.engine.interfaces.llm import LLM
    from tokenmill.quantize.calibration_text import lead_and_rest

    llm = LLM(**options)
    try:
        lead, ids = lead_and_rest(text, llm.get_tokenizer().encode)
        ids, window = ids[:MOST_TOKENS], max(min(window, llm.built.facts.max_model_len - 1) - len(lead), 1)
        cuts = [lead + ids[at : at + window] for at in range(0, len(ids), window)]
        prompts = [{"prompt_token_ids": cut} for cut in cuts if len(cut) > max(len(lead), 1)]
        if not prompts:
            raise UserError("The text for perplexity is too short: it needs at least two tokens.")
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        lost, count = 0.0, 0
        for output in llm.generate(prompts, params, use_tqdm=False):
            rows = list(zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True))
            for index, found in rows[len(lead) :]:
                if found is not None:
                    lost, count = lost - found[index].logprob, count + 1
        return Perplexity(math.exp(min(lost / count, 700.0)), count)
    finally:
        llm.close()
