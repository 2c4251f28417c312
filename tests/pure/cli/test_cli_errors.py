"""How verbs end: one sentence and an exit code for what is known, a traceback for what is a bug."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import tokenmill
from tokenmill.cli.bench_common import check_place
from tokenmill.cli.command import Verb
from tokenmill.cli.errors import with_exit_codes
from tokenmill.cli.generate import _read_input
from tokenmill.cli.interrupts import Interrupts
from tokenmill.cli.named_files import write_named
from tokenmill.cli.typed_messages import messages
from tokenmill.cli.verbs import app
from tokenmill.core.config import cache_dir, data_dir
from tokenmill.core.errors import EngineDeadError, ModelError, ParameterError, SequenceError, UserError


def ending(error: BaseException) -> tuple[int, str, BaseException | None]:
    """Exit code, standard error and escaped exception of a verb that fails so."""
    one = typer.Typer(pretty_exceptions_enable=False)

    @one.command(cls=Verb)
    @with_exit_codes
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


@pytest.mark.parametrize("kind", [UserError, ParameterError])
@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("Too long: raise --max-model-len.", " (`verb` has no --max-model-len.)"),
        ("Say --dtype or --device, not --dtype.", " (`verb` has no --dtype and --device.)"),
        ("Do this: `serve --dtype float32`, `pip install --upgrade x`.", ""),
        ("--no-such is no flag; --help is one.", ""),
    ],
)
def test_flags_that_a_verb_lacks_are_told(kind: type[Exception], text: str, note: str) -> None:
    """Messages of code that several verbs share may name flags of others."""
    assert ending(kind(text))[1] == f"tokenmill: {text}{note}\n"


@pytest.mark.parametrize(("wish", "coloured"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_can_be_declined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wish: dict[str, str], coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = CliRunner(env=wish)
    for arguments in (
        ["generate", "--prompt-file", str(tmp_path)],
        ["bench", "throughput", "--workload", str(tmp_path)],
    ):
        told = terminal.invoke(app, arguments, color=True).stderr
        assert "tokenmill: " in told and ("\x1b[" in told) == coloured


def test_control_c_ends_quietly_with_130() -> None:
    code, text, _ = ending(KeyboardInterrupt())
    assert (code, text) == (130, "")


def test_a_bug_keeps_its_traceback() -> None:
    assert isinstance(ending(ZeroDivisionError("bug"))[2], ZeroDivisionError)


def fake_engine(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An engine that fails while it loads."""

    def broken(**_: object) -> None:
        raise error

    module = types.ModuleType("tokenmill.engine.interfaces.async_llm")
    module.AsyncLLM = broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenmill.engine.interfaces.async_llm", module)


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
        (["generate", "--prompt", "a", "--prompt-file", "b"], "both give the prompt"),
        (["generate", "--prompt-file", "/no/such/file"], "cannot be read"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature must be in [0, 100]"),
        (["generate", "--prompt", "a", "--temperature", "0", "--n", "2"], "set temperature > 0"),
        (["generate", "here", "--model", "there", "--prompt", "a"], "Two models are named"),
        (["generate", "--prompt", "a", "--max-num-seqs", "0"], "--max-num-seqs must be positive"),
        (["generate", "--prompt", "a", "--seed", "-1"], "seed must not be negative"),
        (["generate", "--prompt", "a", "--max-waiting", "0"], "--max-waiting must be positive"),
        (["generate", "--prompt", "a", "--threads", "100000"], "threads must be at most 1024"),
        (["generate", "--prompt", "a", "--max-num-seqs", "100000000"], "--max-num-seqs must be at most 65536"),
        (["generate", "--prompt", "a", "--num-blocks", "100000000000"], "must be at most 134217728"),
        (["generate", "--prompt", "a", "--gpu-memory-utilization", "90"], "must be at most 1, got 90"),
        (["generate", "--prompt", "a", "--gpu-memory-utilization", "nan"], "must be positive, got nan"),
        (["serve", "--request-timeout", "inf"], "--request-timeout must be finite"),
        (["serve", "--port", "99999"], "port must be at most 65535"),
        (["distill", "demo", "out", "--data", "x", "--kind", "draft", "--heads", "3"], "--heads has no effect"),
        (["distill", "demo", "out", "--data", "x", "--kind", "medusa", "--layers", "2"], "--layers has no effect"),
        (["distill", "demo", "out", "--data", "x", "--kind", "eagle3", "--hidden", "0"], "--hidden has no effect"),
        (["distill", "demo", "out", "--data", "x", "--hidden", "33"], "multiple of 32"),
        (["generate", "-p", "x", "--stream", "--json"], "--stream prints one text"),
        (["generate", "-p", "x", "--stream", "--n", "2"], "--stream prints one text"),
        (["generate", "-p", "x", "--revision", "v2"], "'demo' lies on this machine"),
        (["generate", "-p", "x", "--tokenizer-revision", "v2"], "'demo' lies on this machine"),
        (["chat", "--temperature", "1000"], "--temperature takes a number"),
        (["bench", "throughput", "--workload", "x", "--num-prompts", "3"], "brings its own lengths"),
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


def test_files_and_memory_are_told_and_bugs_are_not(tmp_path: Path) -> None:
    full, missing = OSError(errno.ENOSPC, "No space left on device"), FileNotFoundError(2, "No such file", "here")
    assert ending(full)[:2] == (2, "tokenmill: No space left on device\n")
    assert ending(missing)[:2] == (2, "tokenmill: here: No such file\n")
    assert "not enough memory" in ending(MemoryError())[1]
    assert isinstance(ending(ConnectionResetError(104, "reset"))[2], ConnectionResetError)


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    write_named(file, "first")

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_named(file, "second")
    assert file.read_text() == "first" and list(tmp_path.iterdir()) == [file]


def test_two_that_write_one_file_leave_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.json"
    texts = ["a" * 9, "b" * 4000]

    def slowly(_: int) -> None:
        """While one is written, another process writes the same file."""
        if len(texts) == 2:
            write_named(file, texts.pop())

    monkeypatch.setattr(os, "fsync", slowly)
    write_named(file, texts[0])
    assert file.read_text() == "a" * 9 and list(tmp_path.iterdir()) == [file]
    write_named(tmp_path / ("n" * 255), "long")
    assert len(list(tmp_path.iterdir())) == 2


def test_places_that_cannot_be_written_are_told_before(tmp_path: Path) -> None:
    for place, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "no such folder")):
        with pytest.raises(UserError, match=words):
            check_place(place, "--json")


