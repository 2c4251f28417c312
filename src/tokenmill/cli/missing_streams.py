"""Standard streams that lack something. Owns: opening closed ones on nothing (/dev/null), and writing characters that
an encoding lacks as \\u escapes.

Otherwise the next file or socket would get the closed descriptor, and prints would be written into that.
"""

from __future__ import annotations

import io
import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_missing_streams() -> None:
    """Every standard stream is there, if only as a hole."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  (for as long as we live)


def escape_lacking_characters() -> None:
    """A model may say anything, and standard output may be ASCII; Python does so on standard error by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
