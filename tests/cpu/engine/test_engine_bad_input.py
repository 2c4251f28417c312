"""What people get wrong is refused with a sentence that helps, and costs nobody else a byte."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu.engine.engines import BACKENDS, check_nothing_left, exact, greedy, run
from tests.cpu.engine.engines import open_usual as open_llm
from tests.thinned import WHOLE

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import SequenceError, TooLargeError, UserError
from tokenmill.engine.steps.admission import BusyError
from tokenmill.runner.drafts import Forgetful
from tokenmill.testing.tiny import make_tiny

NAN, INF = math.nan, math.inf
PARAMETERS = [
    *[({name: value}, name)
      for name in ("temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
                   "repetition_penalty", "length_penalty")
      for value in (NAN, INF, -INF, True, "1", None, -101.0)],
    *[({name: value}, name)
      for name in ("n", "best_of", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs",
                   "truncate_prompt_tokens") for value in (True, 1.5, "2", -(2**70))],
    *[({name: value}, name) for name in ("n", "best_of", "max_tokens") for value in (0, -1)],
    *[({"truncate_prompt_tokens": value}, "truncate_prompt_tokens") for value in (0, -2)],
    *[({name: 1}, name) for name in ("ignore_eos", "detokenize", "use_beam_search", "include_stop_str_in_output")],
    ({"top_p": 0.0}, "top_p"), ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"logprobs": -2}, "logprobs"),
    ({"stop": [1]}, "stop"), ({"stop": ["x"] * 17}, "stop"), ({"stop": ""}, "stop"), ({"stop": "x" * 300}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"stop_token_ids": "12"}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [True]}, "allowed_token_ids"),
    ({"logit_bias": {1: NAN}}, "logit_bias"), ({"logit_bias": {"a": 1.0}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"), ({"logits_processors": [3]}, "logits_processors"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"), ({"n": 3, "best_of": 2}, "best_of"),
    ({"n": 2, "temperature": 0.0}, "n"), ({"stop": "x", "detokenize": False}, "stop"),
    ({"use_beam_search": True, "n": 2, "temperature": 0.3}, "use_beam_search"),
    ({"reasoning": "think"}, "reasoning"), ({"early_stopping": "sometimes"}, "early_stopping"),
    ({"bad_words": [3]}, "bad_words"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "name"), PARAMETERS, ids=repr)
def test_unusable_parameters_are_named(given, name):
    with pytest.raises(UserError) as caught:
        SamplingParams(**given)
    assert caught.value.param == name
    assert str(caught.value)[-1] in ".'\"" and " " in str(caught.value)


@pytest.fixture(scope="module")
def llm(tiny):
    with open_llm(tiny, max_model_len=64, max_waiting=4) as made:
        made.before = exact(run(made, ["The mill"], greedy(8))[0])
        yield made


PROMPTS = {
    "empty text": ("", None, "empty"),
    "no ids": ({"prompt_token_ids": []}, None, "empty"),
    "too large an id": ({"prompt_token_ids": [1, 320]}, None, "320"),
    "negative id": ({"prompt_token_ids": [-1]}, None, "-1"),
    "boolean id": ({"prompt_token_ids": [True, 2]}, None, "True"),
    "float id": ({"prompt_token_ids": [1.0]}, None, "1.0"),
    "text as ids": ({"prompt_token_ids": "123"}, None, "list of integers"),
    "a number": (5, None, "int"),
    "nothing": (None, None, "NoneType"),
    "bytes": (b"abc", None, "list of integers"),
    "an empty dict": ({}, None, "prompt_token_ids"),
    "a list with None": ([None], None, "NoneType"),
    "over the context": ({"prompt_token_ids": [1] * 64}, None, "context length is 64"),
    "min_tokens over the context": (
        {"prompt_token_ids": [1] * 60}, {"max_tokens": None, "min_tokens": 5}, "min_tokens"),
    "min_tokens over what max_tokens is cut to": (
        {"prompt_token_ids": [1] * 60}, {"max_tokens": 9, "min_tokens": 5}, r"\(5\) is more than fits \(4\)"),
    "stop id": ("x", {"stop_token_ids": [320]}, "320"),
    "allowed id": ("x", {"allowed_token_ids": [999]}, "999"),
    "biased id": ("x", {"logit_bias": {320: 1.0}}, "320"),
    "too many beams": ("x", {"use_beam_search": True, "n": 9, "temperature": 0.0}, "max-num-seqs"),
    "beams in a structure without an end": (
        "x", {"use_beam_search": True, "n": 2, "temperature": 0.0, "ignore_eos": True,
              "structured_outputs": {"choice": ["a", "b"]}}, "leave out ignore_eos"),
    "unknown grammar": ("x", {"structured_outputs": {"poem": "a"}}, "poem"),
    "grammar as text": ("x", {"structured_outputs": "json"}, "dict"),
    "no choices": ("x", {"structured_outputs": {"choice": []}}, "choice"),
    "choices of numbers": ("x", {"structured_outputs": {"choice": [1]}}, "choice"),
}  # fmt: skip


@pytest.mark.parametrize("title", PROMPTS)
def test_unusable_requests_are_refused_before_any_work(title, llm):
    prompt, more, words = PROMPTS[title]
    steps = llm.engine.scheduler.counters.steps
    with pytest.raises(UserError, match=words):
        llm.generate(prompt, SamplingParams(**(more or {})), use_tqdm=False)
    with pytest.raises(UserError, match=words):  # a good one beside it is not begun either
        bad = prompt if isinstance(prompt, list) else [prompt]
        llm.generate(["fine", *bad], [SamplingParams(), SamplingParams(**(more or {}))], use_tqdm=False)
    assert llm.engine.scheduler.counters.steps == steps
    check_nothing_left(llm.engine)
    assert exact(run(llm, ["The mill"], greedy(8))[0]) == llm.before


def test_unusable_calls(llm):
    for call, words in (
        (lambda: llm.generate("x", {"temperature": 0}), "SamplingParams"),
        (lambda: llm.generate(["x", "y"], [SamplingParams()]), "2 prompts"),
        (lambda: llm.generate(["x", "y"], priority=[1]), "priorities"),
        (lambda: llm.generate("x", priority=[1]), "scheduling_policy"),
        (lambda: llm.chat([{"role": "user", "content": [{"type": "poem", "text": "x"}]}]), "part of type 'poem'"),
        (lambda: llm.chat([{"role": "user", "content": [{"type": "text", "txt": "x"}]}]), "needs 'text'"),
        (lambda: llm.generate("x", [None]), "SamplingParams"),
        (lambda: llm.chat([]), "messages"),
        (lambda: llm.chat(None), "messages"),
        (lambda: llm.chat("hello"), "messages"),
        (lambda: llm.chat(["hello"]), "message"),
        (lambda: llm.chat([{"role": "user", "content": "x"}], chat_template="{% for %}"), "template"),
        (lambda: llm.embed("x", pooling="max"), "pooling"),
        (lambda: llm.embed(""), "empty"),
        (lambda: llm.generate(["x"] * 5, greedy(2)), "try again"),
        (lambda: llm.embed(["x"] * 5), "try again"),
    ):
        with pytest.raises(UserError, match=words):
            call()
        check_nothing_left(llm.engine)
    with pytest.raises(BusyError):
        llm.generate(["x"] * 5, greedy(2))
    assert exact(run(llm, ["The mill"], greedy(8))[0]) == llm.before


def test_an_error_says_which_of_many_requests_it_is_about(llm):
    said, long = [{"role": "user", "content": "x"}], {"prompt_token_ids": [1] * 65}
    for call in (
        lambda: llm.generate(["x", "x", ""], greedy(2)),
        lambda: llm.generate(["x", "x", {"promt": "x"}], greedy(2)),
        lambda: llm.generate(["x", "x", long], greedy(2)),
        lambda: llm.chat([said, said, [{"role": "user", "content": 5}]], greedy(2)),
        lambda: llm.embed(["x", "x", 5]),
        lambda: llm.embed(["x", "x", long]),
    ):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.__notes__ == ["It is about request 2 of 3, counted from 0."]
    with pytest.raises(UserError) as caught:
        llm.generate("", greedy(2))
    assert not hasattr(caught.value, "__notes__")


def test_texts_that_cannot_fit_are_refused_unread(llm, monkeypatch):
    tokenizer = llm.get_tokenizer()
    most = 64 * tokenizer.longest_token
    cut = SamplingParams(max_tokens=2, truncate_prompt_tokens=5)
    (output,) = llm.generate("a" * (most + 1), cut, use_tqdm=False)  # its end fits
    assert len(output.prompt_token_ids) == 5
    with pytest.raises(TooLargeError, match=r"and at most [0-9]+ fit: shorten it"):
        llm.generate("a" * most, use_tqdm=False)

    def encode(*_, **__):
        raise AssertionError("it was read")

    monkeypatch.setattr(type(tokenizer.inner), "encode_batch", encode)
    for call in (
        lambda text: llm.generate(text, use_tqdm=False),
        lambda text: llm.generate({"prompt": text}, use_tqdm=False),
        lambda text: llm.chat([{"role": "user", "content": text}], use_tqdm=False),
        lambda text: llm.embed(text, use_tqdm=False),
    ):
        with pytest.raises(TooLargeError, match="at least 65 tokens"):
            call("a" * (most + 1))


def test_without_a_tokenizer_text_is_refused(tiny):
    with open_llm(tiny, skip_tokenizer_init=True) as llm:
        for call in (
            lambda: llm.generate("text"),
            lambda: llm.chat([{"role": "user", "content": "x"}]),
            lambda: llm.generate([[1, 2]], SamplingParams(stop="x")),
            lambda: llm.generate([[1, 2]], SamplingParams(bad_words=["x"])),
            lambda: llm.generate([[1, 2]], SamplingParams(structured_outputs={"choice": ["a"]})),
        ):
            with pytest.raises(UserError, match="tokenizer"):
                call()


def test_processors_and_traces_stay_in_this_process(tiny):
    with open_llm(tiny, executor="process") as llm:
        with pytest.raises(UserError, match="executor='inprocess'"):
            llm.start_profile()
        with pytest.raises(UserError, match="and executor='inprocess'"):
            llm.generate("x", SamplingParams(logits_processors=[lambda said, x: x]), use_tqdm=False)


OPTIONS = [
    ({"max_model_len": 0}, "max_model_len"), ({"block_size": 1.5}, "block_size"), ({"dtype": "int3"}, "dtype"),
    ({"kernel": "auto"}, "kernels"), ({"num_blocks": 2, "max_model_len": 64}, "room for 32"),
    ({"kv_cache_memory_bytes": 10}, "K/V cache"), ({"scheduling_policy": "lottery"}, "scheduling_policy"),
    ({"speculative_config": {"method": "magic"}}, "magic"), ({"speculative_config": {"metod": "ngram"}}, "metod"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 99}}, "num_speculative_tokens"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 65}}, "at most 64"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 0}, "depth": 2}, "at least 1"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_max": "4"}, "depth": 2}, "whole numbers"),
    ({"max_model_len": 99999999999}, "99999999999 is more than the 2048 tokens of this model's context"),
    ({"max_model_len": 2049, "hf_overrides": {"max_position_embeddings": 2048}}, "2049 is more than the 2048"),
    ({"max_model_len": 64, "num_blocks": 1}, "give more with --num-gpu-blocks-override"),
    ({"chat_template": "x"}, r"server's \(--chat-template\). Offline, give it to chat\(\)"),
    ({"pipeline_parallel_size": 65}, "at most 64"), ({"cpu_offload_gb": 4}, "cpu_offload_gb"),
    ({"quantization": "int99"}, "int99"), ({"model": "/nowhere/at/all"}, "nowhere"),
    ({"disable": "fusion", "num_blocks": 200}, "--disable fusion: only a GPU has these"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=repr)
@pytest.mark.parametrize("where", ["inprocess", "process"])
def test_unusable_options(options, words, where, tiny):
    if where == "process" and "num_blocks" not in options and "quantization" not in options:
        pytest.skip("refused before a process starts")
    with pytest.raises(UserError, match=words):
        LLM(**{"model": str(tiny), "executor": where, **options})


def edit_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


def lie(folder):
    file = folder / "model.safetensors"
    file.write_bytes((1 << 60).to_bytes(8, "little") + file.read_bytes()[8:])


def pickle_it(folder):
    import pickle

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": print}))


NORM = "model.norm.weight"
FOLDERS = {
    "unknown architecture": (lambda f: edit_config(f, architectures=["NoSuchLM"], model_type="nosuch"), "NoSuchLM"),
    "missing tensor": (lambda f: edit_tensors(f, lambda t: t.pop(NORM)), NORM),
    "surplus tensor": (lambda f: edit_tensors(f, lambda t: t.update(spare_part=torch.ones(2))), "spare_part"),
    "misshaped tensor": (lambda f: edit_tensors(f, lambda t: t.update({NORM: torch.ones(31)})), NORM),
    "truncated file": (lambda f: cut(f, 5000), "safetensors"),
    "truncated header": (lambda f: cut(f, 100), "safetensors"),
    "lying header": (lie, "safetensors"),
    "pickle": (pickle_it, "pytorch_model.bin"),
    "code of its own": (
        lambda f: edit_config(f, architectures=["MyLM"], model_type="my", auto_map={"AutoModelForCausalLM": "m.MyLM"}),
        "MyLM"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "heads that do not divide": (lambda f: edit_config(f, num_key_value_heads=3), "3"),
    "negative layers": (lambda f: edit_config(f, num_hidden_layers=-1), "num_hidden_layers"),
}  # fmt: skip


@pytest.mark.parametrize("title", FOLDERS)
def test_unusable_model_folders(title, tiny, tmp_path):
    change, words = FOLDERS[title]
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    change(folder)
    with pytest.raises(UserError, match=words):
        open_llm(folder, trust_remote_code=True)


# ---------------------------------------------------------------- NaN


@pytest.fixture(scope="module")
def poisoned(tiny, tmp_path_factory):
    """The tiny model, untied, whose token 7 has NaN for an embedding."""
    folder = tmp_path_factory.mktemp("nan") / "model"
    shutil.copytree(tiny, folder)
    edit_config(folder, tie_word_embeddings=False)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.embed_tokens.weight"][7] = NAN

    edit_tensors(folder, change)
    return folder


ROUGH = [{}, {"depth": 2}, {"num_blocks": 14, "max_model_len": 128}, {"executor": "process"},
         {"speculative_config": {"method": "ngram"}},
         {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}, "depth": 2}]  # fmt: skip
SOUND = [[t % 250 + 8 for t in range(s, s + n)] for s, n in ((3, 40), (90, 5), (3, 70), (200, 33))]


SLOWLY = ROUGH if WHOLE else [ROUGH[0], ROUGH[2]]
"""What the slow kernels run, too: alike in company, and in blocks that are used again soon."""


@pytest.mark.parametrize(
    ("backend", "options"),
    [(BACKENDS[-1], each) for each in ROUGH] + [(each, rough) for each in BACKENDS[:-1] for rough in SLOWLY],
    ids=str,
)
def test_nan_in_one_sequence_stays_there(backend, options, poisoned):
    params = greedy(20, logprobs=2)
    with open_llm(poisoned, kernels=backend) as llm:
        wanted = [exact(o) for o in run(llm, SOUND, params)]
    ill = [[*SOUND[0], 7, 9], [7], [*SOUND[2][:30], 7, *SOUND[2][31:]], [*SOUND[3][:20], *[7] * 20]]
    with open_llm(poisoned, kernels=backend, **options) as llm:
        for _ in range(3):  # again: blocks that held NaN are used by others
            mixed = [p for pair in zip(ill, SOUND, strict=True) for p in pair]
            outputs = run(llm, mixed, params)
            assert [exact(o) for o in outputs[1::2]] == wanted
            for output in outputs[::2]:
                assert output.outputs[0].finish_reason == "error"
                assert "NaN" in output.outputs[0].stop_reason
                assert output.outputs[0].token_ids == []
            check_nothing_left(llm.engine)
            assert [exact(o) for o in run(llm, SOUND[::-1], params)][::-1] == wanted
        with pytest.raises(SequenceError, match="Prompt 0"):
            llm.embed([{"prompt_token_ids": [8, 7]}], use_tqdm=False)
        check_nothing_left(llm.engine)


class Reckless:
    """Drafts the token whose embedding is NaN, on the host."""

    def propose(self, seq, most):
        return [7] * most

    def observe(self, seq, proposed, accepted):
        assert accepted == 0

    def forget(self, seq):
        pass


class RecklessOnDevice(Forgetful):
    """The same on a device."""

    most = 3

    def propose(self, step):
        places = step.rows.length[step.row_ids][:, None] + torch.arange(step.count)
        step.rows.tokens[step.row_ids[:, None], places] = 7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_nan_behind_a_wrong_draft_is_nobodys(backend, depth, poisoned):
    params = greedy(20, logprobs=2)
    with open_llm(poisoned, kernels=backend) as llm:
        wanted = [exact(o) for o in run(llm, SOUND, params)]
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with open_llm(poisoned, kernels=backend, depth=depth, speculative_config=drafts) as llm:
        llm.engine.scheduler.roster.drafter = Reckless()
        if depth > 1:
            llm.engine.executor.runner.drafter = RecklessOnDevice()
        assert [exact(o) for o in run(llm, SOUND, params)] == wanted
        counters = llm.engine.scheduler.counters
        assert counters.drafted > 100 and counters.accepted == 0
        check_nothing_left(llm.engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_does_not_travel_to_earlier_positions(backend, poisoned):
    """Position 40 is NaN; the blocks of positions 0 to 31, computed in the same step, serve others at once."""
    stem = SOUND[2][:40]
    with open_llm(poisoned, kernels=backend) as llm:
        wanted = exact(run(llm, [[*stem, 20]], greedy(10, logprobs=1))[0])
    for depth in (1, 2):
        with open_llm(poisoned, kernels=backend, depth=depth) as llm:
            outputs = run(llm, [[*stem, 7, 9], [*stem, 20], [*stem, 20]], greedy(10, logprobs=1))
            assert outputs[0].outputs[0].finish_reason == "error"
            assert outputs[1].num_cached_tokens == 32
            assert exact(outputs[1]) == exact(outputs[2]) == wanted
            (row,) = run(llm, [[*stem, 7]], greedy(1, prompt_logprobs=0))
            assert all(math.isfinite(e.logprob) for r in row.prompt_logprobs[1:] for e in r.values())


def test_a_token_that_only_settings_name_and_the_model_lacks_is_refused_where_a_prompt_holds_it(tmp_path):
    folder = make_tiny(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<nowhere>"}))
    with LLM(str(folder), device="cpu", max_model_len=64, num_blocks=32) as llm:
        assert max(llm.engine.admission.eos_ids) < 320
        with pytest.raises(UserError, match="token id 320, which is out of vocabulary"):
            llm.generate(["a<nowhere>b"], greedy(3), use_tqdm=False)
        talk = [{"role": "user", "content": "a<nowhere>b"}]  # what a person types is text
        assert len(llm.chat(talk, greedy(3), use_tqdm=False)[0].outputs[0].token_ids) == 3
