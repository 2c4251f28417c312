"""Short of disk, memory, descriptors, threads or text: a verb says so in one sentence."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tokenmill.cli.errors import with_exit_codes
from tokenmill.cli.verbs import app
from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.core.text_file import read_text_file
from tokenmill.text import patterns

MEMORY = "There is not enough memory"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no such device")
@pytest.mark.parametrize("words", ["--version", "--help", "serve --help-all", "bench --help", "list"])
def test_a_full_disk_behind_standard_output_is_told(words: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", "from tokenmill.cli.main import main; main()", *words.split()],
            env={**os.environ, "TOKENMILL_HOME": str(tmp_path)}, stdout=full, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (2, b"tokenmill: No space left on device\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), MEMORY),
        (MemoryError(), MEMORY),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory"),
            MEMORY,
        ),
        (RuntimeError("can't start new thread"), "starts no more threads"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "Input/output error"),
        (OSError(errno.EACCES, "Permission denied", "/some/file"), "/some/file: Permission denied"),
    ],
    ids=str,
)
def test_what_the_machine_lacks_is_no_traceback(error: Exception, said: str) -> None:
    def verb() -> None:
        raise error

    lone = typer.Typer()
    lone.command()(with_exit_codes(verb))
    result = CliRunner().invoke(lone, [])
    assert result.exit_code == 2 and said in result.stderr


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    def verb() -> None:
        raise RuntimeError("shapes do not fit")

    lone = typer.Typer()
    lone.command()(with_exit_codes(verb))
    assert isinstance(CliRunner().invoke(lone, []).exception, RuntimeError)


def test_the_posix_locale_does_not_end_an_answer() -> None:
    script = (
        "from tokenmill.cli.missing_streams import escape_lacking_characters; escape_lacking_characters(); "
        "print('\\u6c34 \\udcff')"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    environment = {**plain, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = subprocess.check_output([sys.executable, "-c", script], env=environment)
    assert said == b"\\u6c34 \\udcff\n"


@pytest.mark.parametrize(
    "words",
    [["generate", "-p", "a\udcff"], ["generate", "-p", "a", "--stop", "\udcff"], ["chat", "--system", "\udcff"]],
    ids=str,
)
def test_bytes_that_are_no_text_are_not_taken_for_text(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "is not UTF-8 text" in result.stderr


def test_a_model_in_a_folder_whose_name_is_no_text_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "store"))
    folder = tmp_path / "\udcff"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    result = CliRunner().invoke(app, ["pull", str(folder), "--name", "mine"])
    assert result.exit_code == 2 and "is not UTF-8 text" in result.stderr
    assert CliRunner().invoke(app, ["list"]).stdout.count("\n") == 1


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/full"])
def test_a_device_is_no_text(device: str, tmp_path: Path) -> None:
    for words in (
        ["create", "mine", "-f", device],
        ["generate", "--prompt-file", device],
        ["chat", "--chat-template", device],
        ["serve", "--chat-template", device],
        ["quantize", "demo", str(tmp_path / "out"), "--perplexity", device],
        ["bench", "compare", device, device],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2 and f"{device} cannot be read: it is a device" in result.stderr, words


def test_texts_have_a_bound_and_pipes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("é\r\n" * 4, newline="")
    assert read_text_file(file, "--text", 8) == "é\n" * 4
    with pytest.raises(ParameterError, match=r"--text .* is over the limit of 7 characters"):
        read_text_file(file, "--text", 7)
    read, write = os.pipe()
    os.write(write, b"piped")
    os.close(write)
    try:
        assert read_text_file(f"/dev/fd/{read}", "--text", 8) == "piped"
    finally:
        os.close(read)


def test_a_machine_without_room_is_not_blamed_on_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(patterns.subprocess, "run", none)
    with pytest.raises(ModelError, match="could not be tried: Too many open files; try again"):
        patterns.try_patterns(["a+b"])
    ended = subprocess.CompletedProcess([], -9, b"", b"")
    monkeypatch.setattr(patterns.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ModelError, match="could not be tried: their process was killed; try again"):
        patterns.try_patterns(["a+b"])


def test_patterns_are_tried_below_lower_limits() -> None:
    """`ulimit -v` cannot be raised again, so the trial takes what is left of it."""
    script = """
import resource
from tokenmill.text.patterns import try_patterns
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
try_patterns(["a+b"])
try:
    try_patterns(["(a"])
except ValueError as error:
    print(error)
"""
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert said.startswith("its pattern '(a' is not usable")
