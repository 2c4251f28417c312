"""Drafts over states: whoever guesses and however often wrongly, no byte differs from a run without drafts.

The drafters of these tests know what comes, and lie where a hash of the text says so: then every count of accepted
drafts occurs, and every one of the states that a row may have to return to.
"""

from __future__ import annotations

import json
import random
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.engine.engines import all_of_them, check_nothing_left, exact, follow, greedy, open_llm, run
from tests.cpu.models.families_helpers import CASES, prompt
from tests.cpu.models.family_cases import ALL

from tokenmill import LLM, SamplingParams
from tokenmill.core.drafting import AllOfThem
from tokenmill.core.errors import UserError
from tokenmill.engine.interfaces.prompts import make_request

MOST = 3
STEM = prompt(18, 5)
PROMPTS = [STEM + prompt(n, 30 + n) for n in (1, 9, 23)]
PARAMETERS = [
    greedy(26, logprobs=1),
    SamplingParams(temperature=0.9, seed=3, max_tokens=21, n=3, ignore_eos=True),
    greedy(24, repetition_penalty=1.3, frequency_penalty=0.4),
]
FAMILIES = ["qwen3-next", "qwen3-5", "mamba", "falcon_h1", "lfm2"]
ENGINES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 16},
    "preemption": {"num_gpu_blocks_override": 38},
    "reference": {"kernels": "reference"},
    "as on a GPU": {"pipeline_depth": 3},
    "8 bit keys": {"kv_cache_dtype": "int8"},
    "little room": {"kv_cache_memory_bytes": 1 << 18, "pipeline_depth": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in FAMILIES:
        made[name] = tmp_path_factory.mktemp(name)
        (CASES.get(name) or ALL[f"{name}-0"]).make(made[name])
    return made


def open_hybrid(folder: Path, **options: Any) -> LLM:
    given = {
        "skip_tokenizer_init": True,
        "kernels": "auto",
        "max_model_len": 96,
        "block_size": 4,
        "max_num_seqs": 4,
        **options,
    }
    return all_of_them(open_llm(folder, **given))


class Knowing:
    """A drafter, of the host and of the device, that has read the answers: it lies in one of four guesses."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def guess(self, tokens: list[int], most: int) -> list[int]:
        found = next((text for text in self.texts if text[: len(tokens)] == tokens), [])
        after = [*found[len(tokens) : len(tokens) + most], 1, 1, 1, 1][:most]
        return [(n + 1) % 60 if hash((len(tokens) + i, n)) % 4 == 0 else n for i, n in enumerate(after)]

    def install(self, llm: LLM) -> LLM:
        host, device = llm.engine.scheduler.roster.drafter, llm.engine.executor.runner.drafter
        host.propose = lambda seq, most: self.guess(seq.tokens, most)
        if device.most:

            def propose(step: Any) -> None:
                for row in step.row_list:
                    known = int(step.rows.length[row])
                    told = self.guess(step.rows.tokens[row, :known].tolist(), step.count)
                    for i, token in enumerate(told):
                        step.rows.tokens[row, known + i] = token

            device.propose = propose
        return llm


def texts_of(outputs: list[Any], prompts: list[list[int]]) -> list[list[int]]:
    return [given + list(o.token_ids) for out, given in zip(outputs, prompts, strict=True) for o in out.outputs]


NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": MOST}}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Any:
    known: dict[str, Any] = {}

    def outputs(name: str, **options: Any) -> Any:
        key = name + json.dumps(options, sort_keys=True)
        if key not in known:
            with open_hybrid(folders[name], **options, enforce_eager=True) as llm:
                known[key] = run(llm, PROMPTS, PARAMETERS)
        return known[key]

    return outputs


CHOSEN = [("qwen3-next", title) for title in ENGINES] + [
    (name, title) for name in ("qwen3-5", "mamba", "falcon_h1", "lfm2") for title in ("as on a GPU",)
]


@pytest.mark.parametrize(("name", "title"), CHOSEN)
def test_every_engine_gives_the_same_bytes(name: str, title: str, folders: dict[str, Path], plain: Any) -> None:
    """Twice, so that the second time finds kept states, also such as were kept in the middle of accepted drafts."""
    options = ENGINES[title]
    same = {k: v for k, v in options.items() if k in ("kernels", "kv_cache_dtype")}
    wanted = plain(name, **same)
    knowing = Knowing(texts_of(wanted, PROMPTS))
    with knowing.install(open_hybrid(folders[name], **NGRAM, **options)) as llm:
        found = [run(llm, PROMPTS, PARAMETERS) for _ in range(2)]
        counters = llm.engine.scheduler.counters
        assert counters.drafted > counters.accepted > 0.3 * counters.drafted > 40
        assert counters.preemptions > 0 or title != "preemption"
        assert counters.cached_tokens > 0
        assert llm.engine.scheduler.tables.snapshots.hits > 2
        if name == "qwen3-5" and llm.engine.executor.runner.kernels.records:
            assert any(r.recordings.made for r in llm.engine.executor.runner.recorders[1:])
        check_nothing_left(llm.engine)
    for outputs in found:
        assert [exact(o) for o in outputs] == [exact(o) for o in wanted]


def test_a_talk_goes_on_where_a_state_was_kept_among_drafts(folders: dict[str, Path]) -> None:
    def talk(llm: LLM) -> list[list[int]]:
        said = [prompt(12, 1), prompt(7, 2)]
        for _ in range(3):
            said = [text + [7, 8] for text in texts_of(run(llm, said, greedy(19)), said)]
        return said

    with open_hybrid(folders["qwen3-next"], enable_prefix_caching=False) as llm:
        wanted = talk(llm)
    for depth in (1, 2):
        with Knowing(wanted).install(open_hybrid(folders["qwen3-next"], **NGRAM, pipeline_depth=depth)) as llm:
            llm.engine.scheduler.tables.snapshots.turn = 4  # answers' states are kept often
            assert talk(llm) == wanted
            assert llm.engine.scheduler.tables.snapshots.hits >= 4 and llm.engine.scheduler.counters.accepted > 40


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_come_and_go(seed: int, folders: dict[str, Path]) -> None:
    rng = random.Random(seed)
    requests = [make_request(f"r{i}", None, PROMPTS[i % 3] + prompt(i, i), rng.choice(PARAMETERS)) for i in range(6)]
    with open_hybrid(folders["qwen3-next"], enable_prefix_caching=False) as llm:
        wanted = {r.id: follow(llm, [r], None)[r.id] for r in requests}
    knowing = Knowing([t for r in requests for t in texts_of([wanted[r.id]], [list(r.prompt_ids)])])
    options = {"pipeline_depth": 1 + 2 * seed, "max_num_batched_tokens": rng.choice([9, 33])}
    with knowing.install(open_hybrid(folders["qwen3-next"], **NGRAM, **options)) as llm:
        found = follow(llm, requests, rng)
        assert llm.engine.scheduler.counters.accepted > 40
    assert {name: exact(o) for name, o in found.items()} == {name: exact(o) for name, o in wanted.items()}


def test_a_draft_model_beside_states(folders: dict[str, Path], plain: Any, tmp_path: Path) -> None:
    """Its K/V lie in the rows' blocks, and a prefix is as long as pages and the target's states allow."""
    ALL["llama-0"].make(tmp_path)
    config = {"speculative_config": {"model": str(tmp_path), "num_speculative_tokens": MOST}}
    with open_hybrid(folders["qwen3-next"], **config, pipeline_depth=2, max_num_batched_tokens=16) as llm:
        for _ in range(2):
            assert [exact(o) for o in run(llm, PROMPTS, PARAMETERS)] == [exact(o) for o in plain("qwen3-next")]
        assert llm.engine.scheduler.counters.drafted > 60
        check_nothing_left(llm.engine)


def test_a_step_without_the_way_back_is_caught(folders: dict[str, Path], plain: Any, monkeypatch: Any) -> None:
    """The tests above see what they should: rows that stay with the state behind their last draft say other things."""
    from tokenmill.kvcache.states import StatePool

    wanted = plain("qwen3-next")
    monkeypatch.setattr(StatePool, "move", lambda self, froms, rows: None)
    with Knowing(texts_of(wanted, PROMPTS)).install(open_hybrid(folders["qwen3-next"], **NGRAM)) as llm:
        assert [exact(o) for o in run(llm, PROMPTS, PARAMETERS)] != [exact(o) for o in wanted]


def test_the_room_for_states_bounds_the_drafts_of_a_step(folders: dict[str, Path]) -> None:
    with open_hybrid(folders["qwen3-next"], **NGRAM, kv_cache_memory_bytes=1 << 17, max_num_seqs=64) as llm:
        states, limits = llm.engine.executor.runner.pool.states, llm.engine.scheduler.limits
        assert MOST <= states.trail == limits.step_guesses < MOST * limits.max_rows
        Knowing([]).install(llm)
        tried: deque[int] = deque()
        honest = llm.engine.executor.runner.begin

        def begin(plan: Any) -> Any:
            tried.append(sum(plan.guesses.values()))
            return honest(plan)

        llm.engine.executor.runner.begin = begin
        run(llm, [prompt(5, i) for i in range(12)], greedy(4))
        assert 0 < max(tried) <= states.trail


def test_stages_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="recurrent layers are not built for --pipeline-parallel-size"):
        open_hybrid(folders["qwen3-next"], **NGRAM, pipeline_parallel_size=2, max_num_seqs=4)


RECURRENT = [("qwen3-next", title) for title in ("chunks", "preemption", "as on a GPU")] + [
    ("mamba", "as on a GPU"),
    ("falcon_h1", "reference"),
    ("lfm2", "as on a GPU"),
]


@pytest.mark.parametrize(("name", "title"), RECURRENT)
def test_a_draft_model_with_states_of_its_own(name: str, title: str, folders: dict[str, Path], plain: Any) -> None:
    """A model that drafts for itself is right whenever its states are those behind what stands."""
    options = ENGINES[title]
    wanted = plain(name, **{k: v for k, v in options.items() if k == "kernels"})
    config = {"speculative_config": {"model": str(folders[name]), "num_speculative_tokens": MOST}}
    with open_hybrid(folders[name], **config, **options) as llm:
        for _ in range(2):
            assert [exact(o) for o in run(llm, PROMPTS, PARAMETERS)] == [exact(o) for o in wanted]
        counters = llm.engine.scheduler.counters
        assert counters.drafted > 100 and counters.cached_tokens > 0
        assert counters.preemptions > 0 or title != "preemption"
        assert counters.accepted > 0.6 * counters.drafted  # penalties are not the drafter's
        check_nothing_left(llm.engine)


def on_and_off() -> AllOfThem:
    """A control that has eight steps without drafts, then eight with them."""
    turns = (MOST if n // 8 % 2 else 0 for n in count())

    class OnAndOff(AllOfThem):
        def depth(self, rows: int) -> int:
            return next(turns)

    return OnAndOff(MOST)


def test_a_draft_model_with_states_that_was_off_for_a_while(
    folders: dict[str, Path], plain: Any, tmp_path: Path
) -> None:
    """Of a row that it has lost it sees every token again; also beside a target without states."""
    ALL["llama-0"].make(tmp_path)
    params = [greedy(40), SamplingParams(temperature=0.9, seed=3, max_tokens=40, n=2, ignore_eos=True)]
    config = {"speculative_config": {"model": str(folders["qwen3-next"]), "num_speculative_tokens": MOST}}
    for target, depth in ((folders["qwen3-next"], 1), (folders["qwen3-next"], 3), (tmp_path, 2)):
        with open_hybrid(target) as llm:
            wanted = [exact(o) for o in run(llm, PROMPTS[:2], params)]
        with open_hybrid(target, **config, pipeline_depth=depth) as llm:
            llm.engine.scheduler.ahead.control = on_and_off()
            assert [exact(o) for o in run(llm, PROMPTS[:2], params)] == wanted
            counters = llm.engine.scheduler.counters
            assert counters.drafted > 20
            assert target == tmp_path or counters.accepted >= 0.95 * counters.drafted
            check_nothing_left(llm.engine)


def test_states_that_leave_no_room(folders: dict[str, Path]) -> None:
    config = {"speculative_config": {"model": str(folders["mamba"]), "num_speculative_tokens": 16}}
    with pytest.raises(UserError, match=r"the draft model's states behind guesses take .* lower --max-num-seqs"):
        open_hybrid(folders["qwen3-next"], **config, kv_cache_memory_bytes=1 << 18, max_num_seqs=64)
