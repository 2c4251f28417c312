"""Samplers of llama.cpp's users in an engine: each composes with everything else, and gives the same bytes anywhere."""

from __future__ import annotations

import random

import pytest
from tests.cpu.engine.engines import BACKENDS, check_nothing_left, exact, follow, open_llm, run

from tokenmill import SamplingParams
from tokenmill.core.errors import ParameterError
from tokenmill.core.request import Request
from tokenmill.core.samplers import order_of
from tokenmill.engine.interfaces.prompts import make_request
from tokenmill.engine.steps.breakers import BreakerIndex

SHARP = 0.2
"""The tiny model's logits are close together: at this temperature a few tokens are likely and most are not."""
MILD = 0.6
SAMPLERS = {
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "dry with breakers": {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": [" mill", "e b"]},
    "xtc": {"temperature": SHARP, "xtc_probability": 0.5, "xtc_threshold": 0.02},
    "mirostat": {"temperature": SHARP, "mirostat": 1, "mirostat_tau": 0.7, "mirostat_eta": 0.3},
    "mirostat 2": {"temperature": SHARP, "mirostat": 2, "mirostat_tau": 0.7, "mirostat_eta": 0.3},
    "top-n-sigma": {"top_n_sigma": 1.5},
    "dynamic temperature": {"dynatemp_range": 0.9, "dynatemp_exponent": 2.0},
    "eta": {"eta_cutoff": 800.0},
    "epsilon": {"epsilon_cutoff": 80.0},
    "n-grams": {"no_repeat_ngram_size": 2},
    "window": {"repeat_last_n": 5, "repetition_penalty": 1.8, "frequency_penalty": 0.5},
    "top-a": {"top_a": 0.5},
    "smoothing": {"smoothing_factor": 0.5, "smoothing_curve": 2.0},
    "order": {"top_p": 0.7, "min_p": 0.02, "samplers": ["penalties", "top_k", "min_p", "top_p", "temperature"]},
    "temperature last": {"top_p": 0.7, "temperature_last": True},
}
COMPANIONS = (
    {"n": 3, "logprobs": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {7: 2.0}, "bad_words": ["mill"]},
    {"structured_outputs": {"regex": "(yes|no)( mill| flour){3,6}(, of course)?"}},
    {"temperature": 0.0, "prompt_logprobs": 1},
)
ROUGH = {
    "long_prefill_token_threshold": 7,
    "num_blocks": 17,
    "max_num_seqs": 12,
    "max_model_len": 256,
    "depth": 2,
    "speculative_config": {"method": "ngram", "prompt_lookup_min": 1},
}


def requests_of() -> list[Request]:
    rng = random.Random(3)
    stem = [rng.randrange(259) for _ in range(20)]
    made = []
    for title, fields in SAMPLERS.items():
        for i, companion in enumerate(COMPANIONS):
            more = {"temperature": MILD, "max_tokens": 18, "ignore_eos": i != 2, **fields, **companion}
            prompt = stem[: 3 + len(made) % 17] + [rng.randrange(9) for _ in range(12)]
            params = SamplingParams(seed=len(made), **more)
            made.append(make_request(f"{title} {i}", None, prompt, params, arrival=float(len(made))))
    return made


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_sampler_in_any_company_equals_itself_alone(backend, tiny):
    """With grammars, penalties, logprobs, samples, chunks, preemption, and drafts of the host and the device."""
    requests = requests_of() if backend == BACKENDS[-1] else requests_of()[::5]  # the other one is slow
    with open_llm(tiny, kernels=backend, enforce_eager=True) as llm:
        alone = {}
        for request in requests:
            alone |= follow(llm, [request], None)
    plans = {"drafts of the device": ROUGH, "drafts of the host": {**ROUGH, "depth": 1, "max_num_batched_tokens": 40}}
    for title, options in plans.items():
        with open_llm(tiny, kernels=backend, **options) as llm:
            found = follow(llm, requests, random.Random(title))
            counters = llm.engine.scheduler.counters
            assert counters.preemptions > 0 and counters.accepted > 0
            check_nothing_left(llm.engine)
        for request in requests:
            assert exact(found[request.id]) == exact(alone[request.id]), (title, request)


def test_every_sampler_changes_something(tiny):
    prompt = [5, 9, 200, 17, 5, 9, 200, 17, 5, 9]
    with open_llm(tiny) as llm:
        for title, fields in SAMPLERS.items():
            more = {"temperature": fields.get("temperature", MILD), "seed": 2, "max_tokens": 60, "ignore_eos": True}
            if title.startswith(("dry", "n-grams", "window")):  # among few tokens some repeat
                more["allowed_token_ids"] = [5, 9, 17, 200]
            with_it, without = run(llm, [prompt] * 2, [SamplingParams(**{**more, **fields}), SamplingParams(**more)])
            assert exact(with_it) != exact(without), title


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_goes_on_where_it_was(version, tiny):
    """What an engine that died has said comes with mu: the new one says what the old one would have said."""
    params = SamplingParams(temperature=1.1, seed=4, n=2, max_tokens=30, ignore_eos=True, mirostat=version)
    prompt = [5, 9, 200]
    with open_llm(tiny) as llm:
        said: list[list[int]] = [[], []]
        mus: list[list[float]] = [[], []]
        llm.engine.add(Request(id="whole", prompt_ids=prompt, params=params, seed=4))
        while llm.engine.has_work:
            for delta in llm.engine.step():
                said[delta.index] += delta.tokens
                mus[delta.index] += [delta.mu] * len(delta.tokens)
        assert len(set(mus[0])) > 20
        for cut in (1, 13, 29):
            emitted, state = [s[:cut] for s in said], [m[cut - 1] for m in mus]
            again = [list(tokens) for tokens in emitted]
            request = Request(id=f"cut {cut}", prompt_ids=prompt, params=params, seed=4, emitted=emitted, mus=state)
            llm.engine.add(request)
            while llm.engine.has_work:
                for delta in llm.engine.step():
                    again[delta.index] += delta.tokens
            assert again == said
        others = Request(id="lost", prompt_ids=prompt, params=params, seed=4, emitted=[s[:13] for s in said])
        llm.engine.add(others)
        lost = [s[:13] for s in said]
        while llm.engine.has_work:
            for delta in llm.engine.step():
                lost[delta.index] += delta.tokens
        assert lost != said, "mu does not matter here, so nothing was shown"


def test_breakers_are_found_in_tokens_and_across_them():
    texts = [b"a", b": ", b"x:", b"::", b"b:c", b"\xff", b":", b"ca", b"ab"]
    index = BreakerIndex(lambda: texts, lambda text: [100 + len(text)])
    assert index.find(":") == (([1, 2, 3, 4, 6], []),)
    assert index.find("ab") == (([8], []), ([0, 7], [101]))
    assert index.find("zz") == ()


def test_breakers_cost_what_lies_in_the_vocabulary():
    """A request may bring 32 breakers of 40 characters; an engine that looks through its vocabulary for each cut of
    each stands still for half a minute."""
    rng = random.Random(5)
    asked = []

    def encode(text):
        asked.append(text)
        return [len(text)]

    index = BreakerIndex(lambda: [b"ab", b"cab", b"zz"], encode)
    assert index.find("ab" + "x" * 38) == (([0, 1], [38]),) and asked == ["x" * 38]
    assert index.find("q" * 40) == () and len(asked) == 1
    for _ in range(300):  # the same as a search of everything
        texts = [bytes(rng.choice(b"ab:") for _ in range(rng.randint(0, 4))) for _ in range(rng.randint(1, 9))]
        index = BreakerIndex(lambda texts=texts: texts, encode)
        text = "".join(rng.choice("ab:") for _ in range(rng.randint(1, 4)))
        needle, wanted = text.encode(), []
        if within := [i for i, token in enumerate(texts) if needle in token]:
            wanted.append((within, []))
        for cut in range(1, len(text)):
            heads = [i for i, token in enumerate(texts) if token.endswith(needle[:cut]) and needle not in token]
            wanted += [(heads, [len(text) - cut])] if heads else []
        assert index.find(text) == tuple(wanted), (texts, text)


def test_nothing_repeats_across_a_breaker(tiny):
    """A bias makes one token win for ever; DRY ends that, unless the token is a breaker."""
    with open_llm(tiny) as llm:
        token = llm.get_tokenizer().encode(":", add_special_tokens=False)
        assert len(token) == 1
        common = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logit_bias": {token[0]: 60.0}}
        dry = {"dry_multiplier": 100.0, "dry_allowed_length": 1}
        free, broken, held = run(
            llm,
            [[5, 9]] * 3,
            [
                SamplingParams(**common),
                SamplingParams(**common, **dry),
                SamplingParams(**common, **dry, dry_sequence_breakers=[]),
            ],
        )
    assert free.outputs[0].token_ids == broken.outputs[0].token_ids == token * 12
    assert held.outputs[0].token_ids.count(token[0]) < 12


@pytest.mark.parametrize("ban", [{"no_repeat_ngram_size": 2}, {"bad_words": [" mill"]}, {"allowed_token_ids": [5, 9]}])
def test_what_is_forbidden_is_not_forced_by_a_grammar_either(ban, tiny):
    """Whether a plan was in flight decides if forced text is appended without a step: it may not decide the answer."""
    params = SamplingParams(max_tokens=40, structured_outputs={"regex": "yes mill mill mill mill"}, **ban)
    for depth in (1, 2):
        with open_llm(tiny, depth=depth) as llm:
            assert run(llm, [[5, 9]], [params])[0].outputs[0].finish_reason == "error"


BAD = {
    "top_n_sigma": -2.0,
    "xtc_probability": 1.5,
    "xtc_threshold": -0.1,
    "dry_base": 0.5,
    "dry_multiplier": float("nan"),
    "dry_allowed_length": -1,
    "dry_penalty_last_n": -2,
    "dry_sequence_breakers": [""],
    "repeat_last_n": -2,
    "mirostat": 3,
    "mirostat_tau": -1.0,
    "no_repeat_ngram_size": 1.5,
    "dynatemp_range": "a",
    "smoothing_curve": 0.5,
    "top_a": 2,
    "epsilon_cutoff": -1,
    "eta_cutoff": float("inf"),
    "samplers": ["top_k", "penalties"],
    "temperature_last": 1,
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_values_are_refused_by_name(name):
    with pytest.raises(ParameterError) as found:
        SamplingParams(**{name: BAD[name]})
    assert found.value.param == name and name in str(found.value)


@pytest.mark.parametrize("given", [["top_q"], "tfs", [3], ["dry", "dry"], ["top_k"] * 33, {"a": 1}, 3, "tkz"])
def test_unknown_orders_are_refused(given):
    with pytest.raises(ParameterError, match="samplers"):
        SamplingParams(samplers=given)


def test_orders_are_read_as_names_and_letters():
    names = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]

    def order(**more):
        return order_of(SamplingParams(temperature=0.5, top_k=9, top_p=0.9, **more))

    assert order(samplers=names) == order(samplers="edskypmxt") == ["top_k", "top_p", "temperature"]
    assert order(samplers=";".join(names), top_n_sigma=2.0)[0] == "top_n_sigma"
    assert order() is None and order(samplers="tkp") is None
    assert order(samplers="") == []
    assert order(temperature_last=True, smoothing_factor=1.0)[-2:] == ["temperature", "smoothing"]
    assert order_of(SamplingParams(temperature=0.5, samplers=names)) is None, "nothing but temperature is left"


@pytest.mark.parametrize("name", ["mirostat", "xtc_probability", "top_a"])
def test_beams_take_no_such_sampler(name):
    with pytest.raises(ParameterError, match=name):
        SamplingParams(use_beam_search=True, n=2, temperature=0.0, **{name: 1})
