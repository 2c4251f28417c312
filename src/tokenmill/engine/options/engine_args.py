"""Engine arguments as an object, as vLLM's programs pass them on. Owns: EngineArgs, with a field for every option and
every accepted or refused name, and its conversion to and from command lines. Must not know: what options do.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, get_origin

from tokenmill.core.config import EngineConfig, all_options, make_config
from tokenmill.core.errors import ParameterError
from tokenmill.core.spellings import one_spelling
from tokenmill.core.vllm_arguments import ENGINE, SWITCHES, close_to, parsed


class _Arguments:
    """The methods of EngineArgs, which do not depend on its fields."""

    def __init__(self, model: str = "demo", **options: Any) -> None:
        known = {item.name: item.default for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        given = one_spelling(options)
        for name in given.keys() - known.keys():
            raise ParameterError(f"Unknown argument {name!r}.{close_to(name, list(known))}", param=name)
        for name, value in {**known, "model": model, **given}.items():
            setattr(self, name, value)
        self.config()

    def given(self) -> dict[str, Any]:
        """Fields that differ from their defaults: keyword arguments of LLM."""
        plain = {item.name: item.default for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in plain if getattr(self, name) != plain[name]}

    def config(self) -> EngineConfig:
        """The configuration for these arguments, or a UserError that names a wrong one."""
        return make_config(**self.given())

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give an argparse parser a flag for each argument; flags that it already has stay unchanged."""
        known = {flag for action in parser._actions for flag in action.option_strings}
        for item in dataclasses.fields(EngineArgs):  # type: ignore[arg-type]
            flag = "--" + item.name.replace("_", "-")
            if flag in known:
                continue
            if isinstance(item.default, bool) or item.name in SWITCHES:
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=item.default)
            else:
                parser.add_argument(flag, type=str if item.type == "text" else parsed, default=item.default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Make arguments from the result of such a parser."""
        names = [item.name for item in dataclasses.fields(EngineArgs)]  # type: ignore[arg-type]
        return EngineArgs(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _fields() -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name, (_, item, kind) in all_options().items():
        text = str in getattr(kind, "__args__", (kind,)) and get_origin(kind) is None
        found.append((name, "text" if text else Any, dataclasses.field(default=item.default, repr=item.repr)))
    return found + [(name, Any, dataclasses.field(default=None)) for name in ENGINE]


if TYPE_CHECKING:

    class EngineArgs(_Arguments):
        """Keyword arguments of LLM, checked when they are given."""

        pass

else:
    EngineArgs = dataclasses.make_dataclass("EngineArgs", _fields(), bases=(_Arguments,), init=False, namespace={
        "__module__": __name__, "__doc__": "Keyword arguments of LLM, checked when they are given."})  # fmt: skip

AsyncEngineArgs = EngineArgs
"""The same class: there is only one kind of engine."""
