"""Flags grow from the option fields, and arrive as they were typed."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokenmill.cli.command import Verb
from tokenmill.cli.flags import MODEL, _read_count, engine_flags, option_flags, resolve_options, spelling, with_flags
from tokenmill.cli.foreign import RefusedFlag, as_ours
from tokenmill.cli.verbs import app
from tokenmill.core import config
from tokenmill.core.errors import ParameterError, UserError

SOURCE = Path(__file__).parents[3] / "src"


def command(seen: list[Any]) -> typer.Typer:
    """An application with one verb that notes what reaches it."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(cls=Verb)
    @engine_flags
    def verb(model: str = MODEL, depth_first: bool = typer.Option(False), *, options: dict[str, Any]) -> None:
        seen.append((model, depth_first, options))

    return app


def run(*arguments: str) -> tuple[int, list[Any], str]:
    seen: list[Any] = []
    result = CliRunner(env={"COLUMNS": "200"}).invoke(command(seen), list(arguments))
    return result.exit_code, seen, result.output


def test_nothing_typed_nothing_given() -> None:
    assert run()[1] == [(None, False, {})]


def test_each_option_has_a_flag_that_reaches_the_configuration() -> None:
    samples: dict[type, tuple[str, Any]] = {str: ("word", "word"), int: ("7", 7), float: ("0.5", 0.5)}
    for name, (group, item, kind) in config.all_options().items():
        plain = next(k for k in getattr(kind, "__args__", (kind,)) if k is not type(None))
        if plain is bool:
            typed, value = [spelling(name)], True
        elif item.metadata["choices"]:
            value = item.metadata["choices"][-1]
            typed = [spelling(name), value]
        elif plain in samples:
            typed, value = [spelling(name), samples[plain][0]], samples[plain][1]
        elif plain == list[str]:
            typed, value = [spelling(name), "word", spelling(name), "other"], ["word", "other"]
        else:
            typed, value = [spelling(name), '{"a": [1]}'], {"a": [1]}
        code, seen, output = run(*typed)
        assert code == 0, output
        assert seen == [(None, False, {name: value})]
        assert getattr(getattr(config.make_config(**seen[0][2]), group), name) == value


def test_booleans_can_be_switched_off() -> None:
    assert run("--no-enable-prefix-caching")[1][0][2] == {"enable_prefix_caching": False}
    assert resolve_options(None, {"enable_prefix_caching": False})[0].cache.enable_prefix_caching is False


def test_other_spellings_reach_the_same_option() -> None:
    assert run("--kv-dtype", "bfloat16", "--depth", "3")[1][0][2] == {"kv_cache_dtype": "bfloat16", "pipeline_depth": 3}


def test_objects_come_key_by_key_as_vllm_takes_them() -> None:
    words = ["--hf-overrides.a.b", "1", "--hf_overrides.c=x", "--hf-overrides.a.d", '{"e": [2]}', "m"]
    assert run(*words)[1] == [("m", False, {"hf_overrides": {"a": {"b": 1, "d": {"e": [2]}}, "c": "x"}})]
    assert run("--hf-overrides.a", "1", "--hf-overrides.a.b", "2")[1][0][2] == {"hf_overrides": {"a": {"b": 2}}}
    added = run("--hf-overrides.a+", "1", "--hf-overrides.a+=x,2")[1][0][2]
    assert added == {"hf_overrides": {"a": [1, "x", 2]}}
    assert "--hf-overrides is given whole and key by key" in run("--hf_overrides={}", "--hf-overrides.a", "1")[2]
    assert "--hf-overrides.a needs a value" in run("--hf-overrides.a")[2]
    assert "--block-size takes a whole number" in run("--block-size.a", "1")[2]
    assert "There is no flag --no-such.a" in run("--no-such.a", "1")[2]


