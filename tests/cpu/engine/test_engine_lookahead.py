"""Lookahead: no byte changes, and text that comes to the same places again is guessed from what was said there."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.engine.engines import all_of_them, check_nothing_left, exact, greedy, open_llm, run

from tokenmill import SamplingParams
from tokenmill.compute.drafting import Drafting
from tokenmill.core.errors import UserError
from tokenmill.speculate.lookahead import Lookahead
from tokenmill.speculate.shapes import Windows
from tokenmill.speculate.windows import LookaheadWindows
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


WINDOWS = {"speculative_config": {"method": "lookahead", "lookahead_window": 5, "lookahead_candidates": 3}}


@pytest.mark.parametrize("more", [{}, {"depth": 2, "num_blocks": 16, "block_size": 8}, {"max_num_batched_tokens": 16}])
def test_no_byte_changes(more, folder):
    with open_llm(folder, max_model_len=64, kernels="auto") as llm:
        wanted = [exact(o) for o in run(llm, PROMPTS, PARAMETERS)]
    for config in (CONFIG, WINDOWS):
        with open_llm(folder, max_model_len=64, kernels="auto", **config, **more) as llm:
            all_of_them(llm)
            for _ in range(2):
                assert [exact(o) for o in run(llm, PROMPTS, PARAMETERS)] == wanted
            counters = llm.engine.scheduler.counters
            assert counters.drafted > 200 and counters.accepted > 10
            check_nothing_left(llm.engine)


class Rows:
    """What the drafter sees of rows."""

    def __init__(self):
        self.tokens = torch.zeros(2, 80, dtype=torch.int32)
        self.parents = torch.zeros(2, 16, dtype=torch.int64)
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


def test_candidates_are_runs_and_each_line_goes_on_from_its_place():
    assert Windows(3, 4, 2).parents() == [0, 1, 2, 0, 4, 5, 0, 7, 8, 7, 8, 9, 10, 11, 12]
    assert Windows(1, 2, 1).parents() == [0, 0]


def test_windows_find_runs_of_the_text_and_of_the_model():
    shape = Windows(2, 3, 2)
    rows, drafter = Rows(), LookaheadWindows(shape)
    drafter.bind(rows, None)

    def step(said, kept):
        """The drafts: two candidates of two tokens, then both levels of the window."""
        known = int(rows.length[0])
        told = torch.tensor([said]), torch.tensor([len(said)]), torch.tensor([kept])
        rows.tokens[0, known + kept - 1] = said[kept - 1]
        rows.length[0] = known + kept
        one = torch.tensor([0])
        drafter.propose(Drafting(rows, [0], one, shape.nodes, 80, lambda: one, lambda: told))
        assert rows.parents[0, :8].tolist() == shape.parents()
        return rows.tokens[0, known + kept : known + kept + 8].tolist()

    text = [7, 8, 9, 4, 7, 5, 6]
    rows.tokens[0, :7], rows.length[0] = torch.tensor(text), 7
    assert step([7], 1)[:4] == [5, 6, 8, 9], "both runs of the text behind a 7, the latest first"
    drafts = step([3, *[0] * 4, 1, 1, 40, 41], 1)  # the two lines end with 40 and 41 now
    first = drafts[4:6]
    assert drafts[:4] == [3, 3, 3, 3] and drafts[6:] == [40, 41], "the window has moved on by a place"
    drafts = step([first[0], *[0] * 6, 50, 51], 1)
    assert drafts[:2] == [40, 50], "the line that began with this token is a run that the model means"
    assert drafts[4:] == [40, 41, 50, 51]
    rows.tokens[0, :3], rows.length[0] = torch.tensor([first[0], 2, 2]), 2
    drafts = step([first[0]], 1)
    assert drafts[:4] == [2, *first[:1] * 3], "another text in this row knows nothing of it"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"lookahead_ngram": 3}, "has no meaning"),
        ({"lookahead_window": 30}, "lookahead_window 30 .* nodes, more than 64"),
        (
            {"lookahead_window": 12, "lookahead_candidates": 1, "lookahead_ngram": 5, "num_speculative_tokens": 9},
            "52 nodes",
        ),
        ({"lookahead_window": 10, "lookahead_candidates": 1, "lookahead_ngram": 9}, "more than 64|may be 18 at most"),
        ({"lookahead_window": 0}, "lookahead_window must be an integer"),
        ({"lookahead_window": 4, "speculative_token_tree": "best"}, "without meaning"),
    ],
)
def test_windows_that_cannot_be(config, why, folder):
    with pytest.raises(UserError, match=why):
        open_llm(folder, speculative_config={"method": "lookahead", **config})
