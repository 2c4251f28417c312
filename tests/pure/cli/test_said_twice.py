"""One setting, given twice under two names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokenmill import LLM
from tokenmill.cli.command import Verb
from tokenmill.cli.flags import MODEL, engine_flags, option_flags, with_flags
from tokenmill.core.config import GROUPS, SERVER_GROUPS, all_options, make_config, make_server_config
from tokenmill.core.config_file import read_config_file
from tokenmill.core.errors import ParameterError
from tokenmill.engine.options.engine_args import EngineArgs
from tokenmill.server.many_models.models_file import read_models


def run(line: str) -> tuple[dict[str, Any], str]:
    """What reaches a verb, and what is printed."""
    seen: dict[str, Any] = {}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(cls=Verb)
    @engine_flags
    @with_flags("server", option_flags(SERVER_GROUPS))
    def verb(
        model: str = MODEL,
        prompt: str = typer.Option(None, "--prompt", "-p"),
        *,
        server: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        seen.update({"prompt": prompt, **server, **options})

    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, line.split())
    return seen, result.output


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("-c 512 --max-model-len 1024", "--max-model-len"),
        ("--ctx-size=512 -c 1k", "--max-model-len"),
        ("--kv-dtype int8 --kv-cache-dtype fp8", "--kv-cache-dtype"),
        ("--load-in-4bit --load-in-8bit", "--quantization"),
        ("-ngl 0 --device cuda", "--device"),
        ("--cache-prompt --no-enable-prefix-caching", "--enable-prefix-caching"),
        ("-pone --prompt two", "--prompt"),
        ("-m one --model two", "--model"),
        ("-tp 2 --tensor-parallel-size 4", "--tensor-parallel-size"),
    ],
)
def test_two_names_of_one_setting_may_not_differ(line: str, setting: str) -> None:
    seen, said = run(line)
    assert not seen and f"are two values of one setting ({setting}): give one." in said
    typed = [word.partition("=")[0] for word in line.split() if word.startswith("-") and word != "-pone"]
    assert all(word in said for word in typed)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("-c 4096 --max-model-len 4K", "max_model_len", 4096),
        ("--max-model-len 1 --max_model_len 2 --max-model-len=3", "max_model_len", 3),
        ("--enable-prefix-caching --no-enable-prefix-caching", "enable_prefix_caching", False),
        ("-ngl 0 --device cpu", "device", "cpu"),
        ("--api-key one --api-key two", "api_key", ["one", "two"]),
    ],
)
def test_equal_values_and_the_same_flag_again_are_usual(line: str, name: str, value: Any) -> None:
    assert run(line)[0][name] == value


@pytest.mark.parametrize("flag", ["--speculative-config", "--hf-overrides"])
def test_an_object_may_not_have_a_name_twice(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON readers would keep the last value without a word."""
    text = '{"method":"ngram","method":"suffix"}'
    seen, said = run(f"{flag} {text}")
    assert not seen and "'method' stands twice" in said
    monkeypatch.setenv(f"TOKENMILL_{flag[2:].replace('-', '_').upper()}", text)
    with pytest.raises(ParameterError, match="JSON in which no name stands twice"):
        make_config()


def test_a_secret_is_not_repeated() -> None:
    said = run("-hft one --hf-token two")[1]
    assert "-hft and --hf-token are two values" in said and "two value" in said and "hf-token two" not in said


@pytest.mark.parametrize("text", ["kv_dtype: int8\nkv-cache-dtype: fp8\n", "seed: 1\nseed: 2\n"])
def test_files_may_not_name_one_setting_twice(text: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=r"two values of one setting|line 2 stands twice in one mapping"):
        read_config_file(path)
    path.write_text("models:\n  one:\n    model: demo\n" + "".join(f"    {line}\n" for line in text.splitlines()))
    with pytest.raises(ParameterError, match=r"two values of one setting|line 5 stands twice in one mapping"):
        read_models(path, {}, make_server_config({}))


def test_two_models_of_one_name_and_two_rights_of_one_key_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    for text in ("models: {a: demo, a: demo}", "models: {a: demo, b: demo}\nkeys: {k: [a], k: [b]}"):
        path.write_text(text)
        with pytest.raises(ParameterError, match=r"line . stands twice in one mapping"):
            read_models(path, {}, make_server_config({}))
    path.write_text("common: &common {seed: 1}\nmodels: {a: {<<: *common, seed: 2}}")  # a usual way to override
    with pytest.raises(ParameterError, match="no 'common' here"):
        read_models(path, {}, make_server_config({}))


def test_a_file_gives_way_to_a_flag_whatever_each_calls_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("kv_dtype: int8\n")
    assert read_config_file(path)[0] == {"kv_cache_dtype": "int8"}
    path.write_text("models:\n  one:\n    kv_dtype: int8\n")
    specs, _, _ = read_models(path, {"kv_cache_dtype": "fp8"}, make_server_config({}))
    assert specs[0].engine.cache.kv_cache_dtype == "int8"


@pytest.mark.parametrize("make", [LLM, EngineArgs])
def test_keywords_may_not_differ_either(make: Any) -> None:
    with pytest.raises(ParameterError, match="kv_dtype = 'int8' and kv_cache_dtype = 'fp8' are two values"):
        make("demo", kv_dtype="int8", kv_cache_dtype="fp8")


LISTS = [
    n for n, (_, _, kind) in (all_options(GROUPS) | all_options(SERVER_GROUPS)).items() if "list[str]" in str(kind)
]


@pytest.mark.parametrize("name", [name for name in LISTS if name in all_options(SERVER_GROUPS)])
def test_a_variable_of_several_texts_takes_one_or_a_json_list(name: str) -> None:
    def read(text: str) -> Any:
        return getattr(make_server_config({f"TOKENMILL_{name.upper()}": text}).listen, name)

    assert read("one-word") == ["one-word"] and read('["a,b", "c"]') == ["a,b", "c"]
    for wrong in ("a,b", "", "[1]", "[", '{"a": 1}, 2'):
        with pytest.raises(ParameterError, match="must be one text, or a JSON list of texts") as found:
            read(wrong)
        assert name != "api_key" or "got" not in str(found.value)


@pytest.mark.parametrize(
    "text", ["keys: {sk-secret: [a}", "keys: {a: 1}\nsk-secret: : b", "? - &x sk-secret\n- *y", "\x00sk-secret"]
)
def test_a_file_that_is_no_yaml_is_not_quoted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    for read in (lambda: read_models(path, {}, make_server_config({})), lambda: read_config_file(path)):
        with pytest.raises(ParameterError) as found:
            read()
        assert "sk-secret" not in str(found.value)
