"""What a file of models says, what is refused in it, and that several MODELs mean the same."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenmill.cli.verbs import app
from tokenmill.core.config import all_options, make_server_config
from tokenmill.core.errors import UserError
from tokenmill.engine.options.checks import check_options
from tokenmill.server.access import Rights, digest, shown_key
from tokenmill.server.many_models.models_file import FIELDS, OWN, name_models, read_models

FILE = """
models:
  small: {model: /m/small, aliases: [fast, gpt-4o-mini], pin: true, max-model-len: 2048}
  big:
    model: /m/big.gguf
    ttl: 600
    groups: [big]
    memory: 4000000000
    kv_cache_dtype: int8
    tool_call_parser: none
    lora_modules: ["sql=demo:sql"]
    enable_lora: true
  other: /m/other
  /m/plain:
keys:
  sk-small: [fast]
  sk-two: [small, big]
"""


def read(tmp_path: Path, text: str, **options: Any) -> Any:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return read_models(path, options, make_server_config({}))


def test_every_field_arrives(tmp_path: Path) -> None:
    specs, rights, keys = read(tmp_path, FILE, max_num_seqs=7, max_model_len=99)
    small, big, other, plain = specs
    assert small.names == ("small", "fast", "gpt-4o-mini") and small.pin and small.keep < 0
    assert small.engine.model.max_model_len == 2048 and big.engine.model.max_model_len == 99
    assert {each.engine.schedule.max_num_seqs for each in specs} == {7}
    assert (big.ttl, big.keep, big.memory, big.groups) == (600, 600, 4_000_000_000, frozenset({"big"}))
    assert big.engine.cache.kv_cache_dtype == "int8" and big.server.messages.tool_call_parser == "none"
    assert small.server.messages.tool_call_parser == "auto" and big.adapters == ("sql",)
    assert other.engine.model.model == "/m/other" and plain.engine.model.model == "/m/plain" == plain.names[0]
    assert rights == {shown_key(digest("sk-small")): Rights(frozenset({"small"})),
                      shown_key(digest("sk-two")): Rights(frozenset({"small", "big"}))}  # fmt: skip
    assert keys == ["sk-small", "sk-two"]


def test_json_is_read_as_well(tmp_path: Path) -> None:
    (spec,), rights, keys = read(tmp_path, json.dumps({"models": {"a": {"model": "x"}}}))
    assert spec.names == ("a",) and not rights and not keys


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "models: {a: {max_modle_len: 5}}",
            r"models.a: there is no 'max_modle_len' here. Did you mean 'max_model_len'",
        ),
        ("models: {a: {tll: 5}}", "Did you mean 'ttl'"),
        ("models: {a: {port: 5}}", "models.a: port is an option of the whole server"),
        ("models: {a: {served_model_name: b}}", "aliases give more"),
        ("models: {a: {max_model_len: no}}", "models.a: max_model_len must be"),
        ("models: {a: {pin: 3}}", "pin must be true or false"),
        ("models: {a: {ttl: -1}}", "ttl must be a number (seconds, not negative), got -1"),
        ("models: {a: {ttl: 5m}}", "ttl must be a number"),
        ("models: {a: {ttl: 60, pin: true}}", "models.a: ttl has no effect beside pin"),
        ("models: {a: {max_loras: 3}}", "models.a: --max-loras has no effect without --enable-lora"),
        ("models: {a: {memory: .nan}}", "memory must be a number"),
        ("models: {a: {memory: 0}}", "memory must be a number (bytes, at least 1), got 0"),
        ("models: {a: {model: ''}}", "models.a: model is empty"),
        (f"models: {{a: {{generation_config: {'x' * 2000}}}}}", "cannot be used: File name too long"),
        (f"models: {{a: {{ttl: {'9' * 5000}}}}}", "is neither YAML nor JSON"),
        ("models: {a: {ttl: 2024-02-31}}", "is neither YAML nor JSON: day is out of range"),
        ('models: {a: {chat_template: "\\0"}}', "no file can have this name"),
        ("models: {a: {groups: [1]}}", "groups must be a list of names"),
        ("models: {a: {chat_template: /nowhere/x}}", "models.a: --chat-template /nowhere/x cannot be read"),
        ("models: {a: {tool_call_parser: zzz}}", "models.a: "),
        ("models: {'a,b': {}}", "contain a comma"),
        ("models: {a: {aliases: [' ']}}", "must not be empty"),
        ("models: {a: {aliases: [a]}}", "models.a: its name 'a' is given twice"),
        ("models: {a: {aliases: [b, c, b]}}", "models.a: its name 'b' is given twice"),
        ("models: {a: {enable_lora: true, lora_modules: [b=/x, c=/y, b=/x]}}", "lora_modules names 'b' twice"),
        ("models: {a: 5}", "must be a model, or a mapping"),
        ("models: []", "must hold `models`"),
        ("model: {}", "Did you mean 'models'"),
        ("[]", "must hold a mapping"),
        ("a: [", "is neither YAML nor JSON"),
        ("models: {a: }\nkeys: {k: [b]}", "key 1: there is no 'b' here. Known: a"),
        ("models: {a: }\nkeys: [k]", "`keys` must be a mapping"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as found:
        read(tmp_path, text)
    assert said in str(found.value) and "\n" not in str(found.value)
    assert "sk-" not in str(found.value)


VALUES = ("true", "3", "-1", "1.5", "1e400", "''", "[]", "[1]", "[[a]]", "['', a]", "{}", "{1: 2}", "2024-01-01",
          "!!set {a}", "!!binary aGk=", "&a [*a]")  # fmt: skip


@pytest.mark.parametrize("field", [*FIELDS, *sorted(OWN), *all_options()])
def test_a_value_of_any_type_is_taken_or_refused(tmp_path: Path, field: str) -> None:
    """YAML brings types that no flag can have."""
    for value in VALUES:
        with contextlib.suppress(UserError):
            read(tmp_path, f"models: {{a: {{model: /x, {field}: {value}}}}}")


def test_options_for_all_may_be_without_effect_for_some(tmp_path: Path) -> None:
    specs, _, _ = read(tmp_path, "models: {a: {model: /x}, b: {model: /y, enable_lora: true}}", max_loras=3)
    for spec in specs:
        check_options(spec.engine)  # as its engine does
    assert {spec.engine.adapters.max_loras for spec in specs} == {3}


def test_several_names_are_several_models() -> None:
    specs = name_models(["/m/a", "demo"], {"max_num_seqs": 3, "model": "/m/a"}, make_server_config({}))
    assert [spec.names for spec in specs] == [("/m/a",), ("demo",)] and not any(spec.pin for spec in specs)
    assert {spec.engine.schedule.max_num_seqs for spec in specs} == {3}


def test_the_command_takes_a_file_or_several_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def serve(*given: Any, **more: Any) -> int:
        seen.append((*given, more))
        return 0

    monkeypatch.setattr("tokenmill.server.run.serve_models", serve)
    monkeypatch.setattr("tokenmill.server.logs.set_up_logs", lambda options: None)
    path = tmp_path / "models.yaml"
    path.write_text(FILE)
    (folder := tmp_path / "b").mkdir()
    (folder / "config.json").write_text("{}")
    runner = CliRunner()
    for args in (
        ["--models", str(path), "--port", "0", "--max-num-seqs", "5"],
        ["demo", str(folder), "--models-queue", "3"],
    ):
        assert runner.invoke(app, ["serve", *args]).exit_code == 0, args
    (filed, server, _, more), (named, other, _, _) = seen
    assert [spec.names[0] for spec in filed] == ["small", "big", "other", "/m/plain"]
    assert filed[0].engine.schedule.max_num_seqs == 5 and list(server.listen.api_key) == ["sk-small", "sk-two"]
    assert len(more["rights"]) == 2 and filed[0].server.listen.api_key == server.listen.api_key
    assert [spec.names[0] for spec in named] == ["demo", str(folder)] and other.models.models_queue == 3
    assert runner.invoke(app, ["serve", "demo", str(folder), "--served-model-name", "x"]).exit_code != 0
    twice = runner.invoke(app, ["serve", "--models", str(path), "--api-key", "sk-two"])
    assert twice.exit_code == 2 and "give it in one place" in twice.stderr and "sk-two" not in twice.stderr
    both = runner.invoke(app, ["serve", "demo", "--models", str(path)])
    assert both.exit_code != 0