def test_numbers_may_be_left_to_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a variable, over which a flag wins. The words are vLLM's."""
    for typed in ("auto", "-1"):
        (found,) = run("--max-model-len", typed)[1]
        monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", "64")
        assert config.make_config(**found[2]).model.max_model_len is None
        monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", typed)
        assert config.make_config().model.max_model_len is None
    assert config.make_config(threads="auto").execute.threads is None
    assert config.make_config(served_model_name="auto").model.served_model_name == "auto"
    with pytest.raises(ParameterError):
        config.make_config(block_size="auto")


def test_names_of_vllm_that_are_short() -> None:
    assert run("-O3", "-O.level", "3", "-ep", "-dcp", "1", "-cc.mode", "3", "--enable-reasoning")[1][0][2] == {
        "enable_expert_parallel": True
    }
    assert "-dcp 2 cannot be used" in run("-dcp", "2")[2]
    assert run("--kv-cache-dtype", "fp8_e4m3")[1][0][2] == {"kv_cache_dtype": "fp8"}
    assert run("--kv-cache-dtype=fp8_e4m3")[1][0][2] == {"kv_cache_dtype": "fp8"}
    variables = {"TOKENMILL_KV_CACHE_DTYPE": "fp8_e4m3", "TOKENMILL_QUANTIZATION": "compressed-tensors"}
    assert config.make_config(variables) == config.make_config({}, kv_cache_dtype="fp8", stored_as="compressed-tensors")


@pytest.mark.parametrize(
    "typed",
    [
        ("--dtype", "float12"),
        ("--block-size", "many"),
        ("--hf-overrides", "{"),
        ("--hf-overrides", "[1]"),
        ("--no-such-flag",),
    ],
)
def test_unusable_values_end_with_a_usage_error(typed: tuple[str, ...]) -> None:
    code, seen, output = run(*typed)
    assert code == 2 and not seen
    assert typed[0] in output and "Traceback" not in output


def test_an_option_added_to_the_configuration_appears_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    more = dataclasses.make_dataclass(
        "More",
        [("grain_size", int, config.option(3, "How fine to grind.", "grain"))],
        frozen=True,
        kw_only=True,
    )
    monkeypatch.setitem(config.GROUPS, "cache", more)
    _, _, output = run("--help-all")
    assert "--grain-size, --grain" in output and "How fine to grind. (default: 3)" in output
    assert run("--grain", "5")[1] == [(None, False, {"grain_size": 5})]


def test_lists_are_repeated_flags() -> None:
    group = dataclasses.make_dataclass(
        "Doors",
        [("key", list[str] | None, config.option(None, "A key.")), ("hinge", list[str], config.option((), "A hinge."))],
        frozen=True,
        kw_only=True,
    )
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @with_flags("doors", option_flags({"doors": group}))
    def verb(*, doors: dict[str, Any]) -> None:
        seen.append(doors)

    assert CliRunner().invoke(app, ["--key", "a", "--hinge", "x", "--key", "b"]).exit_code == 0
    assert CliRunner().invoke(app, []).exit_code == 0
    assert seen == [{"key": ["a", "b"], "hinge": ["x"]}, {}]


def test_the_model_is_positional_or_a_flag_but_not_two() -> None:
    assert run("here")[1][0][0] == "here"
    assert resolve_options("here", {})[1]["model"] == "here"
    assert resolve_options(None, {"model": "there"})[1]["model"] == "there"
    assert resolve_options("same", {"model": "same"})[1]["model"] == "same"
    with pytest.raises(ParameterError, match="Two models"):
        resolve_options("here", {"model": "there"})


def test_the_model_defaults_to_the_demo_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENMILL_MODEL", raising=False)
    assert resolve_options(None, {})[1]["model"] == "demo"
    monkeypatch.setenv("TOKENMILL_MODEL", "elsewhere")
    assert resolve_options(None, {})[1]["model"] == "elsewhere"
    assert resolve_options("here", {})[1]["model"] == "here"


