"""Beam search gives Transformers' sequences and scores."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from tests.cpu.engine.engines import BACKENDS, check_nothing_left, open_llm, run
from transformers import AutoModelForCausalLM

from tokenmill import SamplingParams

PROMPTS = ([5, 17, 40, 3], [88, 2, 61, 61, 90, 14, 7, 33, 21, 120, 77])
NEW = 20


@pytest.fixture(scope="module")
def theirs(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ends(theirs):
    """Tokens that good beams hold after a few steps."""
    texts = [t for prompt in PROMPTS for t in beams_of(theirs, prompt, 1.0, False, [])[0]]
    return sorted({texts[0][5], texts[1][9], texts[4][3], texts[5][12]})


def beams_of(model, prompt, penalty, early, ends):
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=4,
        num_return_sequences=4, do_sample=False, length_penalty=penalty, early_stopping=early,
        eos_token_id=ends or None, pad_token_id=0, max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    texts = []
    for line in found.sequences[:, len(prompt) :].tolist():
        end = next((n + 1 for n, token in enumerate(line) if token in ends), NEW)
        texts.append(line[:end])
    return texts, found.sequences_scores.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_beams_are_those_of_transformers(backend, tiny, theirs, ends):
    ended = short = 0
    with open_llm(tiny, kernels=backend, max_num_seqs=16) as llm:
        for penalty, early in itertools.product((0.6, 1.0, 2.0), (False, True, "never")):
            params = SamplingParams(
                use_beam_search=True, n=4, temperature=0.0, length_penalty=penalty, early_stopping=early,
                max_tokens=NEW, stop_token_ids=ends, ignore_eos=True,
            )  # fmt: skip
            outputs = run(llm, list(PROMPTS), params)  # two searches side by side
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                texts, scores = beams_of(theirs, prompt, penalty, early, ends)
                assert [o.token_ids for o in output.outputs] == texts, (penalty, early)
                ours = [o.cumulative_logprob / len(o.token_ids) ** penalty for o in output.outputs]
                assert ours == pytest.approx(scores, abs=1e-4), (penalty, early)
                assert [o.finish_reason for o in output.outputs] == [
                    "stop" if text[-1] in ends else "length" for text in texts
                ]
                ended += sum(text[-1] in ends for text in texts)
                short += sum(len(text) < NEW for text in texts)
        check_nothing_left(llm.engine)
    assert ended and short, "the end token must occur, or the length penalty is not tested"


def test_beams_survive_preemption_chunks_and_company(tiny, ends):
    beam = SamplingParams(use_beam_search=True, n=4, temperature=0.0, max_tokens=NEW, stop_token_ids=ends)
    other = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    prompts = [list(PROMPTS[0]), [9] * 70, list(PROMPTS[1]), [4, 5] * 30]
    with open_llm(tiny, max_num_seqs=16) as llm:
        alone = [run(llm, [p], s)[0] for p, s in zip(prompts, [beam, other, beam, other], strict=True)]
    with open_llm(tiny, max_num_seqs=6, max_model_len=160, num_blocks=11, max_num_batched_tokens=13) as llm:
        found = run(llm, prompts, [beam, other, beam, other])
        assert llm.engine.scheduler.counters.preemptions > 0
        check_nothing_left(llm.engine)
    for a, b in zip(alone, found, strict=True):
        assert [(o.token_ids, o.cumulative_logprob) for o in a.outputs] == [
            (o.token_ids, o.cumulative_logprob) for o in b.outputs
        ]


@pytest.mark.parametrize("edits", [{}, {"presence_penalty": 1.5}, {"allowed_token_ids": [7, 9, 40, 61]}], ids=str)
def test_logprobs_of_beams_are_those_of_their_texts(tiny, edits):
    """Told as the model made them, whatever edits ranked the beams."""
    beam = SamplingParams(
        use_beam_search=True, n=3, temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True, **edits
    )
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    with open_llm(tiny, max_num_seqs=4) as llm:
        prompt = list(PROMPTS[1])
        (found,) = run(llm, [prompt], beam)
        for out in found.outputs:
            (whole,) = run(llm, [prompt + out.token_ids], scored)
            rows = whole.prompt_logprobs[len(prompt) :]
            assert [list(row) for row in out.logprobs] == [list(row) for row in rows]
            for ours, theirs in zip(out.logprobs, rows, strict=True):
                assert [(p.rank, pytest.approx(p.logprob, abs=1e-4)) for p in ours.values()] == [
                    (p.rank, p.logprob) for p in theirs.values()
                ]
        (plain,) = run(llm, [prompt], msgspec.structs.replace(beam, logprobs=None))
        assert [o.cumulative_logprob for o in plain.outputs] == [o.cumulative_logprob for o in found.outputs]


def test_a_beam_that_cannot_go_on_leaves_the_others(tiny):
    """Two tokens of which no pair may come twice: 7 7 9 7 has no next one, 7 9 9 7 has."""
    params = SamplingParams(
        use_beam_search=True, best_of=4, temperature=0.0, max_tokens=5, ignore_eos=True,
        allowed_token_ids=[7, 9], no_repeat_ngram_size=2,
    )  # fmt: skip
    with open_llm(tiny, max_num_seqs=4) as llm:
        (found,) = run(llm, [list(PROMPTS[0])], params)
        check_nothing_left(llm.engine)
    (out,) = found.outputs
    assert out.finish_reason == "length"
    assert len({*itertools.pairwise(out.token_ids)}) == 4


@pytest.mark.parametrize("answers", [["yes", "no"], ["a", "ab", "b"], ["x", "y", "z", "xyz"]], ids=repr)
def test_a_structure_has_room_for_as_many_beams_as_it_has_texts(answers, tiny):
    """All end at about the same time, ranked behind other ends; none of them may be dropped."""
    with open_llm(tiny, max_num_seqs=4) as llm:
        for prompt in (list(PROMPTS[0]), [9], [44, 3]):
            ask = {"use_beam_search": True, "temperature": 0.0, "structured_outputs": {"choice": answers}}
            (found,) = run(llm, [prompt], SamplingParams(n=len(answers), **ask))
            assert {o.finish_reason for o in found.outputs} == {"stop"} and {o.text for o in found.outputs} <= {
                *answers
            }
        check_nothing_left(llm.engine)


def test_beams_that_nobody_can_say_end_with_a_reason(tiny):
    ask = {"use_beam_search": True, "temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
    with open_llm(tiny, max_num_seqs=4) as llm:
        (few,) = run(llm, [list(PROMPTS[0])], SamplingParams(n=3, allowed_token_ids=[7], **ask))
        (none,) = run(
            llm, [list(PROMPTS[0])], SamplingParams(n=2, allowed_token_ids=[7], no_repeat_ngram_size=1, **ask)
        )
        check_nothing_left(llm.engine)
    assert [o.finish_reason for o in few.outputs] == ["length", "error", "error"]
    assert "ask for n = 1 at most" in few.outputs[2].stop_reason
    assert {o.finish_reason for o in none.outputs} == {"error"} and "no token is left" in none.outputs[0].stop_reason
