"""Names of adapters, and how options spell them. Must not know: engines, files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.demo.files import demo_dir

DEMO = "demo:"
"""The prefix of the path of an adapter that comes with the demo model: demo:pirate, demo:sql."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.:/@+-]{0,127}")


def check_name(name: Any) -> None:
    """Refuse a name that could not be used as a model name."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name:
        raise ParameterError(
            "an adapter's name is 1 to 128 letters, digits or _.:/@+- and begins with a letter or digit, not "
            f"{_shown(name)}.",
            param="lora_name",
        )


def located(path: str) -> str:
    """The path of an adapter; the demo model's adapters come with this program."""
    if not path.startswith(DEMO):
        return path
    found = demo_dir(f"lora-{path.removeprefix(DEMO)}")
    if not re.fullmatch(r"[a-z]+", path.removeprefix(DEMO)) or not found.is_dir():
        raise ParameterError(f"The demo model has no adapter {path!r}: there are demo:pirate and demo:sql.")
    return str(found)


def read_modules(given: Iterable[str]) -> list[tuple[str, str]]:
    """Read lora_modules: NAME=PATH, several with commas between them, or vLLM's JSON objects."""
    found: list[tuple[str, str]] = []
    for text in given:
        if text.lstrip().startswith("{"):
            found.append(_from_json(text))
            continue
        for part in text.split(","):
            name, equals, path = part.strip().partition("=")
            if not equals or not name or not path:
                raise ParameterError(f"lora_modules takes NAME=PATH, not {_shown(part)}.", param="lora_modules")
            found.append((name, path))
    for place, (name, _) in enumerate(found):
        if any(name == before for before, _ in found[:place]):
            raise ParameterError(f"lora_modules names {_shown(name)} twice.", param="lora_modules")
    return found


def _from_json(text: str) -> tuple[str, str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"lora_modules holds no JSON object: {_shown(text)}.", param="lora_modules") from error
    if not isinstance(value, Mapping) or not {"name", "path"} <= value.keys() <= {"name", "path", "base_model_name"}:
        raise ParameterError(
            f"lora_modules takes objects with name and path (and base_model_name), not {_shown(text)}.",
            param="lora_modules",
        )
    if not isinstance(value["path"], str):
        raise ParameterError(f"lora_modules: a path is text, not {_shown(value['path'])}.", param="lora_modules")
    return value["name"], value["path"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
