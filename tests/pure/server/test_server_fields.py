"""Every name in a request is done, refused by name, harmless, or told: the lists, the headers and --strict-fields."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ValidationError

from tests.cpu_time import least_cpu_time
from tests.pure.server.conftest import Served, Starter
from tests.pure.server.server_fields_done_helpers import BASES, UNDER
from tokenmill.core.errors import ParameterError, UserError
from tokenmill.core.object_rules import Refusal
from tokenmill.core.unread_names import MOST_CHARS, MOST_TOLD, Unknown, judge_names
from tokenmill.server.bodies import validated
from tokenmill.server.errors import HttpError
from tokenmill.server.inputs.companions import COMPANIONS
from tokenmill.server.inputs.harmless import HARMLESS
from tokenmill.server.inputs.headers import DONE_HEADERS, HARMLESS_HEADERS, TOLD_HEADERS
from tokenmill.server.inputs.refused import GENERATING, REFUSED
from tokenmill.server.inputs.schema_names import parts, schema_name, spellings
from tokenmill.server.openai.schemas import CompletionRequest
from tokenmill.server.request_rules import ALIASES, ENDPOINTS, OBJECTS, make_request_rules
from tokenmill.testing.fake_generator import FakeOptions
from tokenmill.testing.hostile import TALK

RULES = make_request_rules()
TOP = {schema_name(schema): path for path, schemas in ENDPOINTS.items() for schema in schemas}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "fields.md"
FOREIGN = {
    "tfs_z": 0.5,
    "dynamic_temperature": True,
    "sampler_priority": ["top_k"],
    "encoder_no_repeat_ngram_size": 3,
    "penalty_alpha": 0.6,
    "repetition_penalty_range": 64,
    "guidance_scale": 2.0,
    "stop_regex": "a+",
    "kv_transfer_params": {"a": 1},
    "logits_processors": ["a"],
    "n_probs": 3,
    "num_beams": 4,
    "num_return_sequences": 2,
    "suppress_tokens": [5],
    "mirostat_target": 3.0,
    "prompt_truncate_len": 5,
    "search_parameters": {"mode": "on"},
    "extra_body": {"top_k": 3},
    "enable_thinking": False,
    "lora_path": "a",
    "rid": "a",
}
"""What users of other engines send, with values that have an effect there."""
WRITERS = [name for name in BASES if GENERATING.keys() <= RULES[name].refused.keys()]


def wrapped(object_name: str, change: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A path, and a body with these names added where the object lies."""
    path, body = BASES[object_name]
    return path, {**body, UNDER[object_name]: change} if object_name in UNDER else {**body, **change}


BESIDE: dict[str, tuple[Any, Any, Any]] = {
    "truncation_side": ("right", None, 3),
    "stream_interval": (3, False, True),
    "return_tokens_as_token_ids": (True, False, True),
    "truncation_direction": ("left", False, True),
}
"""Fields that need another one: a value, and values of the other without and with which it acts."""


@pytest.mark.parametrize("object_name", COMPANIONS)
def test_a_field_that_acts_only_beside_another_is_refused_without_it_or_harmless(object_name: str) -> None:
    for name, companion in RULES[object_name].companions.items():
        value, without, beside = BESIDE.get(name, ("a", companion.void[0], "another"))
        for other in (without, *(companion.void if name not in BESIDE else (None,))):
            given = {name: value, companion.other: other}
            if companion.harmless:
                judge_names(given, RULES[object_name], Unknown())
                continue
            with pytest.raises(ParameterError, match="has no effect with") as caught:
                judge_names(given, RULES[object_name], Unknown())
            assert caught.value.param == name
        for neutral in (None, *companion.neutral):
            judge_names({name: neutral, companion.other: without}, RULES[object_name], Unknown())
        judge_names({name: value, companion.other: beside}, RULES[object_name], Unknown())


def test_log_probabilities_of_no_alternatives_are_log_probabilities() -> None:
    judge_names({"return_tokens_as_token_ids": True, "logprobs": 0}, RULES["openai.CompletionRequest"], Unknown())


