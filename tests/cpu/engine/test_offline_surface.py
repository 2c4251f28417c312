"""LLM as vLLM's programs use it: beams, vectors, scores, the tokenizer, and parameters as objects."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import MagicMock

import pytest
import tokenizers
import torch
from rich.console import Console
from tests.cpu.engine.engines import check_nothing_left, exact, greedy, open_llm, run
from transformers import AutoTokenizer

from tokenmill import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    GuidedDecodingParams,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.core.request import Request
from tokenmill.engine.steps.admission import Admission
from tokenmill.engine.steps.text import give_text
from tokenmill.testing.tiny import make_tiny
from tokenmill.text.codec import Tokenizer

SAID = [{"role": "user", "content": "x"}]
SMALL = {"max_num_seqs": 8, "max_model_len": 64, "num_blocks": 64}


@pytest.fixture(scope="module")
def llm(tiny):
    with open_llm(tiny, max_model_len=256) as llm:
        yield llm
        check_nothing_left(llm.engine)


@pytest.fixture(scope="module")
def theirs(tiny):
    return AutoTokenizer.from_pretrained(tiny)


def test_beam_search(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    found = llm.beam_search([{"prompt": "The mill"}, TokensPrompt(prompt_token_ids=[5, 6, 7])], params)
    plain = run(llm, ["The mill"], SamplingParams(use_beam_search=True, n=3, temperature=0.0, max_tokens=6,
                                                  ignore_eos=True))[0]  # fmt: skip
    first = found[0].sequences
    assert [s.tokens for s in first] == [plain.prompt_token_ids + out.token_ids for out in plain.outputs]
    assert [s.cum_logprob for s in first] == [out.cumulative_logprob for out in plain.outputs]
    assert all(s.text.startswith("The mill") and s.finish_reason == "length" for s in first)
    assert len(found) == 2 and found[1].sequences[0].tokens[:3] == [5, 6, 7]
    for bad in (SamplingParams(), {"beam_width": 2}, None):
        with pytest.raises(ParameterError, match="BeamSearchParams"):
            llm.beam_search("x", bad)
    with pytest.raises(ParameterError, match="temperature"):
        llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=3, temperature=0.5))


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_so_many_prompts_are_searched_at_the_same_time(llm, limit, monkeypatch):
    params, prompts = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True), ["The mill", "A", "The end"]
    whole = llm.beam_search(prompts, params)
    add, leave, open_now, most = llm.driver.add, llm.driver.leave, [], []

    def added(request, *rest):
        open_now.append(request.id)
        most.append(len(open_now))
        add(request, *rest)

    def left(names):
        open_now.clear()
        leave(names)

    monkeypatch.setattr(llm.driver, "add", added)
    monkeypatch.setattr(llm.driver, "leave", left)
    assert llm.beam_search(prompts, params, concurrency_limit=limit) == whole and max(most) == min(limit, 3)
    most.clear()
    with pytest.raises(UserError, match=r"vocabulary|token id"):
        llm.beam_search([*prompts[:2], [10**6]], params, concurrency_limit=limit)
    assert not most  # nothing was begun


@pytest.mark.parametrize("limit", [0, -1, True, "2", 1.5])
def test_a_limit_that_is_no_count_is_refused(llm, limit):
    with pytest.raises(ParameterError, match="concurrency_limit"):
        llm.beam_search("x", BeamSearchParams(beam_width=2, max_tokens=3), concurrency_limit=limit)


def test_vectors(llm):
    one, two = llm.embed(["The mill", [5, 6, 7]], use_tqdm=False)
    assert one.outputs.embedding == one.embedding and one.outputs.hidden_size == 32
    assert two.prompt_token_ids == [5, 6, 7]
    short = llm.embed("The mill", pooling_params=PoolingParams(dimensions=8))[0].embedding
    scale = sum(x * x for x in one.embedding[:8]) ** 0.5
    assert short == pytest.approx([x / scale for x in one.embedding[:8]])
    data = llm.encode("The mill")[0].outputs.data
    assert isinstance(data, torch.Tensor) and data.tolist() == pytest.approx(one.embedding)
    cut = llm.embed([list(range(9, 40))], truncate_prompt_tokens=3)[0]
    assert cut.prompt_token_ids == [37, 38, 39]
    assert len(llm.embed([[7] * 400], truncate_prompt_tokens=-1)[0].prompt_token_ids) == 256
    for given, words in (
        ({"pooling_params": PoolingParams(dimensions=99)}, "more than this model has"),
        ({"pooling_params": PoolingParams(normalize=False)}, "length 1"), ({"lora_request": 3}, "LoRARequest"),
        ({"pooling_params": 3}, "PoolingParams"), ({"mood": 1}, "no argument 'mood'"),
        ({"truncate_prompt_tokens": 0}, "positive"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            llm.embed("x", **given)
    with pytest.raises(ParameterError, match="head"):
        llm.encode("x", pooling_task="token_classify")


def test_scores_are_those_of_likelihoods_and_cosines(llm):
    texts = ["The mill grinds.", "A windy day."]
    vectors = [out.embedding for out in llm.embed(texts)]
    wanted = sum(a * b for a, b in zip(*vectors, strict=True))
    assert llm.score(texts[0], texts[1])[0].outputs.score == pytest.approx(wanted)
    assert [o.outputs.score for o in llm.score(texts[0], texts)] == pytest.approx([1.0, wanted])
    assert len(llm.score(texts, texts)) == 2
    judged = llm.score(texts[0], texts, method="likelihood", instruction="Same?")
    assert all(0.0 < out.outputs.score < 1.0 for out in judged)
    labels = ["wind", "bread", "war"]
    probs = llm.classify(texts, labels=labels)[1].outputs.probs
    assert sum(probs) == pytest.approx(1.0) and len(probs) == 3
    # What the model says of each label behind the question, by hand.
    tokenizer = llm.get_tokenizer()
    asked = f"Which label fits the text? Answer with the label alone.\nLabels: wind, bread, war\nText: {texts[1]}"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True)
    sums = []
    for label in labels:
        end = tokenizer.encode(label)
        rows = run(llm, [ids + end], greedy(1, prompt_logprobs=0))[0].prompt_logprobs[-len(end) :]
        sums.append(sum(row[token].logprob for row, token in zip(rows, end, strict=True)))
    assert probs == pytest.approx(torch.tensor(sums).softmax(0).tolist(), abs=1e-5)
    for call, words in (
        (lambda: llm.classify("x"), "labels="), (lambda: llm.classify("x", labels=["a"]), "at least two"),
        (lambda: llm.classify("x", labels=["a", "a"]), "differ"), (lambda: llm.score("x", []), "list of texts"),
        (lambda: llm.score(["x"] * 2, ["x"] * 3), "2 first texts and 3"), (lambda: llm.reward("x"), "reward head"),
        (lambda: llm.score("x", "y", method="magic"), "method"), (lambda: llm.score("x", "y", instruction="z"), "meth"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            call()


def test_labels_share_their_question(llm):
    """The question is computed once; each label adds what is left of the last block, and itself."""
    text, labels = "windy days " * 8, [f"label {i}" for i in range(12)]
    counters = llm.engine.scheduler.counters
    llm.reset_prefix_cache()
    before, cached = counters.prompt_tokens, counters.cached_tokens
    asked = llm.classify(text, labels=labels)[0].prompt_token_ids
    ends = [llm.built.tokenizer.encode(label, add_special_tokens=False) for label in labels]
    computed = counters.prompt_tokens - before
    assert len(asked) > 150 and computed + counters.cached_tokens - cached == sum(len(asked) + len(end) for end in ends)
    assert computed < 2 * len(asked) + sum(16 + len(end) for end in ends)


@pytest.mark.parametrize("start", [1, 2, 16, 17, 33, 39])
def test_scores_from_a_place_on_are_those_of_the_whole(llm, start):
    ids = [3 + i % 200 for i in range(40)]
    made = [llm._request(None, ids, greedy(1, prompt_logprobs=1), scored_from=at) for at in (0, start, start)]
    whole, *parts = [found.output().prompt_logprobs for found in llm._drive(made, False, None)]
    assert len(whole) == 40
    for part in parts:
        assert part[0] is None and part[1:] == whole[start:]


def test_labels_without_tokens_are_refused(llm, monkeypatch):
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **kw: [] if text == "b" else encode(self, text, **kw))
    with pytest.raises(ParameterError, match="no tokens"):
        llm.classify("x", labels=["a", "b"])


def test_structures_as_objects_and_by_their_older_name(llm):
    choice = StructuredOutputsParams(choice=["yes", "no"])
    for params in (
        SamplingParams(structured_outputs=choice), SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes"])),
        SamplingParams(guided_decoding={"choice": ["no"]}),
    ):  # fmt: skip
        assert isinstance(params.structured_outputs, dict)
        assert run(llm, ["x"], params)[0].outputs[0].text in ("yes", "no")
    later = SamplingParams(max_tokens=20)
    later.structured_outputs = StructuredOutputsParams(regex="[0-9]{3}")
    assert run(llm, ["x"], later)[0].outputs[0].text.isdigit()
    spaced = {"json": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, "backend": "xgrammar"}
    for switch in ("disable_any_whitespace", "disable_additional_properties"):
        made = StructuredOutputsParams(**spaced, **{switch: True})
        assert made.as_options() == {"json": spaced["json"], switch: True}
    closed = StructuredOutputsParams(**spaced, disable_any_whitespace=True, disable_additional_properties=True)
    (only,) = run(llm, ["x"], SamplingParams(structured_outputs=closed, temperature=2.0, seed=1, max_tokens=20))
    assert only.outputs[0].text == '{"a":1}'
    for make, words in (
        (lambda: StructuredOutputsParams(), "one of json"),
        (lambda: StructuredOutputsParams(regex="a", choice=["b"]), "one of"),
        (lambda: StructuredOutputsParams(jsn={}), "no field 'jsn'"),
        (lambda: SamplingParams(guided_decoding=choice, structured_outputs=choice), "older name"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=words):
            make()


def test_answers_end_where_the_context_ends(llm):
    out = run(llm, [[5] * 250], greedy(100))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (6, "length")
    assert len(run(llm, [[5] * 400], greedy(100, truncate_prompt_tokens=254))[0].outputs[0].token_ids) == 2
    fitting = run(llm, [[5] * 400], greedy(100, truncate_prompt_tokens=-1))[0]
    assert (len(fitting.prompt_token_ids), len(fitting.outputs[0].token_ids)) == (156, 100)


def test_without_detokenizing_there_is_no_text(llm):
    out = run(llm, [[5, 6]], greedy(4, logprobs=1, prompt_logprobs=1, detokenize=False))[0]
    rows = [*out.outputs[0].logprobs, *out.prompt_logprobs[1:]]
    assert out.outputs[0].text == "" and all(lp.decoded_token is None for row in rows for lp in row.values())


@pytest.mark.parametrize("prefix", ["", " "])
def test_bad_words_hold_at_the_start_of_an_answer(llm, prefix):
    tokenizer = llm.get_tokenizer()
    word = "mill"
    ids = tokenizer.encode(prefix + word)
    forced = {"temperature": 0.0, "max_tokens": len(ids), "ignore_eos": True}

    def likely(said, logits):
        bump = torch.zeros_like(logits)
        bump[ids[min(len(said), len(ids) - 1)]] = 100.0
        return logits + bump  # what is forbidden stays so

    free, held = ([likely], None), ([likely], [word])
    texts = [
        run(llm, ["The"], SamplingParams(**forced, logits_processors=f, bad_words=words))[0].outputs[0].text
        for f, words in (free, held)
    ]
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert counted["tokenmill:logits_processor_tokens"] >= 2 * len(ids)
    assert texts[0] == prefix + word and word not in texts[1]


def test_bad_words_of_a_vocabulary_that_puts_a_space_before_a_text():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁mill": 0, "mill": 1, "▁": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    admission = Admission(vocab_size=4, max_model_len=9, max_rows=1, max_waiting=1)
    give_text(admission, Tokenizer(inner), 0.0)
    group = admission.check(Request(id="a", prompt_ids=[2], params=SamplingParams(bad_words=["mill"], max_tokens=2)), 0)
    assert {(0,), (1,)} <= {tuple(word) for word in group.sampling.bad_words}  # behind a space, and at the start


def test_parameters_that_skip_the_cache(llm):
    prompt = [list(range(20, 60))]
    run(llm, prompt, greedy(2))
    assert run(llm, prompt, greedy(2))[0].num_cached_tokens >= 16
    assert run(llm, prompt, greedy(2, skip_reading_prefix_cache=True))[0].num_cached_tokens == 0


def test_the_tokenizer_refuses_what_is_no_id(llm):
    ours = llm.get_tokenizer()
    size = llm.built.facts.vocab_size
    assert isinstance(ours.decode([size - 1]), str) and ours.decode([]) == ""
    assert ours.convert_ids_to_tokens(10**9) is None
    for wrong in (size, -1, 1 << 70):
        for ids in (wrong, [1, wrong], [[1], [wrong]]):
            with pytest.raises(UserError, match=f"outside the vocabulary of {size}"):
                ours.decode(ids)
    for wrong in ("5", 1.5, None, True):
        for call in (ours.decode, ours.convert_ids_to_tokens, lambda ids: ours.batch_decode([ids])):
            with pytest.raises(UserError, match="must be integers"):
                call([1, wrong])
    for wrong in ("5", 1.5, None):
        with pytest.raises(UserError, match="must be integers"):
            ours.decode(wrong)


def test_the_tokenizer_is_transformers_like(llm, theirs):
    ours = llm.get_tokenizer()
    texts = ["The mill grinds grain.", "é 中 \U0001f600", "", "<|im_start|>user"]
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids == ours(text).input_ids and ours.tokenize(text) == theirs.tokenize(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        assert ours.convert_tokens_to_ids(ours.convert_ids_to_tokens(ids)) == ids
    assert ours.batch_decode([[5, 6], [7]]) == theirs.batch_decode([[5, 6], [7]])
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.vocab_size == theirs.vocab_size and ours.get_added_vocab() == theirs.get_added_vocab()
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert set(ours.all_special_ids) >= set(theirs.all_special_ids)
    assert ours.convert_tokens_to_string(theirs.tokenize(texts[0])) == texts[0]
    many = ours(texts[:2], padding=True, return_tensors="pt")
    assert many.input_ids.shape == many.attention_mask.shape and int(many.attention_mask[0].sum()) == len(
        theirs.encode(texts[0]))  # fmt: skip
    talk = [{"role": "user", "content": "Hello"}]
    for more in ({}, {"add_generation_prompt": True}):
        assert ours.apply_chat_template(talk, tokenize=False, **more) == theirs.apply_chat_template(
            talk, tokenize=False, **more)  # fmt: skip
        assert ours.decode(ours.apply_chat_template(talk, **more)) == ours.apply_chat_template(
            talk, tokenize=False, **more)  # fmt: skip
    assert ours.apply_chat_template([talk, talk], return_dict=True).input_ids[1] == ours.apply_chat_template(talk)
    with pytest.raises(AttributeError):
        ours.no_such_thing  # noqa: B018
    for call, words in (
        (lambda: ours(3), "text"), (lambda: ours(texts, return_tensors="pt"), "different lengths"),
        (lambda: ours("x", return_tensors="tf"), "'pt' or 'np'"), (lambda: ours.apply_chat_template([]), "message"),
        (lambda: ours("x", text_pair="y"), "text_pair"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            call()


def test_what_rests_on_features_to_come_says_what_to_use(llm):
    adapter = LoRARequest("sql", 1, "/somewhere")
    for call, words in (
        (lambda: llm.generate("x", lora_request=adapter), "loaded without adapters"),
        (lambda: llm.beam_search("x", BeamSearchParams(beam_width=1, max_tokens=1), lora_request=adapter), "adapters"),
        (lambda: llm.generate("x", prompt_adapter_request=3), "prompt adapters are not built"),
        (lambda: llm.sleep(), "enable_sleep_mode"), (lambda: llm.collective_rpc("no_such"), "no method 'no_such'"),
        (lambda: llm.generate("x", tokenization_kwargs={"a": 1}), "tokenization_kwargs.*truncate_prompt_tokens"),
        (lambda: llm.generate("x", chat_template="{{ 1 }}"), "only chat"),
        (lambda: llm.score("x", "y", chat_template="{{ 1 }}"), "only chat"),
        (lambda: llm.score("x", "y", score_template="{{ 1 }}"), "score_template.*instruction"),
        (lambda: llm.classify("x", labels=["a"], pooling_params=PoolingParams()), "pooling_params.*vectors"),
        (lambda: llm.classify("x", pooling_params=None, truncate_prompt_tokens=None), "labels="),
        (lambda: llm.chat(SAID, chat_template_content_format="strng"), "auto, string or openai"),
        (lambda: llm.generate(["x"], prompt_token_ids=[[5], [6]]), "1 prompts but 2 prompt_token_ids"),
        (lambda: llm.stop_profile(), "start_profile"),
        (lambda: llm.collective_rpc(print, timeout=5), "timeout = 5 cannot be used.*in this thread"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            call()
    with pytest.raises(AttributeError, match="tokenizer= to the constructor"):
        llm.set_tokenizer(None)
    with pytest.raises(AttributeError, match="facts what was loaded"):
        llm.llm_engine.model_config  # noqa: B018
    assert llm.llm_engine.built.facts.max_model_len == 256
    with pytest.raises(AttributeError, match="LLM has it"):
        llm.llm_engine.get_tokenizer()
    assert not hasattr(llm, "no_such_thing") and llm.get_world_size() == 1
    assert llm.wake_up() is None and llm.reset_mm_cache() is None
    out = llm.generate("x", greedy(2), use_tqdm=False, lora_request=None, prompt_adapter_request=None)
    older = llm.generate(prompt_token_ids=[[5, 6]], sampling_params=greedy(2), use_tqdm=MagicMock())
    assert len(out) == 1 and older[0].prompt_token_ids == [5, 6] and llm.generate(prompt_token_ids=[]) == []
    (both,) = llm.generate("its text", greedy(2), False, prompt_token_ids=[5, 6])
    assert (both.prompt, both.outputs[0].text) == ("its text", older[0].outputs[0].text)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: LoRARequest("a", 1, "p", load_inplace=True), "load_inplace.*another name"),
        (lambda: LoRARequest("a", 1, tensorizer_config_dict={"a": 1}), "tensorizer_config_dict"),
        (lambda: LoRARequest("a", 1, "p", lora_paths="q"), "Did you mean 'lora_path'"),
        (lambda: PoolingParams(step_tag_id=3), "step_tag_id.*heads"),
        (lambda: PoolingParams(activation=False).check(), "use_activation=False"),
        (lambda: SamplingParams(num_beams=2), "beam_search"),
        (lambda: SamplingParams(response_format={"type": "json_object"}), "structured_outputs"),
        (lambda: SamplingParams(stop_reason=None), "Leave it out"),
    ],
)
def test_fields_that_are_not_there_are_refused_by_name(make, told):
    with pytest.raises(ParameterError, match=told):
        make()


def test_fields_of_vllm_that_ask_for_nothing_are_taken():
    plain = LoRARequest("a", 1, "p")
    more = {"base_model_name": "m", "load_inplace": False, "tensorizer_config_dict": None}
    assert LoRARequest("a", 1, "p", **more) == plain == LoRARequest("a", 1, lora_local_path="p")
    assert (plain.name, plain.adapter_id, plain.path) == ("a", 1, "p")
    assert PoolingParams(output_kind=RequestOutputKind.FINAL_ONLY, softmax=None, activation=None) == PoolingParams()
    assert (
        SamplingParams(logprob_token_ids=None, guided_decoding=None, routed_experts_prompt_start=0) == SamplingParams()
    )
    assert SamplingParams(seed=-1, skip_reading_prefix_cache=None) == SamplingParams()
    given = {"enable_prefix_caching": None, "enable_chunked_prefill": None, "kv_cache_dtype_skip_layers": []}
    assert EngineArgs(profiler_config={}, offload_num_in_group=1, **given).config() == EngineArgs().config()
    assert GuidedDecodingParams.from_optional(json=None, choice=["a"], backend=None).choice == ["a"]
    assert GuidedDecodingParams.from_optional(backend="xgrammar") is None


def test_the_model_and_its_worker(llm, tmp_path):
    assert llm.apply_model(lambda model: len(model.layers)) == [2]
    assert llm.collective_rpc(lambda worker, a, b=0: (type(worker).__name__, a, b), args=(1,), kwargs={"b": 2}) == [
        ("Runner", 1, 2)]  # fmt: skip
    assert llm.collective_rpc("warm") == [None]
    llm.start_profile(str(tmp_path / "deep" / "trace"))
    with pytest.raises(UserError, match="already"):
        llm.start_profile()
    run(llm, ["x"], greedy(2))
    assert json.loads(llm.stop_profile().read_text())["traceEvents"]


@pytest.mark.parametrize("engine", [LLMEngine, AsyncLLMEngine])
@pytest.mark.parametrize("given", [{"stat_loggers": [print]}, {"stat_logger": None}])
def test_what_engines_are_made_with_has_an_effect_or_is_refused(tiny, engine, given):
    with pytest.raises(ParameterError, match=next(iter(given))):
        engine.from_engine_args(EngineArgs(model=str(tiny)), enable_multiprocessing=False, **given)


def test_an_engine_by_hand(tiny):
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny), swap_space=4, seed=0, **SMALL))
    engine.add_request("a", "The mill", greedy(5))
    engine.add_request("b", {"prompt_token_ids": [5, 6]}, SamplingParams(n=2, max_tokens=3, seed=1))
    with pytest.raises(ParameterError, match="in use"):
        engine.add_request("a", "again", None, None, None, prompt_text=None, trace_headers={}, priority=0)
    for given in ({"arrival_time": 1.0}, {"tokenization_kwargs": {"a": 1}}, {"prompt_adapter_request": 3}):
        with pytest.raises(ParameterError, match=next(iter(given))):
            engine.add_request("c", "again", **given)
    finished, seen = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen += 1
            if output.finished:
                finished[output.request_id] = output
    assert len(finished["a"].outputs[0].token_ids) == 5 and len(finished["b"].outputs) == 2 and seen > 5
    engine.add_request("c", "x", greedy(30))
    engine.step()
    engine.abort_request("c")
    assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0
    check_nothing_left(engine.driver.engine)
    engine.close()
    misspelt, unbuilt = ({"swap_spce": 1}, "Did you mean 'swap_space'"), ({"enable_prompt_adapter": True}, "adapters")
    for given, words in (misspelt, unbuilt):
        with pytest.raises(ParameterError, match=words):
            EngineArgs(model=str(tiny), **given)
    assert "hush" not in repr(EngineArgs(hf_token="hush")) and EngineArgs(num_blocks=3) == EngineArgs(num_blocks=3)


def added_up(pieces: list) -> tuple:
    """What outputs of DELTA give together."""
    texts, sums = {}, {}
    for piece in pieces:
        for out in piece.outputs:
            texts[out.index] = texts.get(out.index, "") + out.text
            sums[out.index] = out.cumulative_logprob
    rows = [row for piece in pieces for row in piece.prompt_logprobs or []]
    return texts, sums, rows, pieces[0].num_cached_tokens


@pytest.mark.parametrize("given", [{"n": 2, "logprobs": 0}, {"best_of": 3}, {"prompt_logprobs": 1}], ids=repr)
def test_a_step_and_a_stream_tell_what_output_kind_asks_for(given, tiny):
    made = {kind: SamplingParams(seed=1, max_tokens=6, output_kind=kind, **given) for kind in RequestOutputKind}
    told: dict = {kind: [] for kind in RequestOutputKind}
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tiny), dtype="float32", **SMALL))
    for kind, params in made.items():
        engine.add_request(kind.name, "The mill", params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            told[RequestOutputKind[output.request_id]].append(output)
    engine.close()

    async def streams() -> dict:
        async with AsyncLLM(str(tiny), dtype="float32", **SMALL) as streaming:
            return {kind: [each async for each in streaming.generate("The mill", p)] for kind, p in made.items()}

    for found in (told, asyncio.run(streams())):
        (final,) = found[RequestOutputKind.FINAL_ONLY]
        assert all(each.outputs for kind in found for each in found[kind]) and len(final.outputs) == given.get("n", 1)
        assert exact(found[RequestOutputKind.CUMULATIVE][-1]) == exact(final)
        wanted = added_up([final])
        assert added_up(found[RequestOutputKind.DELTA]) == wanted and wanted[0][0]


def test_the_engine_of_an_llm_is_always_the_same(llm):
    llm.llm_engine.add_request("open", "The mill", greedy(5))
    with pytest.raises(ParameterError, match="in use"):
        llm.llm_engine.add_request("open", "again")
    name = str(int(llm.generate("x", greedy(1), use_tqdm=False)[0].request_id) + 1)
    llm.llm_engine.add_request(name, "The mill", greedy(5))  # what generate would have called its next request
    assert llm.generate("x", greedy(1), use_tqdm=False)[0].request_id != name
    found = {}
    while llm.llm_engine.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.llm_engine.step()}
    assert {each: len(output.outputs[0].token_ids) for each, output in found.items()} == {"open": 5, name: 5}


async def test_what_an_async_engine_yields(tiny):
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(tiny), disable_log_requests=True, **SMALL))
    outputs = {}
    try:
        for kind in RequestOutputKind:
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, output_kind=kind)
            outputs[kind] = [output async for output in engine.generate("The mill", params, kind.name)]
        await engine.check_health()
        assert (await engine.get_tokenizer()).eos_token == "<|im_end|>" and await engine.reset_prefix_cache()
    finally:
        engine.shutdown()
    whole = outputs[RequestOutputKind.CUMULATIVE][-1].outputs[0]
    (final,) = outputs[RequestOutputKind.FINAL_ONLY]
    pieces = outputs[RequestOutputKind.DELTA]
    assert final.outputs[0].text == whole.text == "".join(p.outputs[0].text for p in pieces) and final.finished
    assert [t for p in pieces for t in p.outputs[0].token_ids] == whole.token_ids and len(pieces) > 2
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(len(p.outputs[0].logprobs) for p in pieces) == 6


def test_defaults_may_be_replaced(tiny, tmp_path):
    with open_llm(tiny, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with open_llm(tiny, override_generation_config={"do_sample": True, "temperature": 0.5}) as llm:
        assert llm.get_default_sampling_params().temperature == 0.5
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    with open_llm(tiny, generation_config=str(tmp_path)) as llm:
        assert llm.get_default_sampling_params().top_k == 7


def test_a_bar_of_the_callers_own_is_told_and_closed(llm):
    made = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total, self.seen, self.closed = total, 0, False
            made.append(self)

        def update(self, count: int) -> None:
            self.seen += count

        def close(self) -> None:
            self.closed = True

    prompts = [{"prompt_token_ids": [5 + i]} for i in range(3)]
    llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=Bar)
    llm.embed(prompts, use_tqdm=Bar)
    assert [(bar.total, bar.seen, bar.closed) for bar in made] == [(3, 3, True)] * 2
    with pytest.raises(ParameterError, match="use_tqdm"):
        llm.embed("a", "b")


def test_a_bar_is_for_terminals_and_never_among_what_a_program_prints(llm, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr(Console, "is_terminal", terminal)
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as beside:
            llm.generate([[5], [6]], greedy(2))
        assert printed.getvalue() == "" and ("Generating" in beside.getvalue()) == terminal


def test_a_vector_fills_the_context_and_the_smallest_cache(tmp_path):
    """It needs no room for an answer, which a text does."""
    folder, ids = make_tiny(tmp_path / "tiny"), [7 * i % 300 for i in range(129)]
    options = {"device": "cpu", "dtype": "float32"}
    with LLM(str(folder), max_model_len=256, num_blocks=32, **options) as llm:
        wanted = llm.embed([ids[:128]], use_tqdm=False)[0].embedding
    with LLM(str(folder), max_model_len=128, num_blocks=8, **options) as llm:
        for found in llm.embed([ids[:128]] * 3, use_tqdm=False):
            assert found.embedding == pytest.approx(wanted, abs=1e-6)
        with pytest.raises(UserError, match="has 129 tokens, and at most 128 fit"):
            llm.embed([ids], use_tqdm=False)
        with pytest.raises(UserError, match="has 128 tokens, and at most 127 fit"):
            llm.generate([{"prompt_token_ids": ids[:128]}], use_tqdm=False)
