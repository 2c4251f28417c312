"""Showing an answer in a terminal. Owns: wrapping words, folding reasoning into one line, and removing control
characters.

If the output is not a terminal, it gets the answer's text only, unchanged. Must not know: engines, conversations.
"""

from __future__ import annotations

import shutil
import sys
import unicodedata

from tokenmill.cli.terminal import CLEARED, dimmed, harmless, steered

FENCE = "```"
WIDEST, NARROWEST = 100, 20
"""The limits of the width of text, whatever the terminal has."""


def cells(text: str) -> int:
    """The columns that a text takes."""
    return sum(_cells(char) for char in text)


class Wrapped:
    """Turns pieces of text into text whose lines break between words. Code between fences stays as it is."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.column = 0
        self.word = ""
        self.spaces = ""
        self.head = ""
        """The first characters of the line, which may open or close a block of code."""
        self.code = False

    def push(self, text: str) -> str:
        """The text that can be written now. The last word waits until it is complete."""
        return "".join(self._take(char) for char in text)

    def end(self) -> str:
        """The last word."""
        return self._flush()

    def _take(self, char: str) -> str:
        if char == "\n":
            out = self._flush() + (self.spaces if self.code else "") + "\n"
            self.code ^= self.head == FENCE
            self.column, self.spaces, self.head = 0, "", ""
            return out
        if len(self.head) < len(FENCE) and not (char.isspace() and not self.head):
            self.head += char
        if char in " \t":
            out = self._flush()
            self.spaces += char
            return out
        out = self._flush() if _cells(char) == 2 else ""  # a line may break between such characters
        self.word += char
        return out + (self._flush() if _cells(char) == 2 else "")

    def _flush(self) -> str:
        word, spaces = self.word, self.spaces
        if not word:
            return ""
        self.word = self.spaces = ""
        width = cells(word)
        if self.column and not self.code and self.column + len(spaces) + width > self.columns:
            self.column = width
            return "\n" + word
        self.column += len(spaces) + width
        return spaces + word


class Screen:
    """One answer. `folded`: show only the length of reasoning."""

    def __init__(self, *, wrap: bool = True, folded: bool = True) -> None:
        self.terminal = sys.stdout.isatty()
        columns = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns - 1))
        self.wrapped = Wrapped(columns) if wrap and self.terminal else None
        self.folded = folded
        self.thought = ""
        self.said = ""
        self._count = 0
        self._columns = columns
        self._steered = self._waiting = steered()
        if self._waiting:
            sys.stdout.write(dimmed("..."))
            sys.stdout.flush()

    def reason(self, text: str) -> None:
        """Add reasoning."""
        self.thought += text
        if not self.terminal:
            return
        if not self.folded:
            self._write(dimmed(self._laid(text)))
        elif self._steered:
            self._count += sum(char.isspace() for char in text)
            note = f"thinking ... {self._count} words"
            self._write(CLEARED + dimmed(note[: self._columns - 1]))

    def say(self, text: str) -> None:
        """Add to the answer."""
        if not self.said:
            self._end_thought()
        self.said += text
        self._write(self._laid(text) if self.terminal else text)

    def end(self) -> None:
        """The answer has ended."""
        if not self.said:
            self._end_thought()
        self._write((self.wrapped.end() if self.wrapped is not None else "") + "\n")

    def _end_thought(self) -> None:
        if not self.thought or not self.terminal:
            return
        if self.folded:
            words = len(self.thought.split())
            cleared = CLEARED if self._steered else ""
            self._write(cleared + dimmed(f"(thought for {words} words; /thinking shows them)") + "\n")
        else:
            rest = self.wrapped.end() if self.wrapped is not None else ""
            self._write(dimmed(rest) + "\n\n")
        if self.wrapped is not None:
            self.wrapped = Wrapped(self.wrapped.columns)

    def _laid(self, text: str) -> str:
        text = harmless(text)
        return self.wrapped.push(text) if self.wrapped is not None else text

    def _write(self, text: str) -> None:
        if self._waiting and text:
            text, self._waiting = CLEARED + text, False
        sys.stdout.write(text)
        sys.stdout.flush()


def _cells(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