@pytest.mark.parametrize(("path", "body", "name"), [
    ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces"),
    ("/tokenize", {"prompt": "a", "parse_special": False}, "parse_special"),
    ("/tokenize", {"prompt": "a", "tools": [{"function": {"name": "f"}}]}, "tools"),
    ("/tokenize", {"messages": TALK, "add_special": True}, "add_special"),
    ("/tokenize", {"content": "a", "return_token_strs": True}, "return_token_strs"),
    ("/tokenize", {"content": "a", "add_special_tokens": False}, "add_special_tokens"),
    ("/tokenize", {"content": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ("/generate", {"inputs": "a", "stream": True}, "stream"),
    ("/generate_stream", {"inputs": "a", "stream": False}, "stream"),
    ("/v2/models/fake/generate", {"text_input": "a", "parameters": {"stream": True}}, "stream"),
    ("/v2/models/fake/generate_stream", {"text_input": "a", "parameters": {"stream": False}}, "stream"),
    ("/generate", {"inputs": "a", "parameters": {"top_n_tokens": 2}}, "top_n_tokens"),
    ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
    ("/v1/score", {"text_1": "a", "documents": ["b"], "items": ["c"]}, "items"),
    ("/score", {"data_1": "a", "text_1": "b", "text_2": "c"}, "data_1"),
    ("/score", {"data_1": "a", "data_2": "c", "use_activation": False}, "use_activation"),
    ("/rerank", {"query": "a", "documents": ["b"], "texts": ["c"]}, "texts"),
    ("/classify", {"input": "a", "labels": ["b", "c"], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64", "endianness": "big"}, "endianness"),
    ("/api/show", {"model": "fake", "name": "other"}, "name"),
])  # fmt: skip
async def test_what_one_form_of_a_request_does_not_read_is_refused_by_name(
    start: Starter, path: str, body: dict[str, Any], name: str
) -> None:
    refused = await (await start()).post(path, body)
    assert refused.status_code == 400 and name in refused.text


async def ignored(served: Served) -> dict[str, float]:
    """tokenmill:ignored_fields by its label."""
    text = (await served.client.get("/metrics")).text
    families = [f for f in text_string_to_metric_families(text) if f.name == "tokenmill:ignored_fields"]
    return {s.labels["plan"]: s.value for f in families for s in f.samples if s.name.endswith("_total")}


def test_every_path_that_takes_a_body_is_listed(start: Starter) -> None:
    from fastapi import FastAPI

    from tokenmill.server.app import APIS

    app = FastAPI()
    for api in APIS:
        if api.generating or api.prefixes:
            api.add(app, MagicMock())
    found = {
        route.path: route.openapi_extra["requestBody"]["content"]["application/json"]["schema"]["title"]
        for route in app.routes
        if getattr(route, "openapi_extra", None)
    }
    assert found.keys() == ENDPOINTS.keys()
    for path, title in found.items():
        assert title in ("AnyRequest", *(schema.__name__ for schema in ENDPOINTS[path])), path


def test_no_name_is_in_two_states() -> None:
    for rules in RULES.values():
        lists = (rules.fields, rules.harmless.keys() - rules.fields, rules.refused.keys(), rules.aliases.keys())
        assert sum(map(len, lists)) == len(set().union(*lists)), rules.name
        assert set(rules.aliases.values()) <= rules.done, rules.name
        assert rules.inside.keys() <= rules.fields, rules.name


def test_every_list_belongs_to_a_plan() -> None:
    assert (REFUSED.keys() | HARMLESS.keys() | ALIASES.keys() | OBJECTS.keys()) <= RULES.keys()


def test_every_reason_is_a_sentence_s_end() -> None:
    for rules in RULES.values():
        for why in (*rules.harmless.values(), *(refusal.why for refusal in rules.refused.values())):
            assert why and not why.endswith(".") and len(why) < 120, why


@pytest.mark.parametrize("name", RULES)
def test_every_refused_name_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    rules = RULES[name]
    for field, refusal in rules.refused.items():
        for quiet in (None, *refusal.neutral):
            unknown = Unknown()
            judge_names({field: quiet}, rules, unknown)
            assert not unknown.names
        for loud in ("zz", 77, ["zz"], {"zz": 1}):
            with pytest.raises(ParameterError, match="is not supported in this version") as caught:
                judge_names({field: loud}, rules, Unknown())
            assert caught.value.param == field


def test_options_of_a_search_ask_for_it_even_without_any() -> None:
    with pytest.raises(ParameterError, match="web_search_options is not supported"):
        judge_names({"web_search_options": {}}, RULES["openai.ChatRequest"], Unknown())


def test_neutral_values_are_of_one_kind() -> None:
    assert Refusal("", (0,)).asks(True) and not Refusal("", (0,)).asks(0.0) and not Refusal("", (0,)).asks(False)
    assert Refusal("", (1,)).asks(True) and not Refusal("", (1,)).asks(1.0)
    assert Refusal("", (True,), loud=True).asks(False) and not Refusal("", (True,), loud=True).asks(True)
    assert Refusal("", ([],)).asks([0]) and Refusal("").asks(0)


@pytest.mark.parametrize("object_name", WRITERS)
async def test_what_other_engines_do_is_refused_by_name_in_every_api(start: Starter, object_name: str) -> None:
    served = await start()
    for name, value in FOREIGN.items():
        path, body = wrapped(object_name, {name: value})
        answer = await served.post(path, body)
        assert answer.status_code == 400 and f"{name} is not supported" in answer.text, (path, answer.text)
    assert served.context.gate.open == 0 and not served.fake.fleet.open_requests


def test_all_apis_that_make_text_are_among_them() -> None:
    assert set(WRITERS) == {
        *("openai.ChatRequest", "openai.CompletionRequest", "responses.ResponsesRequest", "anthropic.MessagesRequest"),
        *("ollama.GenerateRequest", "ollama.ChatRequest", "ollama.Options", "tgi.Parameters", "tgi.VllmRequest"),
        "kserve.Parameters",
    }


STORE = ("ollama.PullRequest", "ollama.CreateRequest", "ollama.CopyRequest", "ollama.DeleteRequest")
ONCE = ("lora.LoadAdapterRequest", "lora.UnloadAdapterRequest", *STORE)
"""Plans whose requests change the server or the store, so that they do not succeed twice
(tests/cpu/server/test_adapters.py, test_server_store.py)."""


@pytest.mark.parametrize("object_name", BASES)
async def test_a_name_that_nobody_knows_is_told_or_refused(start: Starter, object_name: str, tmp_path: Path) -> None:
    served = await start(FakeOptions(max_model_len=512), models_control=True)
    strict = await start(strict_fields=True, lora_folder=str(tmp_path), models_control=True, allow_model_changes=True)
    path, body = wrapped(object_name, {"zzz": 1})
    if object_name in ONCE:
        refused = await strict.post(path, body)
        assert refused.status_code == 400 and "zzz is not a field of this request" in refused.text
        return
    answer = await served.post(path, body)
    assert answer.status_code == 200, answer.text
    told = answer.headers["x-tokenmill-ignored"]
    assert told == "zzz" or told.endswith(".zzz")
    refused = await strict.post(path, body)
    assert refused.status_code == 400 and "zzz is not a field of this request" in refused.text
    usual = {**body, UNDER[object_name]: {}} if object_name in UNDER else {k: v for k, v in body.items() if k != "zzz"}
    for each in (served, strict):
        fine = await each.post(path, usual)
        assert fine.status_code == 200 and "x-tokenmill-ignored" not in fine.headers
    assert sum((await ignored(served)).values()) == 1
    assert strict.context.gate.open == 0


NESTED = {
    "messages.zzz": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "zzz": 1}]}),
    "messages.content.zzz": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "zzz": 1}]}]},
    ),
    "stream_options.zzz": (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 2, "stream": True, "stream_options": {"zzz": 1}},
    ),
    "input.content.zzz": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "zzz": 1}]}]},
    ),
    "tools.function.zzz": (
        "/api/chat",
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "a", "zzz": 1}}],
        },
    ),
    "system.zzz": (
        "/v1/messages",
        {
            "model": "fake",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "x", "zzz": 1}],
            "messages": [{"role": "user", "content": "x"}],
        },
    ),
    "documents.zzz": ("/rerank", {"query": "x", "documents": [{"text": "a", "zzz": 1}]}),
}