def test_a_pipe_that_closes_ends_quietly() -> None:
    script = "from tokenmill.cli.main import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, "serve", "--help"], stdout=subprocess.PIPE, stderr=-1
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""


def test_ctrl_c_while_the_verbs_are_imported_is_no_traceback() -> None:
    script = """
import sys
class Pressed:
    def find_spec(self, name, *rest):
        if name == "tokenmill.cli.verbs":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Pressed())
from tokenmill.cli.main import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", script, "list"], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_ctrl_c_while_the_flags_are_made_is_no_traceback() -> None:
    script = """
from tokenmill.cli import verbs
from tokenmill.cli.main import main
def pressed():
    raise KeyboardInterrupt
verbs.app = pressed
main()
"""
    ended = subprocess.run([sys.executable, "-c", script, "list"], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_input_that_is_closed_or_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = CliRunner().invoke(app, ["generate", "--prompt", "-"], input=b"\xff\xfe")
    assert bad.exit_code == 2 and "not UTF-8 text" in bad.stderr
    monkeypatch.setattr(sys, "stdin", None)
    assert list(messages(Interrupts())) == []
    with pytest.raises(UserError, match="closed"):
        _read_input()


def test_the_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"tokenmill {tokenmill.__version__}\n"


@pytest.mark.parametrize("arguments", [["chat"], ["generate", "-p", "hi"], ["plan"], ["pull"]])
def test_a_home_that_nobody_has_is_a_name_like_others(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    fake_engine(monkeypatch, AssertionError("the engine was reached"))
    verb, *rest = arguments
    result = CliRunner().invoke(app, [verb, "~no-such-user/x", *rest])
    assert result.exit_code == 2, result.exception
    assert "~no-such-user/x" in result.stderr and "Traceback" not in result.stderr


def test_only_one_place_looks_for_homes() -> None:
    source = Path(tokenmill.__file__).parent
    asked = [path.name for path in source.rglob("*.py") if ".expanduser(" in path.read_text(encoding="utf-8")]
    assert asked == ["files.py"]


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    for name in ("TOKENMILL_CACHE", "XDG_CACHE_HOME", "TOKENMILL_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for folder in (cache_dir, data_dir):
        with pytest.raises(UserError, match="set HOME, or TOKENMILL_CACHE and TOKENMILL_HOME"):
            folder()
    monkeypatch.setenv("TOKENMILL_HOME", "/a")
    monkeypatch.setenv("TOKENMILL_CACHE", "/b")
    assert (data_dir(), cache_dir()) == (Path("/a"), Path("/b/tokenmill"))


def test_what_standard_output_cannot_say_is_escaped() -> None:
    """Also half a character, which a command line of another encoding brings."""
    script = (
        "from tokenmill.cli.missing_streams import escape_lacking_characters; escape_lacking_characters(); "
        "print('\\u6c34 \\xe9 \\udcff')"
    )
    for encoding, said in (("ascii", b"\\u6c34 \\xe9 \\udcff\n"), ("utf-8", "\u6c34 \xe9 ".encode() + b"\\udcff\n")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        assert subprocess.check_output([sys.executable, "-c", script], env=environment) == said
