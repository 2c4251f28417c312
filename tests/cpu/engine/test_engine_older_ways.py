"""What engines did before: prompts computed whole, batches that nobody joins. Kept to be measured against."""

from __future__ import annotations

import pytest
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, open_llm, run

from tokenmill.measure.plan_recorder import PlanRecorder, grants_of

PROMPTS = [[7] * 40, [8] * 100, [9] * 40, [10] * 40]
PARAMS = [greedy(4), greedy(12), greedy(4), greedy(4)]


def steps(folder, **options):
    """The grants of every step as (tokens, position before) pairs."""
    with open_llm(folder, max_num_batched_tokens=32, enable_prefix_caching=False, **options) as llm:
        recorder = llm.engine.executor = PlanRecorder(llm.engine.executor)
        texts = [o.outputs[0].token_ids for o in run(llm, PROMPTS, PARAMS)]
    plans = grants_of([plan for _, plan in recorder.plans], {})
    return texts, [[(g.count, g.before) for g in step] for step in plans]


def test_prompts_stay_whole(tiny):
    texts, cut = steps(tiny)
    assert any(count > 1 and before > 0 for step in cut for count, before in step)
    again, whole = steps(tiny, enable_chunked_prefill=False)
    assert again == texts
    assert sorted(count for step in whole for count, _ in step if count > 1) == [40, 40, 40, 100]


def test_nobody_joins_a_batch_that_has_begun(tiny):
    texts, joined = steps(tiny, max_num_seqs=2)
    assert any({before == 0 for _, before in step} == {True, False} for step in joined)
    again, alone = steps(tiny, max_num_seqs=2, batching="static", enable_chunked_prefill=False)
    assert again == texts
    starts = [i for i, step in enumerate(alone) if any(before == 0 for _, before in step)]
    assert [len(alone[i]) for i in starts] == [2, 2]
    assert starts[1] == 12  # the longer answer of the first two had to end


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_beams_that_wait_for_a_row_join_their_own_batch(policy, tiny):
    """All beams of a request step together: one that waited outside of a batch that had begun stopped it for ever."""
    params = [greedy(6), greedy(9, use_beam_search=True, n=3), greedy(9)]
    prompts = [[5, 6, 7], [1, 2], [8, 9, 1]]
    with open_llm(tiny, max_num_seqs=3) as llm:
        wanted = [exact(o) for o in run(llm, prompts, params)]
    ranks = [2, 1, 0] if policy == "priority" else None
    with open_llm(tiny, max_num_seqs=3, batching="static", scheduling_policy=policy) as llm:
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False, priority=ranks)
        assert [exact(o) for o in found] == wanted
        check_nothing_left(llm.engine)
