"""Writing a model's text to a terminal. Owns: writing the new part of a growing text, without control characters.

A model may say anything, also escape sequences, which would recolour, retitle or overwrite the terminal.
"""

from __future__ import annotations

import sys

from tokenmill.core.config import only_prints, wants_no_colour

DIM, PLAIN, CLEARED = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
_CONTROLS = {code: "\ufffd" for code in [*range(0x20), 0x7F, *range(0x80, 0xA0)] if chr(code) not in "\n\t"}


def harmless(text: str) -> str:
    """The text with control characters replaced, except line ends and tabs."""
    return text.translate(_CONTROLS)


def steered() -> bool:
    """Is standard output a terminal on which written text can be taken back?"""
    return sys.stdout.isatty() and not only_prints()


def dimmed(text: str) -> str:
    """A remark. A terminal that can, shows it dimmer than other text."""
    return text if wants_no_colour() else f"{DIM}{text}{PLAIN}"


class Live:
    """Writes a growing text to standard output. An output that is not a terminal gets it unchanged."""

    def __init__(self) -> None:
        self.shown = ""
        self.clean = sys.stdout.isatty()
        self.waiting = steered()
        if self.waiting:
            sys.stdout.write(dimmed("..."))
            sys.stdout.flush()

    def show(self, text: str) -> None:
        """Show the text so far."""
        new = text[len(self.shown) :]
        self._end_waiting(new)
        sys.stdout.write(harmless(new) if self.clean else new)
        sys.stdout.flush()
        self.shown = text

    def end(self) -> None:
        """The text is complete."""
        self._end_waiting("\n")
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _end_waiting(self, new: str) -> None:
        if self.waiting and new:
            sys.stdout.write(CLEARED)
            self.waiting = False
