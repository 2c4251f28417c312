"""Weights that change between rollouts, without a restart: the engine's half of a loop of reinforcement learning.

The "training" here only moves the norm of the last layer: what counts is that the engine follows.
"""

from __future__ import annotations

import sys

from torch import Tensor

from tokenmill import LLM, SamplingParams

PROMPTS = ["The mill", "The sea is"]
PARAMS = SamplingParams(n=4, temperature=1.0, max_tokens=8, logprobs=0, seed=1)


def reward(text: str) -> float:
    """Short words are good."""
    return -sum(len(word) for word in text.split()) / max(1, len(text.split()))


def main(model: str = "demo", rounds: int = 3) -> list[float]:
    """Sample, judge, train, update; -> the mean reward of each round."""
    llm = LLM(model=model)
    norm: Tensor = llm.apply_model(lambda built: built.norm.weight.clone())[0]
    means = []
    for _ in range(rounds):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        rewards = [reward(out.text) for output in outputs for out in output.outputs]
        means.append(sum(rewards) / len(rewards))
        norm = norm * (1.0 + 0.1 * means[-1])
        llm.update_weights([("model.norm.weight", norm)])
        print(f"mean reward {means[-1]:.2f}; the norm's mean is now {norm.float().mean():.3f}")
    return means


if __name__ == "__main__":
    main(*sys.argv[1:])
