"""A mapping in a YAML or JSON file that a person names. Owns: reading it within a bound, refusing a name that stands
twice, and how failures are worded. Must not know: what the names mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmill.core.errors import ParameterError, why

MAX_FILE_BYTES = 1 << 20


def read_mapping(path: Path, flag: str, kind: str) -> Any:
    """What the file holds. flag: how it was named; kind: what it must be, for the error."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML takes the last of two equal names; a person who wrote both has overlooked one."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    line = key.start_mark.line + 1
                    raise ParameterError(  # the name may be a key that nobody shall see
                        f"{flag} {path}: the name in line {line} stands twice in one mapping."
                    )
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    seen.add(key.value)
            return node

    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ParameterError(f"{flag} {path} is larger than {MAX_FILE_BYTES} bytes.")
        return yaml.load(data.decode("utf-8"), Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{flag} {path} cannot be read: {why(error)}.") from error
    except ParameterError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: 2024-02-31, or 5000 digits
        raise ParameterError(f"{flag} {path} is {kind}: {_problem(error)}.") from None


def _problem(error: Exception) -> str:
    """What is wrong and where, without the line itself: it may hold a key."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)[:100].partition(";")[0]
    return problem if mark is None else f"{problem} (line {mark.line + 1})"
