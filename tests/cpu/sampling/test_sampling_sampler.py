"""sample(): every feature against the slow oracle, company, errors, and no waiting for the device."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cpu.sampling.sampling_oracle import chosen, edited, exponential, filtered, logprobs, make_lines, packed

from tokenmill.core.step import RowSampling
from tokenmill.sampling import few_allowed
from tokenmill.sampling.edits import mask_limits
from tokenmill.sampling.sampler import Lines, Sampled, sample
from tokenmill.sampling.table import SamplingTable

SIZE = 19
TOKEN = st.integers(0, SIZE - 1)
SHARE = st.sampled_from([0.05, 0.3, 0.6, 0.9, 0.99])


@st.composite
def row_sampling(draw: st.DrawFn) -> RowSampling:
    """Parameters of one row; each feature is on about every third time."""

    def maybe(strategy: st.SearchStrategy, neutral: Any) -> Any:
        return draw(strategy) if draw(st.integers(0, 2)) == 0 else neutral

    return RowSampling(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=maybe(st.integers(1, SIZE + 5), 0),
        top_p=maybe(SHARE, 1.0),
        min_p=maybe(SHARE, 0.0),
        typical_p=maybe(SHARE, 1.0),
        repetition_penalty=maybe(st.sampled_from([0.5, 1.3, 2.0]), 1.0),
        presence_penalty=maybe(st.sampled_from([-1.5, 0.7]), 0.0),
        frequency_penalty=maybe(st.sampled_from([-0.5, 0.9]), 0.0),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=maybe(st.integers(0, 6), 0),
        end_ids=maybe(st.lists(st.integers(0, SIZE + 3), max_size=7), []),
        logit_bias=maybe(st.dictionaries(st.integers(0, SIZE + 3), st.sampled_from([-100.0, -2.0, 3.5])), {}),
        allowed_ids=maybe(st.lists(TOKEN, min_size=3), None),
        bad_words=maybe(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4), []),
        num_logprobs=maybe(st.integers(0, 20), -1),
        num_candidates=maybe(st.integers(1, 24), 0),
    )


@st.composite
def row_case(draw: st.DrawFn) -> tuple[RowSampling, list[float], list[int], list[int], set[int] | None]:
    """(parameters, logits, prompt, output, mask or None) of one row."""
    logits = draw(st.lists(st.integers(-2000, 2000).map(lambda i: i / 311), min_size=SIZE, max_size=SIZE))
    prompt = draw(st.lists(st.integers(0, 4) | TOKEN, min_size=1, max_size=6))
    output = draw(st.lists(st.integers(0, 3) | TOKEN, max_size=7))
    mask = draw(st.none() | st.sets(st.integers(0, SIZE + 9), min_size=6))
    return draw(row_sampling()), logits, prompt, output, mask


Case = tuple[RowSampling, list[float], list[int], list[int], set[int] | None]


def run(cases: list[Case], rows: list[int] | None = None) -> Sampled:
    table = SamplingTable(24, len(cases[0][1]), "cpu")
    rows = rows or list(range(len(cases)))
    for row, (params, _, prompt, _, _) in zip(rows, cases, strict=True):
        table.set_row(row, params, len(prompt))
    histories = [(row, prompt + output) for row, (_, _, prompt, output, _) in zip(rows, cases, strict=True)]
    masks = {row: packed(m, max(m) + 1) for row, (*_, m) in zip(rows, cases, strict=True) if m is not None}
    logits = torch.tensor([case[1] for case in cases])
    before = logits.clone()
    sampled = sample(logits, make_lines(histories, table, masks=masks), table)
    sampled.collect()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "sample must not write into the logits"
    return sampled


def near_tie(x: list[float], p: RowSampling, index: int) -> bool:
    """Rounding may decide: two best scores, or a token at the border of a filter, nearly coincide."""
    if p.temperature < 1e-5:
        best = sorted(x, reverse=True)
        return best[0] - best[1] < 1e-4 and best[0] != best[1]
    found = set()
    for shift in (-1e-4, 0.0, 1e-4):
        q = RowSampling(
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p + shift if p.top_p < 1 else 1.0,
            min_p=p.min_p * (1 + shift),
            typical_p=p.typical_p + shift if p.typical_p < 1 else 1.0,
        )
        s = filtered(x, q)
        scores = sorted((v - math.log(exponential(p.seed, index, i)) for i, v in enumerate(s)), reverse=True)
        if scores[0] - scores[1] < 1e-4:
            return True
        found.add(tuple(v > -math.inf for v in s))
    return len(found) > 1


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(row_case(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_everything_against_the_oracle(cases: list[Case], rng: random.Random) -> None:
    sampled = run(cases, rng.sample(range(16), len(cases)))
    for i, (params, logits, prompt, output, mask) in enumerate(cases):
        x = edited(torch.tensor(logits).tolist(), params, prompt, output, set(range(SIZE)) if mask is None else mask)
        if max(x) == -math.inf:
            assert sampled.bad[i] and "forbids every answer" in sampled.errors[i]
            assert i not in sampled.logprobs and i not in sampled.candidates
            continue
        assert not sampled.bad[i] and i not in sampled.errors
        if not near_tie(x, params, len(output)):
            assert int(sampled.ids[i]) == chosen(x, params, len(output))
        check_reports(sampled, i, params, logits, x)


def check_reports(sampled: Sampled, i: int, params: RowSampling, logits: list[float], x: list[float]) -> None:
    beams = params.num_candidates > 0
    assert (i in sampled.logprobs) == (params.num_logprobs >= 0 and not beams)
    assert (i in sampled.branches) == (params.num_logprobs >= 0 and beams)
    said = [(int(sampled.ids[i]), sampled.logprobs[i])] if i in sampled.logprobs else []
    if i in sampled.branches:
        said = [(token, row) for (token, _), row in zip(sampled.candidates[i], sampled.branches[i], strict=False)]
    exact, order = logprobs(logits), sorted(range(SIZE), key=lambda t: (-logits[t], t))
    for token, found in said:
        assert found.ids == [token, *order[: params.num_logprobs]]
        assert found.rank == order.index(token) + 1
        assert found.logprobs == pytest.approx([exact[t] for t in found.ids], rel=1e-6, abs=1e-5)
    assert (i in sampled.candidates) == beams
    if params.num_candidates > 0:
        exact = logprobs(x)
        best = sorted((v for v in exact if v > -math.inf), reverse=True)[: params.num_candidates]
        assert [v for _, v in sampled.candidates[i]] == pytest.approx(best, rel=1e-6, abs=1e-5)
        assert [exact[t] for t, _ in sampled.candidates[i]] == pytest.approx(best, rel=1e-6, abs=1e-5)
        assert len({t for t, _ in sampled.candidates[i]}) == len(best)


FEATURES: list[RowSampling] = [
    RowSampling(),
    RowSampling(temperature=1.0),
    RowSampling(temperature=0.8, top_p=0.9, num_logprobs=5),
    RowSampling(temperature=1.2, top_k=40, top_p=0.95, min_p=0.02),
    RowSampling(temperature=0.9, typical_p=0.8, repetition_penalty=1.2, num_logprobs=0),
    RowSampling(temperature=1.5, min_p=0.1, presence_penalty=0.4, frequency_penalty=0.3, num_candidates=6),
    RowSampling(num_candidates=8, num_logprobs=3, logit_bias={3: 2.0}),
    RowSampling(temperature=1.0, top_p=0.999, bad_words=[[5], [1, 2]], min_tokens=9, end_ids=[2, 9]),
    RowSampling(temperature=1.0, top_k=2000, allowed_ids=list(range(0, 30000, 7))),
    RowSampling(num_logprobs=20),
]


@pytest.mark.parametrize("size", [50257, 32003, 131])
def test_company_and_place_change_no_bit(size: int) -> None:
    rng = random.Random(size)
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(10, size, generator=generator) * 2
    cases: list[Case] = []
    for i, params in enumerate(FEATURES):
        history = [rng.randrange(size) for _ in range(20 + i)]
        mask = set(range(0, size, 3)) if i in (3, 7) else None
        cases.append((params, logits[i].tolist(), history[:9], history[9:], mask))
    alone = [run([case]) for case in cases]
    for _ in range(6):
        company = rng.sample(range(10), rng.randint(2, 9))
        together = run([cases[i] for i in company], rng.sample(range(16), len(company)))
        for line, i in enumerate(company):
            assert int(together.ids[line]) == int(alone[i].ids[0])
            assert together.logprobs.get(line) == alone[i].logprobs.get(0)
            assert together.candidates.get(line) == alone[i].candidates.get(0)
            tried = slice(len(together.candidates.get(line, ())))  # behind them lie what others in company want
            assert together.branches.get(line, [])[tried] == alone[i].branches.get(0, [])[tried]
            assert not together.errors and not alone[i].errors


def test_scores_are_the_same_bits_in_company() -> None:
    """Not only the winners: every noisy score of a line."""
    from tokenmill.sampling.noise import noisy_, position_keys, stream_of

    table = SamplingTable(1, 50257, "cpu")
    logits = torch.randn(9, 50257)
    keys = position_keys(torch.tensor([stream_of(s) for s in range(9)]), torch.arange(9))
    together = noisy_(logits.clone(), keys, table.bases)
    for i in range(9):
        assert torch.equal(noisy_(logits[i : i + 1].clone(), keys[i : i + 1], table.bases)[0], together[i])


def test_lines_of_one_row_are_positions() -> None:
    """Verification: the j-th line of a row samples what plain decoding samples there."""
    size, generator = 97, torch.Generator().manual_seed(1)
    logits = torch.randn(5, size, generator=generator)
    params = RowSampling(
        temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.5, frequency_penalty=0.2, min_tokens=5, end_ids=[1]
    )
    history = [4, 8, 15, 16, 23, 42, 4, 8, 7, 7]
    masks = [set(range(i, size)) for i in range(5)]
    table = SamplingTable(2, size, "cpu")
    table.set_row(1, params, 3)
    lines = make_lines([(1, history[: 6 + j]) for j in range(5)], table)
    lines.tokens[1, :10] = torch.tensor(history, dtype=torch.int32)
    lines.masks = {1: [packed(m, size) for m in masks]}
    together = sample(logits, lines, table)
    for j in range(5):
        alone = run([(params, logits[j].tolist(), history[:3], history[3 : 6 + j], masks[j])])
        assert int(alone.ids[0]) == int(together.ids[j])


def test_bad_lines_leave_the_others_alone() -> None:
    size, nan, inf = 1000, math.nan, math.inf
    logits = torch.randn(8, size)
    rows = [RowSampling(), RowSampling(temperature=1.0, top_p=0.9, num_logprobs=2, num_candidates=3)] * 4
    clean = [(p, line.tolist(), [1], [2], None) for p, line in zip(rows, logits, strict=True)]
    wanted = run(clean)
    broken = logits.clone()
    broken[0, 3], broken[1, 999], broken[2, 5], broken[3, 0] = nan, nan, inf, inf
    broken[4], broken[5] = -inf, -inf
    found = run([(p, line.tolist(), [1], [2], None) for p, line in zip(rows, broken, strict=True)])
    assert found.bad.tolist() == [True] * 6 + [False] * 2
    assert set(found.errors) == set(range(6)) and all("NaN" in e for e in found.errors.values())
    assert found.ids[6:].tolist() == wanted.ids[6:].tolist()
    assert found.branches == {7: wanted.branches[7]} and found.candidates == {7: wanted.candidates[7]}
    assert ((found.ids >= 0) & (found.ids < size)).all()


def test_partly_infinite_lines_are_fine() -> None:
    line = [-math.inf] * 500
    line[77], line[300] = -1.0, -2.0
    for params in FEATURES[:5]:
        sampled = run([(params, line, [1], [2], None)] * 3)
        assert not sampled.errors and set(sampled.ids.tolist()) <= {77, 300}


@pytest.mark.parametrize("size", [5, 1000, 5003])
def test_few_allowed_tokens_are_chosen_as_from_the_whole_line(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(size)
    logits = torch.randn(24, size, generator=torch.Generator().manual_seed(size)) * 4
    logits[3, : size // 2] = -math.inf
    logits[5] = logits[5].round()  # equal ones
    logits[7, 1] = math.nan
    cases: list[Case] = []
    for i in range(12):
        mask = set(rng.sample(range(size), min(size, (0, 1, 2, 9, 70, 600)[i % 6])))
        params = RowSampling(temperature=(0.0, 0.8)[i % 2], seed=i, num_logprobs=rng.choice([-1, 2]))
        cases.append((params, logits[2 * i].tolist(), [1, 2], [3] * i, mask | {size + 9}))
        other = RowSampling(temperature=1.0, top_p=0.9, seed=i) if i % 3 else RowSampling()
        cases.append((other, logits[2 * i + 1].tolist(), [1], [2], None if i % 2 else {*range(i, size), size}))
    found = run(cases)
    monkeypatch.setattr(few_allowed, "MOST_WORDS", -1)
    wanted = run(cases)
    assert torch.equal(found.bad, wanted.bad) and found.errors == wanted.errors
    good = ~found.bad
    assert torch.equal(found.ids[good], wanted.ids[good]) and found.logprobs == wanted.logprobs
    assert torch.equal(found.pending.after[good], wanted.pending.after[good])


@pytest.mark.parametrize("size", [1, 7, 8, 9, 131])
@pytest.mark.parametrize("num_bits", [1, 8, 13, 400])
def test_masks_of_odd_sizes(size: int, num_bits: int) -> None:
    rng = random.Random(size * num_bits)
    allowed = {i for i in range(num_bits) if rng.random() < 0.5}
    table = SamplingTable(1, size, "cpu")
    limits = mask_limits([packed(allowed, num_bits), b""], size, table.byte_limits)
    assert limits.tolist() == [[math.inf if i in allowed else -math.inf for i in range(size)], [-math.inf] * size]


def test_all_tokens_masked() -> None:
    sampled = run([(RowSampling(temperature=1.0), [0.0] * 9, [1], [], {11}), (RowSampling(), [0.0] * 9, [1], [], None)])
    assert (
        sampled.bad.tolist() == [True, False]
        and "forbids every answer" in sampled.errors[0]
        and int(sampled.ids[1]) == 0
    )


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    x = torch.randn(1, 5000, generator=torch.Generator().manual_seed(2))
    cases = [(RowSampling(temperature=temperature, seed=s), x[0].tolist(), [1], [], None) for s in range(16)]
    big = [(p, [v * 1e36 for v in line], a, b, m) for p, line, a, b, m in cases]
    ids, best = run(cases).ids, int(x.argmax())
    assert (ids == best).all() if temperature < 1e-2 else len(set(ids.tolist())) > 8
    huge = run(big)
    assert not huge.errors and (huge.ids == best).all()


def test_tiny_top_p_and_top_k_one_are_greedy() -> None:
    x = torch.randn(3, 50257).tolist()
    for params in (RowSampling(temperature=5.0, top_p=1e-9), RowSampling(temperature=5.0, top_k=1)):
        sampled = run([(params, line, [1], [2], None) for line in x])
        assert sampled.ids.tolist() == torch.tensor(x).argmax(-1).tolist()


def test_top_k_beyond_the_vocabulary_is_neutral() -> None:
    x = torch.randn(7).tolist()
    for seed in range(20):
        free, cut = (RowSampling(temperature=1.0, seed=seed, top_k=k) for k in (0, 10**9))
        assert int(run([(free, x, [1], [], None)]).ids[0]) == int(run([(cut, x, [1], [], None)]).ids[0])


def process(processors: Any, params: RowSampling | None = None) -> tuple[Sampled, SamplingTable]:
    table = SamplingTable(4, 11, "cpu")
    for row in range(4):
        table.set_row(row, params or RowSampling(has_processors=row == 2), 2)
    lines = make_lines([(row, [9, 8, 5, 4, row]) for row in range(4)], table, processors={2: processors})
    sampled = sample(torch.arange(44.0).view(4, 11) % 11, lines, table)
    sampled.collect()
    return sampled, table


def test_processors_see_their_row_and_change_only_it() -> None:
    calls: list[tuple] = []

    def two(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append((output, tuple(logits.shape)))
        logits[4] = 100.0
        return logits

    def three(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append((prompt, output))
        return logits - torch.nn.functional.one_hot(torch.tensor(4), 11) * 1000

    assert process(two)[0].ids.tolist() == [10, 10, 4, 10]
    assert process([two, three, lambda prompt, output, logits: logits * -1])[0].ids.tolist() == [10, 10, 4, 10]
    assert calls[0] == ([5, 4, 2], (11,)) and calls[2] == ([9, 8], [5, 4, 2])


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (lambda output, logits: 1 / 0, "ZeroDivisionError"),
        (lambda output, logits: logits[:5], "shape"),
        (lambda output, logits: None, "shape"),
        (lambda output, logits: logits.fill_(math.nan), "NaN"),
    ],
)
def test_failing_processors_fail_one_line(processor: Any, words: str) -> None:
    sampled, _ = process(processor)
    assert sampled.bad.tolist() == [False, False, True, False]
    assert set(sampled.errors) == {2} and words in sampled.errors[2]
    assert sampled.ids[[0, 1, 3]].tolist() == [10, 10, 10]


def test_a_cleared_row_leaves_nothing_behind() -> None:
    params = RowSampling(temperature=2.0, seed=1, min_tokens=9, end_ids=[0, 1], logit_bias={7: -100.0}, bad_words=[[8]])
    table = SamplingTable(2, 12, "cpu")
    table.set_row(0, params, 2)
    table.clear_row(0)
    assert table.bits == [0, 0] and not table.lists
    table.set_row(0, RowSampling(temperature=2.0, seed=99), 2)
    plain = sample(torch.zeros(1, 12), make_lines([(0, [1, 2])], table), table)
    assert int(plain.ids[0]) == chosen([0.0] * 12, RowSampling(temperature=2.0, seed=99), 0)


@pytest.mark.parametrize("which", range(len(FEATURES)))
def test_nothing_waits_for_the_device(which: int) -> None:
    """On the meta device every read of a value raises, and the code takes its accelerator paths."""
    table = SamplingTable(4, 5000, "meta")
    for row in range(4):
        table.set_row(row, FEATURES[which] if row % 2 else RowSampling(), 2)
    meta = torch.device("meta")
    lines = Lines(
        rows=[0, 1, 2, 3],
        row_ids=torch.zeros(4, dtype=torch.int64, device=meta),
        lengths=torch.zeros(4, dtype=torch.int64, device=meta),
        tokens=torch.zeros(4, 64, dtype=torch.int32, device=meta),
        masks={1: b"\xff" * 99},
        processors={},
    )
    sampled = sample(torch.zeros(4, 5000, device=meta), lines, table)
    assert sampled.ids.shape == (4,) and sampled.ids.dtype == torch.int64 and sampled.bad.dtype == torch.bool


def test_plain_greedy_rows_cost_one_maximum() -> None:
    """Neutral rows: nothing of vocabulary size is allocated or computed except the maximum."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(isinstance(a, torch.Tensor) and a.numel() >= 4000 for a in args):
                seen.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    table = SamplingTable(4, 1000, "cpu")
    for row in range(4):
        table.set_row(row, RowSampling(seed=row), 2)
    lines = make_lines([(row, [1, 2, 3]) for row in range(4)], table)
    logits = torch.randn(4, 1000)
    with Record():
        sampled = sample(logits, lines, table)
    assert seen == ["argmax", "gather"] and torch.equal(sampled.ids, logits.argmax(-1))
