"""Drafts over ranks and stages: whatever is guessed and wherever, no byte changes, and guesses that are right count.

TOKENMILL_RELIABILITY=1 adds every drafter, stages of two ranks and three stages."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cpu.engine.engine_draft_models_helpers import PARAMETERS, PROMPTS, drafts, folders
from tests.cpu.engine.engine_ranks_helpers import FULL
from tests.cpu.engine.engines import all_of_them, check_nothing_left, exact, greedy, open_llm, run

from tokenmill import SamplingParams
from tokenmill.core.errors import ModelError

__all__ = ["folders"]
pytest.importorskip("tokenmill.parallel.shared_memory", reason="the native kernels were not built")
TENSORS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
PARAMS = [*PARAMETERS[:4], SamplingParams(temperature=0.7, seed=9, max_tokens=30, structured_outputs={"json": SCHEMA})]
ROUGH = {"max_num_batched_tokens": 16, "num_blocks": 12}
CASES = [("self", TENSORS), ("eagle", STAGES)]
"""Of the long list."""
if FULL:
    CASES += [(name, way) for name in ("self", "other", "medusa", "eagle", "lookahead", "ngram", "suffix")
              for way in (TENSORS, STAGES, {**TENSORS, **STAGES}) if (name, way) not in CASES]  # fmt: skip
    CASES += [("eagle3", TENSORS)]


@pytest.mark.parametrize(("name", "several"), CASES)
def test_drafts_change_nothing(folders: Any, name: str, several: dict[str, Any]) -> None:
    prompts, options = PROMPTS[: len(PARAMS)] + [PROMPTS[0]], {"kernels": "auto", "max_model_len": 160}
    params = [*PARAMS, greedy(24, logprobs=1)]
    with open_llm(folders["self"], **options) as llm:
        wanted = [exact(output) for output in run(llm, prompts, params)]
    with open_llm(folders["self"], **options, **several, **ROUGH, **drafts(folders, name)) as llm:
        for _ in range(2):
            assert [exact(output) for output in run(all_of_them(llm), prompts, params)] == wanted
        counters = llm.engine.scheduler.counters
        assert counters.drafted and counters.preemptions
        if name == "self":
            assert counters.accepted > 0.8 * counters.drafted
        check_nothing_left(llm.engine)


def test_a_drafter_of_lower_layers_is_refused_in_stages(folders: Any) -> None:
    with pytest.raises(ModelError, match="use --tensor-parallel-size"):
        open_llm(folders["self"], kernels="auto", **STAGES, **drafts(folders, "eagle3"))
