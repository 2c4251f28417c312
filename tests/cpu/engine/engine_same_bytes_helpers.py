"""What test_engine_same_bytes.py and other tests share."""

from __future__ import annotations

import random

from tokenmill import SamplingParams
from tokenmill.engine.interfaces.prompts import make_request


def stories(count: int, seed: int) -> list:
    """Random prompts, many with a common beginning, with every kind of sampling."""
    rng = random.Random(seed)
    stems = [[rng.randrange(259) for _ in range(rng.randint(10, 60))] for _ in range(4)]
    requests = []
    for i in range(count):
        prompt = rng.choice(stems)[: rng.randint(1, 60)] + [rng.randrange(259) for _ in range(rng.randint(0, 30))]
        if rng.random() < 0.2:
            prompt = (prompt[:5] * 6)[:30]
        more: dict = {"logprobs": rng.choice([None, 0, 3]), "max_tokens": rng.randint(1, 24), "seed": rng.randrange(99)}
        if rng.random() < 0.4:
            more["temperature"] = 0.0
        else:
            more |= {"temperature": rng.choice([0.7, 1.0, 1.5]), "top_p": rng.choice([1.0, 0.8])}
            more |= {"top_k": rng.choice([0, 20]), "min_p": rng.choice([0.0, 0.02]), "n": rng.choice([1, 1, 1, 2])}
        if rng.random() < 0.2:
            more |= {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2}
        if rng.random() < 0.2:
            more["prompt_logprobs"] = 2
        if rng.random() < 0.2:
            more |= {"stop": ["e", " t"], "min_tokens": min(4, more["max_tokens"])}
        if rng.random() < 0.1:
            more |= {
                "structured_outputs": {"choice": ["yes, of course", "no", "yes, of mills"]},
                "prompt_logprobs": None,
            }
        params = SamplingParams(**more)
        requests.append(make_request(f"r{i}", None, prompt, params, arrival=float(i)))
    return requests
