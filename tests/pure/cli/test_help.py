"""What --help prints, whatever the width: whole names, groups, and rare flags only where they are asked for."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer
from tests.thinned import covering
from typer.testing import CliRunner

from tokenmill.cli.command import Verb
from tokenmill.cli.foreign import DEFAULTS, LLAMA, as_ours
from tokenmill.cli.help import COMMON, placeholder, section
from tokenmill.cli.verbs import app
from tokenmill.core.config import GROUPS, SERVER_GROUPS, all_options

ROOT: Any = typer.main.get_command(app)
VERBS = [name for name in ROOT.list_commands(None) if name != "bench"]
VERBS += [f"bench {name}" for name in ROOT.get_command(None, "bench").list_commands(None)]


def verb_of(words: str) -> Any:
    found = ROOT
    for word in words.split():
        found = found.get_command(None, word)
    return found


def printed(words: str, flag: str, columns: int) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [*words.split(), flag])
    assert result.exit_code == 0, result.output
    return result.output


WIDTHS = [30, 80, 200]


@pytest.mark.parametrize(("words", "columns"), [*covering(VERBS, WIDTHS), *(("serve", width) for width in WIDTHS[1:])])
def test_every_flag_is_written_out(words: str, columns: int) -> None:
    everything, usual = printed(words, "--help-all", columns), printed(words, "--help", columns)
    shown = [param for param in verb_of(words).params if param.param_type_name == "option" and not param.hidden]
    assert isinstance(verb_of(words), Verb)
    for param in shown:
        for name in [*param.opts, *param.secondary_opts]:
            plain = name[2:].removeprefix("no-") if name.startswith("--") else ""
            assert re.search(rf"(?<![\w-])({re.escape(name)}|--\[no-\]{plain})(?![\w-])", everything), name
    for text in (everything, usual):
        assert "…" not in text and "<bool>" not in text and "│" not in text
        assert re.search(r"^Options:$", text, re.M)
    assert set(re.findall(r"--[\w-]+", usual)) - {"--help-all"} <= set(re.findall(r"--[\w-]+", everything))


@pytest.mark.parametrize("words", VERBS)
def test_help_says_what_is_required_and_what_holds_otherwise(words: str) -> None:
    everything = printed(words, "--help-all", 200)
    for param in verb_of(words).params:
        if param.param_type_name != "option" or param.hidden:
            continue
        name = max(param.opts, key=len)
        said = re.search(rf"^  [^\n]*{re.escape(name)}\b.*?(?=^  \S|^\S|\Z)", everything, re.MULTILINE | re.DOTALL)
        if param.required:
            assert said and "(required)" in said[0], name
        if type(param.default) in (int, float):
            assert said and "default" in said[0], name
    usage = everything.split("\n\n")[0]
    assert "......" not in usage and "...}..." not in usage and "...]..." not in usage and "{old}" not in usage


def test_rare_flags_wait_for_help_all() -> None:
    usual, everything = printed("serve", "--help", 80), printed("serve", "--help-all", 80)
    assert "--watchdog-timeout" not in usual and "--watchdog-timeout X" in everything
    assert "--max-model-len N" in usual and "--help-all" in usual and "--help-all" not in everything
    assert len(usual.splitlines()) * 2 < len(everything.splitlines())
    assert {*all_options(GROUPS), *all_options(SERVER_GROUPS)} >= COMMON


@pytest.mark.parametrize("words", ["serve", "quantize"])
def test_lines_end_where_the_terminal_does(words: str) -> None:
    for columns in (50, 80, 100):
        text = printed(words, "--help-all", columns)
        for line in text.splitlines():
            names = len(line.split()) <= 4 and "|" not in line  # a name alone may be longer, a list of values not
            assert len(line) < columns or names, line
        for param in verb_of(words).params:
            for value in placeholder(param).split("|"):
                assert re.search(rf"(?<![\w-]){re.escape(str(value))}(?![\w-])", text), value


@pytest.mark.parametrize("line", ["serve -h", "-h", "bench -h", "bench latency -h", "--help-all", "chat --usage"])
def test_others_ways_to_ask_for_help(line: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0 and result.stdout.startswith("Usage: ")


def test_a_long_name_has_its_line() -> None:
    lines = section("Group", [("--" + "x" * 50, "What it does."), ("-y", "More.")], 80).splitlines()
    assert lines[1].strip() == "--" + "x" * 50 and lines[2].strip() == "What it does." and lines[3].split()[0] == "-y"


# ------------------------------------------------------------------ other programs' flags

KNOWN = {"--model": True, "--threads": True, "-p": True, "--ignore-eos": False, "--max-model-len": True}
KNOWN |= {"--device": True, "--max-tokens": True, "--kv-cache-dtype": True}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("-m a.gguf -c 99 -t 4 -n 5", "--model a.gguf --max-model-len 99 --threads 4 --max-tokens 5"),
        ("--ctx-size=99 --n-predict=5", "--max-model-len 99 --max-tokens 5"),
        ("-ngl 99 x", "x"),
        ("-ngl 0 x", "--device cpu x"),
        ("-c 0 -n -1 -t -1 x", "x"),
        ("-fa x -fa on y --flash-attn", "x y"),
        ("-ctk f16 -ctv q8_0", "--kv-cache-dtype int8"),
        ("--nnodes 1 --swap-space 4 --enforce-nothing", None),
        ("--nnodes=1 --prefill-context-parallel-size 1 --swap-space 4 x", "x"),
        ("--disable-log-requests x --no-enable-dbo y", "x y"),
        ("-p -ngl --ignore-eos x", "-p -ngl --ignore-eos x"),
        ("-phello --model=-m x", "-phello --model=-m x"),
        ("x -- -m y", "x -- -m y"),
        ("-5 -.5 -", "-5 -.5 -"),
        ("--verbose x", "x"),
    ],
)
def test_flags_become_ours(typed: str, meant: str | None) -> None:
    if meant is None:
        with pytest.raises(Exception, match="There is no flag --enforce-nothing"):
            as_ours(shlex.split(typed), KNOWN, "generate")
    else:
        assert as_ours(shlex.split(typed), KNOWN, "generate") == shlex.split(meant)


def test_every_listed_flag_has_somewhere_to_go() -> None:
    ours = {name for words in VERBS for param in verb_of(words).params for name in (*param.opts, *param.secondary_opts)}
    ours |= {"--help"}
    for name, other in LLAMA.items():
        assert name.startswith("-") and (other.into is None) == bool(other.why), name
        for words in (other.into or "", *other.values.values()):
            assert not words or words.split()[0] in ours, (name, words)
        assert not other.why.endswith(".")
    assert set(DEFAULTS) <= ours


# ------------------------------------------------------------------ completion


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("tokenmill ser", {"serve"}),
        ("tokenmill serve --kv-cache-d", {"--kv-cache-dtype"}),
        ("tokenmill chat --dtype b", {"bfloat16"}),
        ("tokenmill bench thr", {"throughput"}),
        ("tokenmill completion f", {"fish"}),
        ("tokenmill chat de", {"demo"}),
        ("tokenmill serve de", {"demo"}),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(shell: str, typed: str, wanted: set[str]) -> None:
    words = typed.split()
    asked = {
        "bash": {"COMP_WORDS": typed.replace(" ", "\n"), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": typed},
        "fish": {"_TYPER_COMPLETE_ARGS": typed, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    result = CliRunner(env={**asked, "_TOKENMILL_COMPLETE": f"complete_{shell}"}).invoke(app, [], prog_name="tokenmill")
    assert wanted <= set(re.findall(r"[\w-]+", result.stdout)), result.output
    assert "tokenmill:" not in result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_ask_the_command(shell: str) -> None:
    text = CliRunner().invoke(app, ["completion", shell]).stdout
    assert f"_TOKENMILL_COMPLETE=complete_{shell}" in text and "VARIABLE" not in text
