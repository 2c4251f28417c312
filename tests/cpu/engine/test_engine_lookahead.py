"""Lookahead: no byte changes, and text that comes to the same places again is guessed from what was said there."""

from __future__ import annotations

import pytest
import torch
from engines import all_of_them, check_nothing_left, exact, greedy, open_llm, run

from tokenmill import SamplingParams
from tokenmill.core.drafting import Drafting
from tokenmill.speculate.lookahead import Lookahead
from tokenmill.testing.tiny import make_tiny

MOST = 4
CONFIG = {"speculative_config": {"method": "lookahead", "num_speculative_tokens": MOST}}
PROMPTS = [[5, 9, 200, 17, 5, 9], [1, 2, 3], [5, 9, 200, 17, 5, 9, 9, 9, 9, 9, 9]]
PARAMETERS = [
    greedy(40, logprobs=1),
    SamplingParams(temperature=0.9, seed=3, max_tokens=24, n=3, ignore_eos=True),
    greedy(25, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("lookahead"))


@pytest.mark.parametrize("more", [{}, {"depth": 2, "num_blocks": 16, "block_size": 8}, {"max_num_batched_tokens": 16}])
def test_no_byte_changes(more, folder):
    with open_llm(folder, max_model_len=64, kernels="auto") as llm:
        wanted = [exact(o) for o in run(llm, PROMPTS, PARAMETERS)]
    with open_llm(folder, max_model_len=64, kernels="auto", **CONFIG, **more) as llm:
        all_of_them(llm)
        for _ in range(2):
            assert [exact(o) for o in run(llm, PROMPTS, PARAMETERS)] == wanted
        counters = llm.engine.scheduler.counters
        assert counters.drafted > 200 and counters.accepted > 20
        check_nothing_left(llm.engine)


class Rows:
    """What the drafter sees of rows."""

    def __init__(self):
        self.tokens = torch.zeros(2, 40, dtype=torch.int32)
        self.length = torch.zeros(2, dtype=torch.int64)
        self.device = torch.device("cpu")


def test_what_was_said_behind_wrong_guesses_is_guessed_later():
    rows, drafter = Rows(), Lookahead(3)
    drafter.bind(rows, None)

    def step(said, tried, kept):
        told = torch.tensor([said]), torch.tensor([1 + tried]), torch.tensor([kept])
        known = int(rows.length[0])
        rows.tokens[0, known + kept - 1] = said[kept - 1]
        rows.length[0] = known + kept
        one = torch.tensor([0])
        drafter.propose(Drafting(rows, [0], one, 3, 40, lambda: one, lambda: told))
        return rows.tokens[0, known + kept : known + kept + 3].tolist()

    rows.tokens[0, :3], rows.length[0] = torch.tensor([1, 2, 3]), 3
    assert step([7], 0, 1) == [7, 7, 7], "nothing is known"
    assert step([8, 30, 31, 32], 3, 1) == [30, 31, 32], "the iteration goes on"
    assert step([9, 40, 41, 42], 3, 1)[0] == 40  # and behind the guesses 31, 32 came 42
    assert step([31], 0, 1) and step([32], 0, 1)[0] == 42
    rows.tokens[0, :3], rows.length[0] = torch.tensor([31, 32, 32]), 2
    assert step([5], 0, 1) == [5, 5, 5], "another text in this row knows nothing of it"
    assert (drafter.pool[0] >= 0).sum() == 1
