"""The openai package (2.x and 3.x) against a running server: python tests/clients/openai_python.py URL KEY.

Every endpoint, and every field with what it must do, whole and streamed. Run by tests/clients/run.py.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any

import openai

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about the sea."}]
JSON_SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
Check = Callable[[Any], object]


def text_of(answer: Any) -> str:
    choice = answer.choices[0]
    return choice.message.content if hasattr(choice, "message") else choice.text


def ids_of(answer: Any) -> list[int]:
    return answer.choices[0].model_extra["token_ids"]


def anything(answer: Any) -> object:
    return answer.choices[0].finish_reason in ("stop", "length")


SHARED: dict[str, tuple[Any, Check]] = {
    "frequency_penalty": (0.5, anything),
    "presence_penalty": (0.5, anything),
    "repetition_penalty": (1.2, anything),
    "temperature": (0.8, anything),
    "top_p": (0.9, anything),
    "top_k": (5, anything),
    "min_p": (0.05, anything),
    "typical_p": (0.9, anything),
    "n": (3, lambda a: len(a.choices) == 3 and [c.index for c in a.choices] == [0, 1, 2]),
    "seed": (-5, anything),
    "stop": (["\n", "e"], lambda a: "e" not in text_of(a)),
    "stop_token_ids": ([0, 1], anything),
    "include_stop_str_in_output": (True, anything),
    "ignore_eos": (True, lambda a: a.usage.completion_tokens == 10),
    "min_tokens": (4, lambda a: a.usage.completion_tokens >= 4),
    "skip_special_tokens": (False, anything),
    "spaces_between_special_tokens": (False, anything),
    "truncate_prompt_tokens": (3, lambda a: a.usage.prompt_tokens == 3),
    "truncation_side": ("right", anything),
    "allowed_token_ids": ([70, 71], lambda a: set(ids_of(a)) <= {70, 71}),
    "bad_words": (["sea"], lambda a: "sea" not in text_of(a).split()),
    "logit_bias": ({"70": 100}, lambda a: set(ids_of(a)) == {70}),
    "structured_outputs": ({"choice": ["red", "blue"]}, lambda a: text_of(a) in ("red", "blue")),
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": JSON_SCHEMA}},
        lambda a: text_of(a).lstrip().startswith("{"),
    ),
    "priority": (-3, anything),
    "request_id": ("mine", lambda a: a.id.endswith("-mine")),
    "session_id": ("a session", anything),
    "cache_salt": ("someone", anything),
    "return_tokens_as_token_ids": (True, anything),
    "return_token_ids": (True, lambda a: len(ids_of(a)) == a.usage.completion_tokens),
    "timeout": (60, anything),
    "user": ("someone", anything),
    "stream_interval": (4, anything),
    "length_penalty": (1.0, anything),
    "unknown_field_of_a_newer_client": ({"x": 1}, anything),
}
CHAT: dict[str, tuple[Any, Check]] = {
    "max_tokens": (5, lambda a: a.usage.completion_tokens <= 5),
    "max_completion_tokens": (4, lambda a: a.usage.completion_tokens <= 4),
    "logprobs": (True, lambda a: len(a.choices[0].logprobs.content) == a.usage.completion_tokens),
    "reasoning_effort": ("low", anything),
    "add_generation_prompt": (False, anything),
    "add_special_tokens": (True, anything),
    "chat_template_kwargs": ({"enable_thinking": False}, anything),
    "parallel_tool_calls": (True, anything),
    "return_prompt_text": (True, lambda a: "sea" in a.model_extra["prompt_text"]),
}
COMPLETION: dict[str, tuple[Any, Check]] = {
    "max_tokens": (5, lambda a: a.usage.completion_tokens <= 5),
    "echo": (True, lambda a: text_of(a).startswith("Once upon")),
    "logprobs": (2, lambda a: len(a.choices[0].logprobs.tokens) == a.usage.completion_tokens),
    "add_special_tokens": (False, anything),
}


def chat_fields(client: openai.OpenAI, model: str) -> None:
    base = {"model": model, "messages": HELLO, "temperature": 0.0, "seed": 3, "max_tokens": 10}
    for name, (value, check) in {**SHARED, **CHAT}.items():
        extra = {**base, name: value, "return_token_ids": True, "logprobs": True, "top_logprobs": 1}
        if name in ("n", "top_p", "top_k", "min_p", "typical_p"):
            extra["temperature"] = 0.9
        if name == "max_completion_tokens":
            del extra["max_tokens"]
        one(client.chat.completions.create, extra, name, check, lambda c: c.choices[0].delta.content or "")
    try:  # its template would leave them out
        client.chat.completions.create(**base, extra_body={"documents": [{"title": "a", "text": "b"}]})
    except openai.BadRequestError as error:
        assert "documents" in str(error), error
    else:
        raise AssertionError("documents were taken, and nothing was made of them")


def completion_fields(client: openai.OpenAI, model: str) -> None:
    base = {"model": model, "prompt": "Once upon a time", "temperature": 0.0, "seed": 3, "max_tokens": 10}
    for name, (value, check) in {**SHARED, **COMPLETION}.items():
        extra = {**base, name: value, "return_token_ids": True}
        if name in ("n", "top_p", "top_k", "min_p", "typical_p"):
            extra["temperature"] = 0.9
        one(client.completions.create, extra, name, check, lambda c: c.choices[0].text)


def one(create: Any, fields: dict[str, Any], name: str, check: Check, text: Callable[[Any], str]) -> None:
    """The field works, and a stream says what a whole answer says."""
    known = inspect.signature(create).parameters.keys() - {"timeout"}  # (the client's own patience)
    plain = {k: v for k, v in fields.items() if k in known}
    plain["extra_body"] = {k: v for k, v in fields.items() if k not in known}
    whole = create(**plain)
    assert check(whole), (name, whole)
    said: dict[int, str] = {}
    usage = None
    for chunk in create(**plain, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        if chunk.choices:
            index = chunk.choices[0].index
            said[index] = said.get(index, "") + text(chunk)
    wanted = {c.index: text_of(type(whole).model_construct(choices=[c])) for c in whole.choices}
    assert said == wanted, (name, said, wanted)
    assert usage is not None and usage.total_tokens == whole.usage.total_tokens, name


def answers(client: openai.OpenAI, model: str) -> None:
    """Shapes that are not one field's."""
    base: Any = {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 8}
    scored = client.chat.completions.create(**base, logprobs=True, top_logprobs=3)
    row = scored.choices[0].logprobs.content[0]  # type: ignore[union-attr]
    assert len(row.top_logprobs) == 3 and row.token == row.top_logprobs[0].token and bytes(row.bytes or [])
    assert scored.usage is not None and scored.usage.prompt_tokens_details is not None
    assert scored.object == "chat.completion" and scored.model == model
    continued = client.chat.completions.create(
        model=model,
        messages=[*HELLO, {"role": "assistant", "content": "The sea is"}],
        temperature=0,
        max_tokens=5,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "echo": True},
    )
    assert (continued.choices[0].message.content or "").startswith("The sea is")
    parts = client.chat.completions.create(
        **{**base, "messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me about the sea."}]}]}
    )
    assert parts.choices[0].message.content
    running = list(
        client.chat.completions.create(
            **base, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )  # type: ignore[call-overload]
    )
    assert all(c.usage is not None for c in running) and running[-1].choices == []
    assert len({(c.id, c.created, c.model) for c in running}) == 1
    assert running[0].choices[0].delta.role == "assistant"
    raw = client.chat.completions.with_raw_response.create(**base, extra_headers={"X-Request-Id": "abc"})
    assert raw.headers["x-request-id"] == "abc" and raw.parse().id == "chatcmpl-abc"
    assert raw.parse().model_extra["metrics"]["time_to_first_token_ms"] > 0
    with client.chat.completions.stream(model=model, messages=HELLO, max_tokens=5) as stream:
        kinds = {event.type for event in stream}  # (the helper's final parse rejects answers cut by max_tokens)
    assert "chunk" in kinds


