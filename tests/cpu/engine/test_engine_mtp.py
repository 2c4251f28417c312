"""Layers inside checkpoints that guess later tokens: what they guess is what plain torch makes of them, and no byte
changes.

A checkpoint is a model with one layer more than its config says; Transformers computes that layer for the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import all_of_them, check_nothing_left, exact, greedy, open_llm, run
from families_helpers import CASES, prompt
from later_layers import AROUND, MODELS, make_checkpoint

from tokenmill import SamplingParams
from tokenmill.core.errors import UserError

MOST = 2


class Reference:
    """Guesses in plain torch, over whole texts."""

    def __init__(self, name: str, model: Any, around: dict[str, torch.Tensor]) -> None:
        self.form = MODELS[name]
        self.model, self.inner, self.around = model, model.model, around
        self.layers, self.norm = list(self.inner.layers), self.inner.norm

    def _run(self, layers: list[Any], norm: Any, **given: Any) -> torch.Tensor:
        self.inner.layers, self.inner.norm = torch.nn.ModuleList(layers), norm
        count, self.inner.config.num_hidden_layers = self.inner.config.num_hidden_layers, len(layers)
        try:
            with torch.no_grad():
                return self.inner(**given, use_cache=False).last_hidden_state
        finally:
            self.inner.layers, self.inner.norm = torch.nn.ModuleList(self.layers), self.norm
            self.inner.config.num_hidden_layers = count

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        eps = getattr(self.inner.config, "rms_norm_eps", 1e-6)
        unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return unit * (self.around[name] + (1.0 if self.form == "qwen" else 0.0))

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        embedding, state, join, last = AROUND[self.form]
        states = self._run(self.layers[:-1], self.norm, input_ids=torch.tensor([tokens[:-1]]))[0]
        found: list[int] = []
        for _ in range(count):
            words = self.inner.embed_tokens(torch.tensor(tokens[1:] + found))
            both = torch.cat((self._normed(embedding, words), self._normed(state, states)), -1)
            x = (both @ self.around[join].T)[None]
            out = self._run(self.layers[-1:], torch.nn.Identity(), inputs_embeds=x)[0]
            normed = self._normed(last, out)
            found.append(int((normed[-1] @ self.model.lm_head.weight.T).argmax()))
            states = torch.cat((states, (normed if self.form == "qwen" else out)[-1:]))
        return found


OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 96, "block_size": 4, "max_num_seqs": 4}
PROMPTS = [prompt(9, 1), prompt(23, 2), prompt(9, 1) + [3]]
PARAMETERS = [greedy(16, logprobs=1), SamplingParams(temperature=0.8, seed=2, n=2, max_tokens=13, ignore_eos=True),
              greedy(15)]  # fmt: skip
CONFIG = {"speculative_config": {"method": "mtp", "num_speculative_tokens": MOST}}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, *make_checkpoint(request.param, folder)


def test_what_it_guesses_and_that_no_byte_changes(checkpoint: tuple[str, Path, Any, Any]) -> None:
    name, folder, model, around = checkpoint
    with open_llm(folder, **OPTIONS, kernels="auto") as llm:
        wanted = [exact(o) for o in run(llm, PROMPTS, PARAMETERS)]
    found: dict[tuple[int, ...], list[int]] = {}
    for more in ({}, {"pipeline_depth": 2, "num_gpu_blocks_override": 40}, {"max_num_batched_tokens": 7}):
        with open_llm(folder, **OPTIONS, **CONFIG, **more, kernels="auto") as llm:
            all_of_them(llm)
            drafter = llm.engine.executor.runner.drafter
            honest = drafter.propose

            def propose(step: Any, honest: Any = honest) -> None:
                honest(step)
                for row in step.row_list:
                    known = int(step.rows.length[row])
                    tokens = step.rows.tokens[row, : known + step.count].tolist()
                    if llm.engine.executor.runner.rows.sampling.params[row].temperature == 0:
                        found[tuple(tokens[:known])] = tokens[known:]

            drafter.propose = propose
            for _ in range(2):
                assert [exact(o) for o in run(llm, PROMPTS, PARAMETERS)] == wanted
            check_nothing_left(llm.engine)
    reference = Reference(name, model, around)
    texts = sorted(found)[:: max(1, len(found) // 16)]
    right = [found[text] == reference.guesses(list(text), MOST) for text in texts]
    assert len(right) >= 12 and sum(right) >= len(right) - 1, right  # two logits may be one in float32


def test_trees(checkpoint: tuple[str, Path, Any, Any]) -> None:
    name, folder, _, _ = checkpoint
    config = {"method": "mtp", "speculative_token_tree": "best", "num_speculative_tokens": 6}
    if name == "qwen3-next":
        with pytest.raises(UserError, match="trees are not built for models with recurrent layers"):
            open_llm(folder, **OPTIONS, speculative_config=config)
        return
    with open_llm(folder, **OPTIONS, kernels="auto") as llm:
        wanted = [exact(o) for o in run(llm, PROMPTS, PARAMETERS)]
    with open_llm(folder, **OPTIONS, speculative_config=config, kernels="auto", pipeline_depth=2) as llm:
        all_of_them(llm)
        for _ in range(2):
            assert [exact(o) for o in run(llm, PROMPTS, PARAMETERS)] == wanted
        assert llm.engine.scheduler.counters.drafted > 100
        check_nothing_left(llm.engine)


def test_vllms_other_names_and_what_is_refused(checkpoint: tuple[str, Path, Any, Any], tmp_path: Path) -> None:
    name, folder, _, _ = checkpoint
    with open_llm(folder, **OPTIONS, speculative_config={"method": "deepseek_mtp"}) as llm:
        assert llm.engine.executor.runner.drafter.most == 4
    if name == "qwen3-next":
        with pytest.raises(UserError, match="model"):
            open_llm(folder, **OPTIONS, speculative_config={"method": "mtp", "model": "x"})
        CASES["qwen3-next"].make(tmp_path)
        with pytest.raises(UserError, match="no layer that guesses later tokens"):
            open_llm(tmp_path, **OPTIONS, **CONFIG)
