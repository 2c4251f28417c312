"""JSON files of model folders. Owns: size and depth limits, and naming the file in errors.
Must not know: what the values mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill.core.errors import ModelError

MAX_DEPTH = 64


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file; raises ModelError that names the file."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelError(f"{path}: {size} bytes is over the limit of {max_bytes} for such a file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file; the model folder is incomplete") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    if _deeper_than(value, MAX_DEPTH):
        raise ModelError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    return value


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)
