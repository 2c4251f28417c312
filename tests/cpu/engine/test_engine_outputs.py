"""What comes out: stops, lengths, logprobs, best_of, priorities, truncation and embeddings."""

from __future__ import annotations

import math

import pytest
import torch
from tests.cpu.engine.engines import BACKENDS, check_nothing_left, exact, follow, greedy, ids, run
from tests.cpu.engine.engines import open_usual as open_llm
from transformers import AutoModelForCausalLM

from tokenmill import SamplingParams
from tokenmill.engine.interfaces.prompts import make_request

PROMPT = "The mill grinds grain"


@pytest.fixture(scope="module")
def llm(tiny):
    with open_llm(tiny, max_num_seqs=16) as made:
        yield made
        check_nothing_left(made.engine)


@pytest.fixture(scope="module")
def text(llm):
    """A long sampled text of plain ASCII, to be cut by stop strings."""
    letters = [i for i in range(259) if llm.get_tokenizer().decode([i]).isascii()]
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True, allowed_token_ids=letters)
    return run(llm, [PROMPT], params)[0].outputs[0], letters


def again(llm, text, **more):
    params = SamplingParams(seed=1, ignore_eos=True, allowed_token_ids=text[1], **{"max_tokens": 60, **more})
    return run(llm, [PROMPT], params)[0].outputs[0]


@pytest.mark.parametrize("place", [0, 1, 7, 20, 40])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_stop_strings_cut_across_token_borders(place, length, llm, text):
    whole = text[0].text
    stop = whole[place : place + length]
    first = whole.index(stop)
    out = again(llm, text, stop=["never said", stop], logprobs=1)
    assert out.text == whole[:first] and out.finish_reason == "stop" and out.stop_reason == stop
    assert out.token_ids == text[0].token_ids[: len(out.token_ids)] and len(out.logprobs) == len(out.token_ids)
    said = llm.get_tokenizer().decode(out.token_ids)
    assert stop in said and stop not in llm.get_tokenizer().decode(out.token_ids[:-1])
    kept = again(llm, text, stop=stop, include_stop_str_in_output=True)
    assert kept.text == whole[: first + length] and kept.token_ids == out.token_ids


def test_min_tokens_keeps_a_stop_string_from_ending_early(llm, text):
    whole = text[0].text
    out = again(llm, text, stop=whole[0], min_tokens=10)
    assert len(out.token_ids) >= 10 and out.text.startswith(whole[:8])
    assert again(llm, text, stop=whole[0]).text == ""


