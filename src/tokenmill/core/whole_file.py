"""Files that others see whole or not at all. Owns: writing beside the name, then taking its place. Must not know: what
is written.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

MOST_PART = 48
"""Most characters of a file's name in that of its unfinished copy: names have a limit."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, even if the machine stops. What was there stays until then."""
    part = path.with_name(f".{path.name[:MOST_PART]}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
