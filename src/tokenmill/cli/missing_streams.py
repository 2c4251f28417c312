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
    """Open the standard streams that are closed, on /dev/null."""
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  (for as long as we live)


def escape_lacking_characters() -> None:
    """Escape characters that standard output cannot encode (it may be ASCII), because a model may write anything.
    Python does this on standard error by itself. In the POSIX locale it lets only bytes of file names pass."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")
