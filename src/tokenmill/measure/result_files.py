"""Files of results. Owns: reading JSON that a person named, and the mark of a result that is not whole. Must not know:
what figures mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.text_file import read_text_file

MOST_CHARS = 64 << 20
STOPPED = "stopped"
"""In a result: Ctrl-C came before all was measured, and the result holds what had been measured."""


def read_json(path: Path) -> Any:
    """The contents of a file. A UserError says why it cannot be read."""
    try:
        return json.loads(read_text_file(path, "File", MOST_CHARS))
    except ParameterError:
        raise
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path} is not JSON: {error}.") from error