def test_stop_ids_eos_and_lengths(llm):
    free = run(llm, [PROMPT], greedy(30))[0].outputs[0]
    end = free.token_ids[6]
    first = free.token_ids.index(end)
    out = run(llm, [PROMPT], greedy(30, stop_token_ids=[end]))[0].outputs[0]
    assert out.token_ids == free.token_ids[: first + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", end)
    assert out.text == llm.get_tokenizer().decode(free.token_ids[:first])
    shown = run(llm, [PROMPT], greedy(30, stop_token_ids=[end], include_stop_str_in_output=True))[0].outputs[0]
    assert shown.text == llm.get_tokenizer().decode(free.token_ids[: first + 1])
    late = run(llm, [PROMPT], greedy(30, stop_token_ids=[end], min_tokens=first + 3))[0].outputs[0]
    assert len(late.token_ids) >= first + 3 and end not in late.token_ids[: first + 2]
    for count in (1, 2, 17):
        out = run(llm, [PROMPT], greedy(count))[0].outputs[0]
        assert (len(out.token_ids), out.finish_reason) == (count, "length")
    full = run(llm, [[1] * 500], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert len(full.token_ids) == 12 and full.finish_reason == "length"


def test_end_of_text_ends_unless_ignored(llm):
    (eos, *_) = sorted(llm.engine.admission.eos_ids)
    bias = {"logit_bias": {eos: 100.0}, "temperature": 0.0, "max_tokens": 5}
    out = run(llm, [PROMPT], SamplingParams(**bias))[0].outputs[0]
    assert out.token_ids == [eos] and (out.text, out.finish_reason, out.stop_reason) == ("", "stop", None)
    out = run(llm, [PROMPT], SamplingParams(**bias, ignore_eos=True))[0].outputs[0]
    assert out.token_ids == [eos] * 5 and out.finish_reason == "length"
    out = run(llm, [PROMPT], SamplingParams(**bias, min_tokens=3))[0].outputs[0]
    assert eos not in out.token_ids[:3] and out.token_ids[3:] == [eos]


def test_logprobs_have_the_usual_shape(llm):
    out = run(llm, [PROMPT], SamplingParams(seed=2, temperature=1.5, max_tokens=12, logprobs=3, ignore_eos=True))[0]
    one = out.outputs[0]
    assert len(one.logprobs) == 12
    total = 0.0
    for token, row in zip(one.token_ids, one.logprobs, strict=True):
        assert next(iter(row)) == token and 3 <= len(row) <= 4
        ranks = sorted(entry.rank for entry in row.values())
        assert ranks[:3] == [1, 2, 3]
        best = [entry.logprob for entry in sorted(row.values(), key=lambda e: e.rank)]
        assert best == sorted(best, reverse=True) and all(v < 0 for v in best)
        assert row[token].decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
        total += row[token].logprob
    assert one.cumulative_logprob == pytest.approx(total)
    zero = run(llm, [PROMPT], SamplingParams(seed=2, temperature=1.5, max_tokens=12, logprobs=0, ignore_eos=True))[0]
    assert zero.outputs[0].token_ids == one.token_ids and all(len(row) == 1 for row in zero.outputs[0].logprobs)
    assert run(llm, [PROMPT], greedy(3))[0].outputs[0].logprobs is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_logprobs_of_a_cached_prompt_equal_a_cold_run(backend, tiny):
    prompt = [(5 * i) % 250 for i in range(100)]
    params = greedy(3, prompt_logprobs=2, logprobs=1)
    with open_llm(tiny, kernels=backend) as llm:
        cold = run(llm, [prompt], params)[0]
        assert run(llm, [prompt], greedy(3))[0].num_cached_tokens == 96
        warm = run(llm, [prompt], params)[0]
    assert exact(warm) == exact(cold)
    assert warm.prompt_logprobs[0] is None and len(warm.prompt_logprobs) == 100
    for token, row in zip(prompt[1:], warm.prompt_logprobs[1:], strict=True):
        assert next(iter(row)) == token and 2 <= len(row) <= 3
    with open_llm(tiny, kernels=backend, long_prefill_token_threshold=9, num_blocks=9, max_model_len=128) as llm:
        both = run(llm, [prompt, prompt[::-1]], params)
        assert llm.engine.scheduler.counters.preemptions > 0
    assert exact(both[0]) == exact(cold)
    assert len(both[1].prompt_logprobs) == 100


def test_a_prompt_is_scored_whole_though_no_answer_is_left(tiny):
    """Also the tokens of the step in which this shows, so what is said does not depend on chunks."""
    held = {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [5]}
    params = SamplingParams(prompt_logprobs=0, temperature=0.0, **held)
    found = []
    for threshold in (0, 7):
        with open_llm(tiny, long_prefill_token_threshold=threshold) as llm:
            found += run(llm, [list(range(40, 60))], params)
    assert [len(out.prompt_logprobs) for out in found] == [20, 20]
    assert exact(found[0]) == exact(found[1])
    assert found[0].outputs[0].finish_reason == "error"


def test_samples_differ_and_best_of_ranks_them(llm):
    params = SamplingParams(n=5, seed=4, max_tokens=10, ignore_eos=True, logprobs=0)
    five = run(llm, [PROMPT], params)[0].outputs
    assert [o.index for o in five] == [0, 1, 2, 3, 4] and len({tuple(o.token_ids) for o in five}) == 5
    alone = run(llm, [PROMPT], SamplingParams(seed=4, max_tokens=10, ignore_eos=True))[0].outputs[0]
    assert alone.token_ids == five[0].token_ids
    ranked = sorted(five, key=lambda o: -o.cumulative_logprob / len(o.token_ids))
    for logprobs in (None, 0):
        params = SamplingParams(n=2, best_of=5, seed=4, max_tokens=10, ignore_eos=True, logprobs=logprobs)
        best = run(llm, [PROMPT], params)[0]
        assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
        assert [o.index for o in best.outputs] == [0, 1]
        assert (best.outputs[0].logprobs is None) == (logprobs is None)


def test_seeds_decide_and_their_absence_does_not(llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = (run(llm, [PROMPT], params)[0].outputs[0].token_ids for _ in range(2))
    assert first != second
    seeded = SamplingParams(seed=-3, max_tokens=20, ignore_eos=True)
    assert ids(run(llm, [PROMPT], seeded)) == ids(run(llm, [PROMPT], seeded))


@pytest.mark.parametrize(("policy", "order"), [("priority", ["c", "a", "d", "b"]), ("fcfs", ["a", "b", "c", "d"])])
def test_policies_order_the_queue(policy, order, tiny):
    with open_llm(tiny, scheduling_policy=policy, max_num_seqs=1) as llm:
        ended = []
        for arrival, (name, priority) in enumerate((("a", 1), ("b", 9), ("c", -5), ("d", 1))):
            request = make_request(name, None, [3, 4], greedy(6), priority=priority, arrival=float(arrival))
            llm.engine.add(request)
        while llm.engine.has_work:
            ended += [d.request_id for d in llm.engine.step() if d.finish]
        assert ended == order


def test_an_urgent_request_overtakes_a_running_one(tiny):
    late = make_request("late", None, [9, 9], greedy(40), priority=5, arrival=0.0)
    soon = make_request("soon", None, [8, 8], greedy(5), priority=0, arrival=1.0)
    with open_llm(tiny) as llm:
        wanted = {k: exact(v) for k, v in (follow(llm, [late], None) | follow(llm, [soon], None)).items()}
    with open_llm(tiny, scheduling_policy="priority", max_num_seqs=1) as llm:
        llm.engine.add(late)
        deltas = [d for _ in range(10) for d in llm.engine.step()]
        llm.engine.add(soon)
        while llm.engine.has_work:
            deltas += llm.engine.step()
        assert [d.request_id for d in deltas if d.finish] == ["soon", "late"]
        for name in wanted:
            assert [t for d in deltas if d.request_id == name for t in d.tokens] == wanted[name][0][2]
        assert llm.engine.scheduler.counters.preemptions == 1
        check_nothing_left(llm.engine)


def test_truncation_keeps_the_end(llm):
    long = list(range(10, 110))
    cut = run(llm, [long], greedy(5, truncate_prompt_tokens=7))[0]
    assert cut.prompt_token_ids == long[-7:]
    assert ids([cut]) == ids(run(llm, [long[-7:]], greedy(5)))
    huge = run(llm, [[3] * 2000], greedy(5, truncate_prompt_tokens=20))[0]
    assert len(huge.prompt_token_ids) == 20


def test_bad_and_allowed_words(llm):
    letters = [i for i in range(259) if llm.get_tokenizer().decode([i]).isalpha()]
    free = run(llm, [PROMPT], greedy(30, allowed_token_ids=letters))[0].outputs[0]
    word = llm.get_tokenizer().decode([free.token_ids[3]])
    out = run(llm, [PROMPT], greedy(30, allowed_token_ids=letters, bad_words=[word]))[0].outputs[0]
    assert word in free.text and word not in out.text and len(out.token_ids) == 30
    out = run(llm, [PROMPT], greedy(30, allowed_token_ids=[40, 41]))[0].outputs[0]
    assert set(out.token_ids) <= {40, 41}


@pytest.mark.parametrize("backend", BACKENDS)
def test_embeddings_equal_transformers_and_ignore_company(backend, tiny):
    prompts = [[(7 * i + j) % 259 for j in range(n)] for i, n in enumerate((1, 30, 3, 75, 16, 40, 40))]
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    alone = {}
    with open_llm(tiny, kernels=backend) as llm:
        for pooling in ("last", "mean"):
            alone[pooling] = [llm.embed([p], use_tqdm=False, pooling=pooling)[0].embedding for p in prompts]
            for prompt, found in zip(prompts, alone[pooling], strict=True):
                with torch.no_grad():
                    hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
                pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
                expected = torch.nn.functional.normalize(pooled, dim=0)
                assert (torch.tensor(found) - expected).abs().max() < 1e-5
                assert math.isclose(sum(x * x for x in found), 1.0, rel_tol=1e-5)
        check_nothing_left(llm.engine)
    rough = {"long_prefill_token_threshold": 7, "num_blocks": 12, "max_model_len": 128}
    for options in (rough, {"max_num_batched_tokens": 23, "depth": 2}, {"executor": "process"}):
        with open_llm(tiny, kernels=backend, **options) as llm:
            for pooling in ("last", "mean"):
                for _ in range(2):  # the second time from the prefix cache where that may be
                    found = llm.embed(prompts, use_tqdm=False, pooling=pooling)
                    assert [o.embedding for o in found] == alone[pooling], (options, pooling)
            check_nothing_left(llm.engine)