def test_what_is_always_so_may_be_said() -> None:
    assert (
        resolve_options(None, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1})[0]
        == resolve_options(None, {})[0]
    )
    for value in (0, True, "1", None):
        with pytest.raises(ParameterError, match="pipeline_parallel_size must be"):
            resolve_options(None, {"pipeline_parallel_size": value})


def test_impossible_values_are_refused_before_anything_loads() -> None:
    with pytest.raises(UserError, match="block_size must be positive"):
        resolve_options(None, {"block_size": 0})


@pytest.mark.parametrize("verb", ["generate", "chat", "serve", "doctor", "bench", "bench throughput", ""])
def test_help_imports_no_torch(verb: str) -> None:
    script = (
        "import atexit, sys\n"
        f"sys.argv = ['tokenmill', *{verb.split()!r}, '--help-all']\n"
        "from tokenmill.cli.main import main\n"
        "heavy = ('torch', 'numpy', 'tokenizers', 'transformers')\n"
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules]))\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    if verb in ("generate", "chat", "serve", "bench throughput"):
        missing = [
            name for name in config.all_options() if not re.search(rf"--(\[no-\])?{spelling(name)[2:]}\b", done.stdout)
        ]
        assert not missing
    if not verb:
        assert all(word in done.stdout for word in ("generate", "chat", "serve", "doctor", "bench"))


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1.5K", 1536), ("2M", 2 << 20), ("2GiB", 2 << 30),
     ("2GB", 2 * 10**9), ("0.5Ti", 1 << 39), ("-1", -1), ("+7", 7)],
)  # fmt: skip
def test_counts_have_units(text: str, count: int) -> None:
    assert _read_count("--n", int, text) == count


WHOLE = [
    "generate --max-tokens", "generate --n", "chat --max-tokens", "plan --context", "plan --users", "tune --users",
    "bench throughput --input-len", "bench latency --batch-size", "bench serve --num-prompts", "quantize --samples",
    "prune --steps", "distill --steps", "distill --seed",
]  # fmt: skip


def verb_of(words: list[str]) -> Any:
    found: Any = typer.main.get_command(app)
    for word in words:
        found = found.get_command(None, word)
    return found


@pytest.mark.parametrize("line", WHOLE)
def test_every_whole_number_of_every_verb_has_units(line: str) -> None:
    *words, flag = line.split()
    assert verb_of(words)._counted([flag, "1k", f"{flag}=4Ki"], {}) == [flag, "1000", f"{flag}=4096"]
    for wrong in ([flag, "1x"], [f"{flag}=1x"]):
        done = CliRunner().invoke(app, [*words, *wrong])
        assert done.exit_code == 2 and f"{flag} takes a whole number, not 1x (32k and 2GiB are allowed)" in done.stderr


def test_values_that_look_like_flags_keep_their_place() -> None:
    words = ["--prompt", "--n", "--n", "1k", "--stop=2k", "--max-tokens=1K", "demo", "--", "--n", "1k"]
    counted = ["--prompt", "--n", "--n", "1000", "--stop=2k", "--max-tokens=1024", "demo", "--", "--n", "1k"]
    assert verb_of(["generate"])._counted(words, {}) == counted


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "4 096", "1,000", "3x", "2kib", "1_000", "-2k", "NaN"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="32k and 2GiB are allowed"):
        _read_count("--n", int, text)


def test_flags_with_underscores_are_those_with_dashes() -> None:
    known = {"--max-model-len": True, "--enforce-eager": False}
    assert as_ours(["--max_model_len", "9", "--enforce_eager"], known, "serve") == [
        "--max-model-len", "9", "--enforce-eager",
    ]  # fmt: skip
    assert as_ours(["--ctx_size=9", "--flash_attn", "on"], known, "serve") == ["--max-model-len", "9"]
    with pytest.raises(RefusedFlag, match="There is no flag --no_such"):
        as_ours(["--no_such"], known, "serve")
