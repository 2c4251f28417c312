"""A wrong value is told by the flag that was typed, before anything is loaded or made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import tokenmill
from tokenmill.cli.command import as_typed
from tokenmill.cli.flags import spelling
from tokenmill.cli.verbs import app
from tokenmill.core.bounds import POSITIVE
from tokenmill.core.config import GROUPS, all_options

AT_ONCE = ["bench latency", "bench throughput", "bench ablate", "bench serve", "tune", "plan"]


def verbs(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, verb in group.commands.items():
        yield from verbs(verb, (*path, name)) if hasattr(verb, "commands") else [((*path, name), verb)]


def is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def bounded() -> Iterator[tuple[list[str], str]]:
    """Every flag of a number with bounds, under each of its names, with numbers beyond them and what is none."""
    for path, verb in verbs(typer.main.get_command(app)):
        for param in verb.params:
            if not is_option(param):
                continue
            low, high = param.min, param.max
            if low is None and high is None:
                continue
            for name in param.opts:
                wrong = ["none", *([str(low - 1)] if low is not None else []), *([str(high + 1)] if high else [])]
                yield from (([*path], f"{name}={value}") for value in wrong)


def told(words: list[str]) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, (words, result.output, result.exception)
    return result.stderr.rstrip().splitlines()[-1]


def test_numbers_beyond_their_bounds_are_told_by_their_flag() -> None:
    every = [*bounded()]
    assert len(every) > 60
    for path, flag in every:
        sentence = told([*path, flag])
        name = flag.partition("=")[0]
        assert f"'{name}'" in sentence or f" {name} takes a " in sentence, (path, flag, sentence)


OWN = {
    "distill": ("cli/distill.py", "distill"),
    "prune": ("cli/prune.py", "distill/repair.py", "quantize/prune*.py", "quantize/sparse_methods.py"),
    "quantize": ("cli/quantize.py", "quantize"),
    **{name: (f"cli/{name}.py",) for name in ("merge", "pull", "create", "quality", "tune", "plan", "doctor")},
}
"""What only this verb uses. Files of several verbs count for all of them."""


def strings(path: Path) -> Iterator[str]:
    """The texts of a module without its docstrings."""
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def test_messages_of_a_verb_name_its_own_flags() -> None:
    source = Path(tokenmill.__file__).parent
    flags = {
        path[-1]: {name for param in verb.params for name in (*param.opts, *param.secondary_opts)}
        for path, verb in verbs(typer.main.get_command(app))
    }
    allowed: dict[Path, set[str]] = {}
    for verb, places in OWN.items():
        for place in places:
            for found in source.glob(place):
                for file in found.rglob("*.py") if found.is_dir() else [found]:
                    allowed[file] = allowed.get(file, {"--speculative-config"}) | flags[verb]
    assert len(allowed) > 30
    for file, known in allowed.items():
        for text in strings(file):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", re.sub("`[^`]*`", "", text)):
                assert flag in known, (file, flag, text)


def test_sizes_of_benchmarks_have_ceilings() -> None:
    for path, verb in verbs(typer.main.get_command(app)):
        if path[0] == "bench":
            for param in verb.params:
                if not is_option(param) or param.type_descriptor.annotation is not int or param.min is None:
                    continue
                free = {"--vocab-size", "--seed"}  # nothing is made of these
                assert param.max is not None or param.opts[0] in free, (path, param.opts)


@pytest.mark.parametrize("name", sorted(POSITIVE & all_options(GROUPS).keys()))
def test_options_are_told_by_the_name_that_was_typed(name: str) -> None:
    _, item, _ = all_options(GROUPS)[name]
    for given in map(spelling, (name, *item.metadata["aliases"])):
        assert told(["generate", "demo", "-p", "x", given, "0"]).startswith(f"tokenmill: {given} must be positive")


def test_only_what_is_wrong_is_renamed() -> None:
    named = {"--max-model-len": "-c", "max_model_len": "-c", "model": "--model"}
    assert as_typed("max_model_len must be positive; see --max-model-len.", named, "max_model_len") == (
        "-c must be positive; see -c."
    )
    assert as_typed("config.json: max_model_len must be 3", named, None).endswith("max_model_len must be 3")
    assert as_typed("--max-model-length and the model is what", named, "model") == (
        "--max-model-length and the --model is what"
    )