@pytest.mark.parametrize("name", NESTED)
async def test_names_in_nested_objects_are_told_with_their_place(start: Starter, name: str) -> None:
    served = await start(tool_call_parser="hermes")
    answer = await served.post(*NESTED[name])
    assert answer.status_code == 200 and answer.headers["x-tokenmill-ignored"] == name


@pytest.mark.parametrize(("wrote", "meant"), [
    ("maxTokens", "max_tokens"), ("Temperature", "temperature"), ("max_token", "max_tokens"), ("top-p", "top_p"),
    ("frequency_penality", "frequency_penalty"), ("repetitionPenalty", "repetition_penalty"), ("strem", "stream"),
])  # fmt: skip
async def test_a_field_that_is_spelled_almost_so_is_hinted_at(start: Starter, wrote: str, meant: str) -> None:
    served, strict = await start(), await start(strict_fields=True)
    path, body = wrapped("openai.ChatRequest", {wrote: 1})
    answer = await served.post(path, body)
    assert answer.headers["x-tokenmill-did-you-mean"] == meant
    assert f"Did you mean {meant}?" in (await strict.post(path, body)).json()["error"]["message"]


async def test_what_is_told_is_short_and_of_plain_characters(start: Starter) -> None:
    served = await start()
    names = {f"é\r\nx-evil: 1,{i}" + "y" * 500: 1 for i in range(100)}
    path, body = wrapped("openai.ChatRequest", names)
    answer = await served.post(path, body)
    told = answer.headers["x-tokenmill-ignored"]
    assert answer.status_code == 200 and "x-evil" not in answer.headers
    assert told.isascii() and told.isprintable() and told.endswith(", ...")
    assert len(told.split(", ")) == MOST_TOLD + 1 and len(told) < (MOST_TOLD + 1) * (MOST_CHARS + 6)


