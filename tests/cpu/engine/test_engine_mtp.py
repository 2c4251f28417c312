"""Layers inside checkpoints that guess later tokens: what they guess is what plain torch makes of them, and no byte
changes.

Some have one such layer, some have several, each of which guesses one token further.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cpu.engine.engines import all_of_them, check_nothing_left, exact, greedy, hear_guesses, open_llm, run
from tests.cpu.engine.later_layers import MODELS, Reference, make_checkpoint
from tests.cpu.models.families_helpers import CASES, prompt

from tokenmill import SamplingParams
from tokenmill.core.drafting import AllOfThem
from tokenmill.core.errors import UserError

MOST = 2
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 96, "block_size": 4, "max_num_seqs": 4}
PROMPTS = [prompt(9, 1), prompt(23, 2), prompt(9, 1) + [3]]
PARAMETERS = [greedy(16, logprobs=1), SamplingParams(temperature=0.8, seed=2, n=2, max_tokens=13, ignore_eos=True),
              greedy(15)]  # fmt: skip
CONFIG = {"speculative_config": {"method": "mtp", "num_speculative_tokens": MOST}}


LATER = [*((name, 1) for name in MODELS), ("glm4_moe", 2), ("deepseek_v3", 3), ("qwen3-next", 2)]


@pytest.fixture(scope="module", params=LATER, ids=lambda each: f"{each[0]}-{each[1]}")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any, Any]:
    """Its name, its folder, Transformers' model, and what lies around each layer that guesses."""
    name, later = request.param
    folder = tmp_path_factory.mktemp(name)
    return name, folder, *make_checkpoint(name, folder, later)


def test_what_it_guesses_and_that_no_byte_changes(checkpoint: tuple[str, Path, Any, Any]) -> None:
    name, folder, model, around = checkpoint
    most = MOST if len(around) == 1 else len(around) + 1
    config = {"speculative_config": {"method": "mtp", "num_speculative_tokens": most}}
    if len(around) > 1:  # of a prefix that others left, the last places were seen with what they said next
        config["enable_prefix_caching"] = False
    with open_llm(folder, **OPTIONS, kernels="auto") as llm:
        wanted = [exact(o) for o in run(llm, PROMPTS, PARAMETERS)]
    found: dict[tuple[int, ...], list[int]] = {}
    for more in ({}, {"pipeline_depth": 2, "num_gpu_blocks_override": 40}, {"max_num_batched_tokens": 7}):
        with open_llm(folder, **OPTIONS, **config, **more, kernels="auto") as llm:
            all_of_them(llm)
            hear_guesses(llm, found, sampled=False)
            for _ in range(2):
                assert [exact(o) for o in run(llm, PROMPTS, PARAMETERS)] == wanted
            check_nothing_left(llm.engine)
    reference = Reference(name, model, around)
    texts = sorted(found)[:: max(1, len(found) // 16)]
    right = [found[text] == reference.guesses(list(text), most) for text in texts]
    assert len(right) >= 12 and sum(right) >= len(right) - 1, right  # two logits may be one in float32


def test_layers_keep_up_while_nothing_is_guessed(checkpoint: tuple[str, Path, Any, Any]) -> None:
    name, folder, model, around = checkpoint
    most = MOST if len(around) == 1 else len(around) + 1
    if len(around) == 1 and name != "deepseek_v3":
        pytest.skip("one layer of another family is no different")
    config = {"method": "mtp", "num_speculative_tokens": most}
    found: dict[tuple[int, ...], list[int]] = {}
    steps: list[int] = []

    class OnAndOff(AllOfThem):
        def depth(self, rows: int) -> int:
            steps.append(rows)
            return most if len(steps) // 4 % 2 else 0

    with open_llm(folder, **OPTIONS, speculative_config=config, kernels="auto", enable_prefix_caching=False) as llm:
        llm.engine.scheduler.ahead.control = OnAndOff(most)
        hear_guesses(llm, found)
        outputs = run(llm, PROMPTS[:2], greedy(30))
        assert all(out.metrics is not None and out.metrics.drafted_tokens >= 10 for out in outputs)
        check_nothing_left(llm.engine)
    reference = Reference(name, model, around)
    late = sorted(found, key=len)[-12:]
    right = [found[text] == reference.guesses(list(text), most) for text in late]
    assert len(right) >= 12 and sum(right) >= len(right) - 1, right  # two logits may be one in float32


def test_trees(checkpoint: tuple[str, Path, Any, Any]) -> None:
    name, folder, _, around = checkpoint
    config = {"method": "mtp", "speculative_token_tree": "best", "num_speculative_tokens": 6}
    if name == "qwen3-next":
        with pytest.raises(UserError, match="trees are not built for models with recurrent layers"):
            open_llm(folder, **OPTIONS, speculative_config=config)
        return
    if len(around) > 1:
        with pytest.raises(UserError, match=f"guesses with {len(around)} layers, one behind the other"):
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
        for said, why in (
            ({"mtp_num_hidden_layers": 7}, r"mtp\.layers\.\d"),
            ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ):
            with pytest.raises(UserError, match=why):
                open_llm(folder, **OPTIONS, **CONFIG, hf_overrides=said)
    else:
        with pytest.raises(UserError, match=r"no layer that guesses later tokens \(model\.layers\.\d\.eh_proj"):
            open_llm(folder, **OPTIONS, **CONFIG, hf_overrides={"num_nextn_predict_layers": 7})
