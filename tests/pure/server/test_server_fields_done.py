"""A field that counts as done has an effect: two bodies that differ in it alone do not have the same one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import processors

from tests.pure.server.conftest import Served, Starter, stand
from tests.pure.server.probes import ABSENT, PROBES, REFUSAL_IS_THE_EFFECT, THOUGHT, USER
from tests.pure.server.probes_inside import INSIDE
from tests.pure.server.server_fields_done_helpers import BASES, UNDER
from tokenmill.checkpoint.entry import Entry, Source
from tokenmill.checkpoint.store import Store
from tokenmill.checkpoint.stored import open_store
from tokenmill.checkpoint.stored_names import full_name
from tokenmill.server.openai.stored.kept_chats import KeptChat
from tokenmill.server.request_job import Job
from tokenmill.server.request_rules import make_request_rules
from tokenmill.server.responses.conversation import Conversation
from tokenmill.testing.fake_generator import FILLS, FakeOptions, byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message | tojson }}{% endfor %}{{ tools | tojson if tools else '' }}"
    "{{ documents | tojson if documents else '' }}{{ mood }}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% if add_generation_prompt %}>{% endif %}"
)
LONG = "word " * 400
HERE = Entry(full_name("here"), Source("path", path="/nowhere"), changed=1.0)
VOLATILE = re.compile(
    r'"(created|created_at|completed_at|modified_at|id|(item|request)_id|[a-z_]*duration|[a-z]*_time|[a-z_]*_ms|[a-z]*_per_second)"'
    r': ?("(?![a-z]*-?mine)[^"]*"|[0-9.]+)'
    r"|(chatcmpl|cmpl|embd|pool|msg|resp|conv|cmp|rs|fco|rerank|score|classify|fc|call)[-_][0-9a-f]{32}|call_[0-9a-f]+"
)


class Bench:
    """A server, and what reaches its engine."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served = served
        self.seen: list[Any] = []
        inner, deadline = served.fake.fleet.open, Job.set_deadline

        async def opened(request: Any, stream: Any, pooling: str | None = None) -> Any:
            plain = msgspec.to_builtins(request, str_keys=True)
            unstable = ("id", "arrival", "deadline", *(() if request.params.seed is not None else ("seed",)))
            kept = {name: value for name, value in plain.items() if name not in unstable}
            self.seen.append((kept, pooling, stream.session))
            return await inner(request, stream, pooling)

        def dated(job: Job, seconds: float | None) -> None:
            self.seen.append(seconds)
            deadline(job, seconds)

        monkeypatch.setattr(served.fake.fleet, "open", opened)
        monkeypatch.setattr(Job, "set_deadline", dated)

    async def effect(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """-> status, and all that can be seen of it."""
        self.seen.clear()
        stand(self.served.context)
        store = fresh_store()
        answer = await self.served.post(path, body)
        for kind in (Conversation, KeptChat):
            for kept in self.served.context.store.all(kind, "anonymous"):
                said = kept.messages if isinstance(kept, KeptChat) else kept.encoded()
                self.seen.append(VOLATILE.sub("", f"{kept.kind} {kept.metadata} {said.decode()}"))
        self.seen += [f"{entry.name} {entry.digest}" for entry in store.entries()[0]]
        assert answer.status_code in (200, 400, 404), (path, body, answer.text)
        return answer.status_code, (list(self.seen), answer.status_code, VOLATILE.sub("", answer.text))


def fresh_store() -> Store:
    """One model is stored, and no other."""
    store = open_store()
    found = store.entries()[0]
    if found != [HERE]:
        for entry in found:
            store.remove(entry.name)
        store.put(HERE)
    return store


@pytest.fixture
async def bench(start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    (tmp_path / "weights" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    tokenizer = byte_tokenizer(FILLS)
    first = tokenizer.special_strings["eos_token"]
    number = tokenizer.encode(first, add_special_tokens=False)[0]
    tokenizer._inner.post_processor = processors.TemplateProcessing(f"{first} $A", special_tokens=[(first, number)])
    served = await start(
        FakeOptions(script=THOUGHT, tokenizer=tokenizer, max_model_len=1024),
        chat_template=str(template),
        trust_request_chat_template=True,
        lora_folder=str(tmp_path),
        allow_model_changes=True,
        model_folder=str(tmp_path),
        models_control=True,
        reasoning_parser="qwen3",
        tool_call_parser="hermes",
    )
    for name in ("first", "second"):
        book = served.fake.fleet.adapters.book
        book.serve(book.add(name, tmp_path / "adapter"))
    served.fake.fleet.tell_names()
    return Bench(served, monkeypatch)


def body_of(object_name: str, field: str, value: Any, base: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path, and a body whose field has this value."""
    path, body = BASES[object_name]
    base = dict(base)
    if base.pop("_long", False):
        body = {
            **body,
            **{name: _long(given) for name, given in body.items() if name in ("messages", "prompt", "input", "inputs")},
        }
    given = {name: each for name, each in {**base, field: value}.items() if each is not ABSENT}
    gone = {name for name, each in {**base, field: value}.items() if each is ABSENT}
    if object_name in UNDER:
        return path, {**body, UNDER[object_name]: given}
    return path, {**{name: each for name, each in body.items() if name not in gone}, **given}


def _long(given: Any) -> Any:
    return LONG if isinstance(given, str) else [{**USER, "content": LONG}]


def test_every_field_that_is_done_has_a_probe() -> None:
    rules = make_request_rules()
    assert rules.keys() == PROBES.keys() | INSIDE.keys()
    for name, each in rules.items():
        assert set({**PROBES, **INSIDE}[name]) == each.done, name


@pytest.mark.parametrize("object_name", PROBES)
async def test_every_field_of_a_body_has_its_effect(bench: Bench, object_name: str) -> None:
    for field, (base, before, after) in PROBES[object_name].items():
        path, first = body_of(object_name, field, before, base)
        _, second = body_of(object_name, field, after, base)
        was, found = await bench.effect(path, first)
        again, same = await bench.effect(path, first)
        now, other = await bench.effect(path, second)
        assert found == same and was == again, (object_name, field, "is not the same twice")
        assert found != other, (object_name, field, "has no effect", found)
        for status, seen in ((was, found), (now, other)):
            if status != 200 and not any(isinstance(each, tuple) for each in seen[0]):
                assert any(name == field and word in seen[2] for name, word in REFUSAL_IS_THE_EFFECT), (
                    object_name,
                    field,
                    seen,
                )


@pytest.mark.parametrize("object_name", INSIDE)
async def test_every_field_of_what_lies_in_a_body_has_its_effect(bench: Bench, object_name: str) -> None:
    for field, (path, first, second) in INSIDE[object_name].items():
        was, found = await bench.effect(path, first)
        _, same = await bench.effect(path, first)
        now, other = await bench.effect(path, second)
        assert found == same, (object_name, field, "is not the same twice")
        assert found != other, (object_name, field, "has no effect", found)
        reached = any(isinstance(each, tuple) for each in found[0])
        assert was == 200 or reached, (object_name, field, found)
        assert (
            now == 200
            or field in ("type", "id", "name", "datatype", "schema", "schema_", "value")
            or any(isinstance(each, tuple) for each in other[0])
        ), (object_name, field, other)
