"""How verbs end: one sentence and an exit code for what is known, a traceback for what is a bug."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tokenmill.cli.errors import told
from tokenmill.cli.main import app
from tokenmill.core.errors import EngineDeadError, ModelError, SequenceError, UserError


def ending(error: BaseException) -> tuple[int, str, BaseException | None]:
    """Exit code, standard error and escaped exception of a verb that fails so."""
    one = typer.Typer(pretty_exceptions_enable=False)

    @one.command()
    @told
    def verb() -> None:
        raise error

    result = CliRunner().invoke(one, [])
    return result.exit_code, result.stderr, result.exception


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("Do this."), 2), (ModelError("Do this."), 2), (EngineDeadError("Do this."), 3)]
    + [(SequenceError("Do this."), 1)],
)
def test_known_failures_are_one_sentence(error: Exception, code: int) -> None:
    got, text, _ = ending(error)
    assert (got, text) == (code, "tokenmill: Do this.\n")


def test_control_c_ends_quietly_with_130() -> None:
    code, text, _ = ending(KeyboardInterrupt())
    assert (code, text) == (130, "")


def test_a_bug_keeps_its_traceback() -> None:
    assert isinstance(ending(ZeroDivisionError("bug"))[2], ZeroDivisionError)


def fake_engine(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An engine that fails while it loads."""

    def broken(**_: object) -> None:
        raise error

    module = types.ModuleType("tokenmill.engine.async_llm")
    module.AsyncLLM = broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenmill.engine.async_llm", module)


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "a"], ["chat"]])
def test_a_model_that_does_not_load(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    fake_engine(monkeypatch, ModelError("There is no grain in this mill."))
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr) == (2, "tokenmill: There is no grain in this mill.\n")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate"], "--prompt TEXT"),
        (["generate", "--prompt", "a", "--prompt-file", "b"], "--prompt TEXT"),
        (["generate", "--prompt-file", "/no/such/file"], "cannot be read"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature must be in [0, 100]"),
        (["generate", "--prompt", "a", "--temperature", "0", "--n", "2"], "set temperature > 0"),
        (["generate", "here", "--model", "there", "--prompt", "a"], "Two models are named"),
        (["generate", "--prompt", "a", "--max-num-seqs", "0"], "max_num_seqs must be positive"),
        (["chat", "--temperature", "1000"], "/temp wants a number"),
        (["bench", "throughput"], "Give --workload"),
        (["bench", "throughput", "--input-len", "3"], "all of --input-len"),
        (["bench", "throughput", "--workload", "/no/such"], "cannot be read"),
        (["bench", "throughput", "--workload", "x", "--json", "/no/such/folder/out"], "no such folder"),
    ],
)
def test_mistakes_are_told_before_anything_loads(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], part: str
) -> None:
    fake_engine(monkeypatch, AssertionError("the engine was reached"))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.exception
    assert part in result.stderr and "Traceback" not in result.stderr


def test_a_prompt_file_must_be_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(app, ["generate", "--prompt-file", str(file)])
    assert result.exit_code == 2 and str(file) in result.stderr