def prompts(client: openai.OpenAI, model: str) -> None:
    """Every form of a prompt, echo, scores of the prompt, beams, best_of."""
    common: Any = {"model": model, "max_tokens": 4, "temperature": 0}
    one_text = client.completions.create(**common, prompt="One")
    many = client.completions.create(**common, prompt=["One", "Two"], echo=True, logprobs=1)
    assert [c.index for c in many.choices] == [0, 1] and many.choices[0].text == "One" + one_text.choices[0].text
    assert many.choices[0].logprobs.token_logprobs[0] is None  # type: ignore[union-attr,index]
    as_ids = client.completions.create(**common, prompt="One", extra_body={"return_token_ids": True})
    given = as_ids.choices[0].model_extra["prompt_token_ids"]  # type: ignore[index]
    assert client.completions.create(**common, prompt=given).choices[0].text == one_text.choices[0].text
    assert len(client.completions.create(**common, prompt=[given, given]).choices) == 2
    only = client.completions.create(model=model, prompt="One Two", max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == "One Two" and only.usage.completion_tokens == 0  # type: ignore[union-attr]
    scored = client.completions.create(**common, prompt="One Two", extra_body={"prompt_logprobs": 1})
    assert scored.choices[0].model_extra["prompt_logprobs"][0] is None  # type: ignore[index]
    best = client.completions.create(model=model, prompt="One", max_tokens=4, best_of=3, n=2, temperature=1)
    assert len(best.choices) == 2
    beams = client.completions.create(**common, prompt="One", n=2, extra_body={"use_beam_search": True})
    assert len(beams.choices) == 2


def others(client: openai.OpenAI, model: str) -> None:
    assert model in [m.id for m in client.models.list()]
    assert client.models.retrieve(model).id == model
    vectors = client.embeddings.create(model=model, input=["a", "b"])
    floats = client.embeddings.create(model=model, input="a", encoding_format="float", dimensions=8)
    assert len(vectors.data) == 2 and len(floats.data[0].embedding) == 8
    assert abs(sum(x * x for x in vectors.data[0].embedding) - 1) < 1e-3
    assert len(client.embeddings.create(model=model, input=[[5, 6], [7]]).data) == 2
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    tokens = root.post("/tokenize", cast_to=object, body={"prompt": "One Two", "return_token_strs": True})
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    framed = root.post("/tokenize", cast_to=object, body={"messages": HELLO})
    assert framed["count"] > 5
    back = root.post("/detokenize", cast_to=object, body={"tokens": tokens["tokens"]})
    assert "One Two" in back["prompt"]
    assert root.get("/version", cast_to=object)["version"] and "server_load" in root.get("/load", cast_to=object)
    answer = client.completions.create(model=model, prompt="One", max_tokens=2)
    seen = client.get(f"/requests/{answer.id}", cast_to=object)
    assert seen["state"] == "ended" and seen["prompts"][0]["output_tokens"] == 2


def errors(client: openai.OpenAI, model: str) -> None:
    chat: Any = {"model": model, "messages": HELLO, "max_tokens": 2}
    text: Any = {"model": model, "prompt": "x", "max_tokens": 2}
    for kind, create, arguments in (
        (openai.NotFoundError, client.completions.create, {**text, "model": "missing"}),
        (openai.BadRequestError, client.completions.create, {**text, "suffix": "y"}),
        (openai.BadRequestError, client.completions.create, {**text, "max_tokens": 10**8}),
        (openai.BadRequestError, client.chat.completions.create, {**chat, "temperature": -1}),
        (openai.BadRequestError, client.chat.completions.create, {**chat, "messages": []}),
        (openai.BadRequestError, client.chat.completions.create, {**chat, "top_logprobs": 3}),
        (openai.BadRequestError, client.chat.completions.create, {**chat, "n": 10**6}),
        (openai.AuthenticationError, client.with_options(api_key="wrong").completions.create, text),
    ):
        for stream in (False, True):
            try:
                create(**arguments, stream=stream)
            except kind as error:
                assert error.status_code in (400, 401, 404) and error.message, arguments
            else:
                raise AssertionError(arguments)


async def several_at_once(url: str, key: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        found = await asyncio.gather(
            *(client.chat.completions.create(model=model, messages=HELLO, max_tokens=8) for _ in range(16))
        )
        async with asyncio.timeout(30):
            stream = await client.completions.create(model=model, prompt="One", max_tokens=500, stream=True)
            async for _ in stream:
                break
            await stream.close()
    assert len({a.id for a in found}) == 16


def main() -> None:
    url, key = sys.argv[1], sys.argv[2]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        model = client.models.list().data[0].id
        for part in (chat_fields, completion_fields, answers, prompts, others, errors):
            part(client, model)
    asyncio.run(several_at_once(url, key, model))
    print("openai", openai.__version__, "ok")


main()
