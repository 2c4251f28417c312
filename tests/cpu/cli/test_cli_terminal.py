"""The verbs on a real terminal: what a person sees and types."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.demo import demo_dir

pytestmark = pytest.mark.skipif(not (demo_dir("main") / "config.json").exists(), reason="the demo model is not here")
STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
MOST_S = 240.0


def take_terminal() -> None:
    """Standard input is the child's terminal: what is typed there may interrupt it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background have it ignored, which children inherit


class Terminal:
    """A verb on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.end, inner = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-c", "from tokenmill.cli.main import main; main()", *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm", "TOKENMILL_KV_CACHE_MEMORY_BYTES": str(64 << 20)},
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(inner)
        self.shown = ""
        self.read = 0

    def until(self, pattern: str) -> str:
        """What is shown until this matches, from where the last one ended."""
        give_up = time.monotonic() + MOST_S
        while (found := re.search(pattern, self.text[self.read :])) is None:
            assert self._take() and time.monotonic() < give_up, f"{pattern} never came: {self.text}"
        self.read += found.end()
        return self.text[: self.read]

    def type(self, line: str) -> None:
        """Keys, as they are."""
        os.write(self.end, line.encode())

    def insist(self, key: str, pattern: str) -> None:
        """Press a key until this comes: readline does not hear one between its prompt and its first look."""
        give_up = time.monotonic() + MOST_S
        while re.search(pattern, self.text[self.read :]) is None:
            assert time.monotonic() < give_up, self.text
            self.type(key)
            while select.select([self.end], [], [], 0.5)[0] and self._take():
                pass
        self.until(pattern)

    def close(self) -> int:
        """Until the program has ended; -> its exit code."""
        while self._take():
            pass
        return self.child.wait(MOST_S)

    @property
    def text(self) -> str:
        """What was shown, without colours and moves of the cursor."""
        return STEERING.sub("", self.shown)

    def _take(self) -> bool:
        if not select.select([self.end], [], [], MOST_S)[0]:
            return False
        try:
            new = os.read(self.end, 65536)
        except OSError:  # the other end is closed
            return False
        self.shown += new.decode(errors="replace")
        return bool(new)


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    """Terminals that are closed whatever happens."""
    every: list[Terminal] = []
    yield every
    for terminal in every:
        terminal.child.kill()
        terminal.child.wait()
        os.close(terminal.end)


def test_a_talk_from_its_first_line_to_its_last(opened: list[Terminal], tmp_path: Path) -> None:
    terminal = Terminal("chat", "--temperature", "0")
    opened.append(terminal)
    told = terminal.until(r"> $")
    assert "Loading demo ..." in told and "/help lists what can be typed" in told
    assert re.search(r"context 8,192 tokens; K/V cache of [\d,]+ tokens\n", told)
    for typed, answer in (
        (
            "What is the capital of France?",
            r"Paris[\s\S]*first after [\s\S]*context \d+ of 8192\)\s+> $",
        ),
        (f"/save {tmp_path / 'talk.json'}", r"Saved 2 turns to .*\n> $"),
        ("/nope", r"There is no command /nope; /help lists them\. [^\n]*\n> $"),
        ("/model /no/such", r"'/no/such' is neither an existing folder[\s\S]*\n> $"),
    ):
        terminal.type(f"{typed}\r")
        terminal.until(answer)
    terminal.insist("\x03", r"\(Ctrl-D or /exit leaves\)\n> $")
    terminal.type("\x04")
    assert terminal.close() == 0 and terminal.text.endswith("> \n")
    assert (tmp_path / "talk.json").exists() and "Traceback" not in terminal.text


def test_a_text_that_goes_on_says_who_answers_questions(opened: list[Terminal]) -> None:
    terminal = Terminal("generate", "demo", "-p", "Once upon a time", "--max-tokens", "8", "--temperature", "0")
    opened.append(terminal)
    assert terminal.close() == 0
    assert "`tokenmill chat demo` answers questions" in terminal.text and "Loading demo ..." in terminal.text


def test_a_server_says_where_it_is_and_what_it_waits_for(opened: list[Terminal]) -> None:
    terminal = Terminal("serve", "demo", "--port", "0", "--host", "0.0.0.0")
    opened.append(terminal)
    told = terminal.until(r"\d\d:\d\d:\d\d +serving .*\n")
    assert "Loading demo ..." in told and "warning: 0.0.0.0 can be reached from other machines" in told
    assert re.search(r"web page at http://localhost:\d+/\n +curl http://localhost:", told)
    terminal.type("\x03")
    terminal.until(r"stopping; no answer is open\n")
    assert terminal.close() == 0 and "Traceback" not in terminal.text
