"""Files of results. Owns: reading JSON that a person named. Must not know: what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenmill.core.errors import ParameterError, why


def read_json(path: Path) -> Any:
    """The contents of a file. A UserError says why it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"{path} cannot be read: {why(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path} is not JSON: {error}.") from error