async def test_arguments_that_the_template_never_reads_are_told_or_refused(start: Starter, tmp_path: Path) -> None:
    (template := tmp_path / "template").write_text(
        "{% if mood %}{{ mood.x }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    flags = {"chat_template": str(template)}
    served, strict = await start(**flags), await start(**flags, strict_fields=True)
    kwargs = {"mood": {"x": "a"}, "moood": 1, "enable_thinking": None}
    for path in ("/v1/chat/completions", "/tokenize", "/apply-template"):
        body = {"messages": TALK, "chat_template_kwargs": kwargs}
        told = await served.post(path, body)
        assert told.status_code == 200 and told.headers["x-tokenmill-ignored"] == "chat_template_kwargs.moood", path
        refused = await strict.post(path, body)
        assert refused.status_code == 400 and "chat_template_kwargs.moood" in refused.text, path
        fine = await strict.post(path, {**body, "chat_template_kwargs": {"mood": {"x": "a"}}})
        assert fine.status_code == 200 and "x-tokenmill-ignored" not in fine.headers, path


def test_looking_at_many_objects_is_cheap() -> None:
    body = {"messages": [{"role": "user", "content": "", f"k{i}": 1} for i in range(60_000)]}
    unknown = Unknown()
    assert least_cpu_time(lambda: judge_names(body, RULES["openai.ChatRequest"], unknown), 1.0) < 1.0
    assert len(unknown.names) == MOST_TOLD and unknown.more


# ---------------------------------------------------------------- other spellings


@pytest.mark.parametrize("object_name", ALIASES)
def test_other_spellings_become_the_field_s_name(object_name: str) -> None:
    for name, field in ALIASES[object_name].items():
        for raw in ({name: 7}, {name: 7, field: 7}):
            judge_names(raw, RULES[object_name], Unknown())
            assert raw == {field: 7}
        with pytest.raises(ParameterError, match="not both"):
            judge_names({name: 7, field: 8}, RULES[object_name], Unknown())
        nothing = {name: None, field: 8}
        judge_names(nothing, RULES[object_name], Unknown())
        assert nothing == {field: 8}


async def test_other_spellings_have_the_field_s_effect(start: Starter) -> None:
    served = await start()
    base = {"messages": [{"role": "user", "content": "x"}], "seed": 1}
    for name in ("n_predict", "max_new_tokens", "max_output_tokens"):
        answer = (await served.post("/v1/chat/completions", {**base, name: 3})).json()
        assert answer["usage"]["completion_tokens"] == 3
    raw: dict[str, Any] = {"n_predict": -1}
    judge_names(raw, RULES["openai.CompletionRequest"], Unknown())
    assert raw == {"max_tokens": None}
    for value in (0, -3, "3", True):
        answer = await served.post("/v1/chat/completions", {**base, "n_predict": value})
        assert answer.status_code == 400, answer.text


# ---------------------------------------------------------------- what stands around a body


async def test_headers_that_are_not_done_are_told(start: Starter) -> None:
    served, strict = await start(models_control=True), await start(strict_fields=True, models_control=True)
    for object_name, (path, body) in BASES.items():
        if object_name in UNDER or object_name in ONCE:
            continue
        answer = await served.post(path, body, **dict.fromkeys(TOLD_HEADERS, "1"))
        assert answer.status_code == 200 and answer.headers["x-tokenmill-ignored"] == ", ".join(TOLD_HEADERS), path
        refused = await strict.post(path, body, **{"idempotency-key": "1"})
        assert refused.status_code == 400 and "idempotency-key" in refused.text
        fine = await strict.post(path, body, **{name.replace("*", "lang"): "1" for name in HARMLESS_HEADERS})
        assert fine.status_code == 200 and "x-tokenmill-ignored" not in fine.headers, path


def test_no_header_is_on_two_lists() -> None:
    lists = (DONE_HEADERS, HARMLESS_HEADERS, TOLD_HEADERS)
    assert sum(map(len, lists)) == len(set().union(*lists))
    assert all(name == name.lower() for each in lists for name in each)


async def test_a_priority_in_a_header_is_heeded_by_every_api(start: Starter) -> None:
    served = await start()
    others: list[tuple[str, dict[str, Any]]] = [
        ("/embed", {"inputs": "a"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("/embedding", {"content": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/classify", {"input": "a", "labels": ["b", "c"]}),
    ]
    for path, body in (*(BASES[name] for name in WRITERS), *others):
        answer = await served.post(path, body, **{"x-vllm-priority": "3"})
        assert answer.status_code == 400 and "--scheduling-policy" in answer.text, path


async def test_defaults_that_the_template_never_reads_are_logged(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    await start(default_chat_template_kwargs={"messages_": 1, "add_generation_prompt_": 1, "enable_thinking": None})
    (record,) = [each for each in caplog.records if "never reads" in each.message]
    assert vars(record)["data"]["arguments"] == ["messages_", "add_generation_prompt_"]


async def test_query_parameters_are_told_or_refused(start: Starter) -> None:
    served, strict = await start(), await start(strict_fields=True)
    path, body = BASES["openai.ChatRequest"]
    assert (await served.post(f"{path}?zzz=1", body)).headers["x-tokenmill-ignored"] == "zzz"
    assert (await strict.post(f"{path}?zzz=1", body)).status_code == 400
    assert "x-tokenmill-ignored" not in (await strict.post(f"{path}?api-version=1&beta=true", body)).headers
    assert (await served.client.get("/v1/models?zzz=1")).headers["x-tokenmill-ignored"] == "zzz"
    assert (await strict.client.get("/v1/models?zzz=1")).status_code == 400
    assert (await strict.client.get("/health?zzz=1")).status_code == 200
    for query in ("engine?since=1", "requests?limit=1", "engine?since=1&model=fake", "card?model=fake"):
        assert (await strict.client.get(f"/v1/{query}")).status_code == 200, query
    claude = {"anthropic-version": "2023-06-01"}
    assert (await strict.client.get("/v1/models?limit=1", headers=claude)).status_code == 200
    assert (await strict.client.get("/v1/models?zzz=1", headers=claude)).status_code == 400
    made = (await served.post(*BASES["responses.ResponsesRequest"])).json()["id"]
    items = f"/v1/responses/{made}/input_items"
    assert (await served.client.get(f"{items}?order=asc&limit=3&include[]=x")).status_code == 200
    answer = await served.client.get(f"{items}?before=x")
    assert answer.status_code == 400 and "before" in answer.json()["error"]["message"]


# ---------------------------------------------------------------- single fields


async def test_num_ctx_is_taken_up_to_the_context(start: Starter) -> None:
    served = await start(FakeOptions(max_model_len=512))
    bodies = {
        "/api/chat": {"model": "fake", "stream": False, "messages": [{"role": "user", "content": "x"}]},
        "/api/generate": {"model": "fake", "stream": False, "prompt": "x"},
        "/api/embed": {"model": "fake", "input": "x"},
    }
    for path, body in bodies.items():
        for value, status in {1: 200, 512: 200, 513: 400, 0: 400}.items():
            answer = await served.post(path, {**body, "options": {"num_ctx": value, "num_predict": 2}})
            assert answer.status_code == status, (path, value, answer.text)
            assert status == 200 or "num_ctx" in answer.json()["error"]


async def test_deadlines_and_sessions_of_parameters_are_heeded(start: Starter) -> None:
    served = await start(FakeOptions(step_s=0.05))
    bodies = {
        "/v2/models/fake/generate": {"text_input": "x", "parameters": {"max_tokens": 1000, "timeout": 0.3}},
        "/generate": {"prompt": "x", "max_tokens": 1000, "timeout": 0.3},
    }
    for path, body in bodies.items():
        assert (await served.post(path, body)).status_code == 408, path


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("fields_page", PAGE.parent.parent / "tools" / "fields.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert PAGE.read_text(encoding="utf-8") == module.page(), "run python tools/fields.py"


OPEN = {
    **dict.fromkeys(("structured_outputs", "guided_json", "json_schema", "structural_tag"), "the grammar's compiler"),
    **dict.fromkeys(("schema", "schema_", "format", "structures", "parameters", "input_schema"), "a schema is free"),
    **dict.fromkeys(
        ("documents", "chat_template_kwargs", "arguments", "input", "value"), "templates and tools read it"
    ),
    **dict.fromkeys(("tool_choice", "metadata", "logit_bias"), "its own reader refuses what it does not know"),
    "data": "a tensor's values",
    **dict.fromkeys(("files", "adapters"), "names of files, with their digests"),
}
"""Objects whose names are not judged here, and who judges them."""


def test_every_object_without_a_schema_is_judged_or_known_to_be_open() -> None:
    for name, schema in schemas_of_all_bodies().items():
        for field, info in spellings(schema).items():
            free = "dict[" in str(info.annotation) or "Any" in str(info.annotation)
            if free and not list(parts(info)):
                assert field in OPEN, (name, field)


def schemas_of_all_bodies() -> dict[str, type[BaseModel]]:
    """Every schema, those inside others, too."""
    found: dict[str, type[BaseModel]] = {}
    waiting = [schema for schemas in ENDPOINTS.values() for schema in schemas]
    while waiting:
        schema = waiting.pop()
        if schema_name(schema) not in found:
            found[schema_name(schema)] = schema
            for info in schema.model_fields.values():
                waiting += [part for part in parts(info) if not isinstance(part, str)]
    return found


def test_sixteen_point_zero_is_sixteen() -> None:
    """JSON has one kind of number. What is no integer, or is none for certain, stays refused."""
    schemas, seen = schemas_of_all_bodies(), 0
    for name in BASES.keys() & schemas.keys():
        path, _ = wrapped(name, {})
        top = ENDPOINTS[path][0] if name in UNDER else schemas[name]
        for field, info in spellings(schemas[name]).items():
            if info.annotation not in (int, int | None):
                continue
            seen += 1
            for value in (1, 4, -1):
                assert outcome(top, wrapped(name, {field: float(value)})[1]) == outcome(
                    top, wrapped(name, {field: value})[1]
                ), (name, field)
            for odd in (1.5, 1e300, True, "1"):
                assert "valid integer" in outcome(top, wrapped(name, {field: odd})[1]), (name, field, odd)
    assert seen > 50


def test_lists_of_floats_are_no_token_ids() -> None:
    assert "finding" not in outcome(CompletionRequest, {"prompt": [1, 2]})
    assert "prompt" in outcome(CompletionRequest, {"prompt": [1.0, 2.0]})


def outcome(schema: type[BaseModel], body: dict[str, Any]) -> str:
    """The request that such a body is, or what is wrong with it."""
    try:
        return repr(validated(schema, body))
    except ValidationError as error:
        return f"finding: {error.errors(include_input=False, include_url=False)}"
    except (HttpError, UserError) as error:
        return f"finding: {error}"
