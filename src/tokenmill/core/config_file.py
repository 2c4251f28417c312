"""Options from a YAML file. Owns: reading it, and which names are the server's. Must not know: flags, engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmill.core.config import SERVER_GROUPS, all_options
from tokenmill.core.errors import ParameterError
from tokenmill.core.spellings import one_spelling
from tokenmill.core.text_values import read_count
from tokenmill.core.yaml_file import read_mapping


class Unsaid(str):
    """A default that the person did not type, so a file or the environment may replace it."""


DEFAULT_MODEL = Unsaid("demo")
_LISTS = ("api_key", "allowed_hosts", "allowed_origins")


def read_config_file(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine options, server options) of a file; dashes and underscores mean the same."""
    if path is None:
        return {}, {}
    found = read_mapping(path, "--config", "not YAML") or {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ParameterError(f"--config {path} must hold a mapping of option names to values.")
    named = one_spelling(found, f"--config {path}: ")
    for many in _LISTS:
        if isinstance(named.get(many), str):
            named[many] = [named[many]]
    counts = _counts()
    for name, value in named.items():
        if name in counts and isinstance(value, str):
            count = read_count(value)
            named[name] = value if count is None else count
    ours = all_options(SERVER_GROUPS)
    mine = {name: value for name, value in named.items() if name in ours}
    return {name: value for name, value in named.items() if name not in ours}, mine


def _counts() -> set[str]:
    """Names of options that are whole numbers: a file may write 32k for one, as the command line may."""
    every = {**all_options(), **all_options(SERVER_GROUPS)}
    kinds = {name: getattr(kind, "__args__", (kind,)) for name, (_, _, kind) in every.items()}
    counts = [name for name, of in kinds.items() if int in of and str not in of]
    return {spelling for name in counts for spelling in (name, *every[name][1].metadata["aliases"])}


def with_config_file(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of an engine, completed from the file that `config` names. The server's options are left out,
    so that one file serves both."""
    given = one_spelling({name: v for name, v in options.items() if name != "config" and v is not DEFAULT_MODEL})
    path = options.get("config")
    if path is not None and not isinstance(path, (str, Path)):
        raise ParameterError("config must be the path of a YAML file.", param="config")
    return {**read_config_file(None if path is None else Path(path))[0], **given}
