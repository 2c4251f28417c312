"""Prompt dicts and parameters offline: what they say is done, or refused by name; nothing is dropped."""

from __future__ import annotations

import asyncio

import pytest
from tests.cpu.engine.engines import check_nothing_left, greedy, open_llm

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.errors import ParameterError
from tokenmill.engine.interfaces.prompts import PromptReader

IDS = [5 + i % 40 for i in range(70)]
SAID = [{"role": "user", "content": "one two three four five six seven eight nine ten " * 4}]
LOST = {
    "multi_modal_data": {"image": b"pixels"},
    "multi_modal_uuids": {"image": ["a"]},
    "mm_processor_kwargs": {"crops": 4},
    "prompt_embeds": [[0.5]],
    "token_type_ids": [0, 1],
    "encoder_prompt": "x",
    "decoder_prompt": "x",
    "cache_sal": "a",
    "prompt_tokens": [1],
    "priority": 3,
    "type": "token",
    7: "x",
}


@pytest.fixture(scope="module")
def llm(tiny):
    with open_llm(tiny) as made:
        yield made


@pytest.mark.parametrize("prompt", [{"prompt": "The mill"}, {"prompt_token_ids": IDS}], ids=["text", "ids"])
@pytest.mark.parametrize("name", LOST)
def test_keys_that_would_be_dropped_are_refused_by_name(llm, prompt, name):
    given = {**prompt, name: LOST[name]}
    for call in (llm.generate, llm.embed):
        with pytest.raises(ParameterError, match=repr(name)) as caught:
            call([{"prompt": "fine"}, given], use_tqdm=False)
        assert caught.value.param == str(name)
    check_nothing_left(llm.engine)


def test_empty_keys_of_other_engines_ask_for_nothing(llm):
    given = {"prompt_token_ids": IDS, "multi_modal_data": None, "mm_processor_kwargs": {}, "encoder_prompt": None}
    assert llm.generate(given, greedy(1), use_tqdm=False)[0].finished


def test_a_text_that_is_none_is_refused_beside_ids(llm):
    with pytest.raises(ParameterError, match="must be text"):
        llm.generate({"prompt": 3, "prompt_token_ids": IDS}, greedy(1), use_tqdm=False)


def cached(outputs) -> int:
    return outputs[0].num_cached_tokens


def test_a_salt_parts_prompts_in_generate(llm):
    def ask(**more):
        return cached(llm.generate({"prompt_token_ids": IDS, **more}, greedy(1), use_tqdm=False))

    llm.reset_prefix_cache()
    assert [ask(cache_salt="a"), ask(cache_salt="b"), ask()] == [0, 0, 0]
    assert ask(cache_salt="a") == ask(cache_salt="b") == ask(cache_salt=None) == 64


def test_a_salt_parts_prompts_in_chat_and_embed(llm):
    llm.reset_prefix_cache()
    first = [cached(llm.chat(SAID, greedy(1), use_tqdm=False, cache_salt=salt)) for salt in ("a", "b", None)]
    again = [cached(llm.chat(SAID, greedy(1), use_tqdm=False, cache_salt=salt)) for salt in ("a", "b", None)]
    assert first == [0, 0, 0] and min(again) >= 16
    llm.reset_prefix_cache()
    cache = llm.engine.scheduler.tables.cache
    for salt in ("x", "y"):
        llm.embed({"prompt_token_ids": IDS, "cache_salt": salt}, use_tqdm=False)
    assert len(cache.roots) == 2


@pytest.mark.parametrize("salt", ["", 7, "x" * 129, ["a"], b"a"])
def test_unusable_salts(llm, salt):
    for call in (
        lambda: llm.generate({"prompt": "x", "cache_salt": salt}, greedy(1), use_tqdm=False),
        lambda: llm.chat(SAID, greedy(1), use_tqdm=False, cache_salt=salt),
        lambda: llm.embed({"prompt": "x", "cache_salt": salt}, use_tqdm=False),
    ):
        with pytest.raises(ParameterError, match="1 to 128") as caught:
            call()
        assert caught.value.param == "cache_salt"


def test_the_streaming_engine_does_the_same(tiny):
    async def ask(llm: AsyncLLM, prompt) -> int:
        found = 0
        async for output in llm.generate(prompt, greedy(1)):
            found = output.num_cached_tokens
        return found

    async def chat(llm: AsyncLLM, **more) -> int:
        found = 0
        async for output in llm.chat(SAID, greedy(1), **more):
            found = output.num_cached_tokens
        return found

    async def main() -> None:
        options = {"dtype": "float32", "kernels": "reference", "max_model_len": 512, "kv_cache_memory_bytes": 1 << 22}
        async with AsyncLLM(str(tiny), **options) as llm:
            salted = [{"prompt_token_ids": IDS, "cache_salt": salt} for salt in "aba"]
            assert [await ask(llm, prompt) for prompt in salted] == [0, 0, 64]
            assert await chat(llm, cache_salt="a") == 0 == await chat(llm, cache_salt="b")
            with pytest.raises(ParameterError, match="multi_modal_data"):
                await ask(llm, {"prompt": "x", "multi_modal_data": {"image": 1}})
            with pytest.raises(ParameterError, match="would be lost"):
                await chat(llm, mood="merry")
            with pytest.raises(ParameterError, match="multi_modal_data"):
                await llm.embed({"prompt": "x", "multi_modal_data": {"image": 1}})

    asyncio.run(main())


@pytest.mark.parametrize(
    "part",
    [{"type": "input_audio", "input_audio": {}}, {"image": "x.png"}, {"text": "What?", "image_url": "x"},
     {"type": "video_url"}, {"type": "text", "text": "x", "file": {"id": 1}}],
    ids=repr,
)  # fmt: skip
def test_parts_that_are_no_text_are_refused_however_they_are_spelled(llm, part):
    with pytest.raises(ParameterError, match="reads text"):
        llm.chat([{"role": "user", "content": [part]}], greedy(1))


@pytest.mark.parametrize("name", ["images", "audio", "videos"])
def test_media_beside_the_text_of_a_message(llm, name):
    with pytest.raises(ParameterError, match=name):
        llm.chat([{"role": "user", "content": "What is this?", name: ["aGk="]}], greedy(1))


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 0.5), ("early_stopping", True)])
def test_fields_of_beams_alone(name, value):
    with pytest.raises(ParameterError, match="use_beam_search=True") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert SamplingParams(use_beam_search=True, n=2, temperature=0.0, **{name: value})


def test_a_budget_for_reasoning_needs_to_know_what_reasoning_is(llm):
    with pytest.raises(ParameterError, match="use chat"):
        llm.generate("x", greedy(1, thinking_token_budget=4), use_tqdm=False)
    assert llm.generate("x", greedy(1, thinking_token_budget=-1), use_tqdm=False)[0].finished
    assert PromptReader(None).read([1, 2]) == (None, [1, 2], "")
