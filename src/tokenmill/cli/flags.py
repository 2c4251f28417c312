"""The engine's options as flags. Owns: turning every field of core.config into a command-line option.

A field that is added there appears in every verb that loads a model, by itself. Must not know: torch, any verb.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any, Literal, get_origin

import typer

from tokenmill.core.config import GROUPS, EngineConfig, all_options, make_config
from tokenmill.core.errors import ParameterError

Verb = Callable[..., None]
MODEL = typer.Argument(None, metavar="MODEL", help="Folder, .gguf file, hub name, or `demo` (the default).")
_PANELS = {
    "listen": "Listening",
    "serve": "Serving",
    "model": "Model",
    "cache": "K/V cache",
    "schedule": "Scheduling",
    "execute": "Execution",
    "speculate": "Speculation",
}


def engine_flags(verb: Verb) -> Verb:
    """Give `verb` a flag for every engine option; those that were typed arrive in its `options` dict."""
    return with_flags("options", option_flags(GROUPS))(verb)


def option_flags(groups: Mapping[str, type]) -> dict[str, inspect.Parameter]:
    """One flag for every option of these groups, by option name, for `with_flags`."""
    return {name: _parameter(name, group, item, kind) for name, (group, item, kind) in all_options(groups).items()}


def with_flags(into: str, flags: Mapping[str, inspect.Parameter]) -> Callable[[Verb], Verb]:
    """Give a verb these flags; the values that were typed arrive by name in its keyword argument `into`, a dict."""

    def decorate(verb: Verb) -> Verb:
        own = inspect.signature(verb, eval_str=True)
        kept = [parameter for name, parameter in own.parameters.items() if name != into]

        @functools.wraps(verb)
        def run_verb(**given: Any) -> None:
            typed = {name: given.pop(flag.name) for name, flag in flags.items()}
            verb(**given, **{into: {name: value for name, value in typed.items() if value not in (None, [])}})

        run_verb.__dict__.pop("__wrapped__", None)
        every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*kept, *flags.values()]]
        run_verb.__dict__["__signature__"] = own.replace(parameters=every)
        run_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return run_verb

    return decorate


def flag(name: str, kind: Any, help: str, *, spelled: str = "", **settings: Any) -> inspect.Parameter:
    """One optional flag for `with_flags`; spelled: its names, if it is not called as it is named."""
    option = typer.Option(None, *(spelled.split() or [spelling(name)]), help=help, **settings)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def settle(model: str | None, options: Mapping[str, Any]) -> tuple[EngineConfig, dict[str, Any]]:
    """Check what was typed, before anything heavy is imported; -> the configuration, and keywords for LLM."""
    given = dict(options)
    if model is not None:
        if given.setdefault("model", model) != model:
            raise ParameterError(f"Two models are named: {model!r} and --model {given['model']!r}. Give one of them.")
    config = make_config(**given)
    return config, {**given, "model": config.model.model}


def spelling(name: str) -> str:
    """The flag of an option: max_model_len -> --max-model-len."""
    return "--" + name.replace("_", "-")


def _dest(name: str) -> str:
    # The positional MODEL and --model must be told apart.
    return f"{name}_option" if name == "model" else name


def _parameter(name: str, group: str, item: Field[Any], kind: Any) -> inspect.Parameter:
    union = getattr(kind, "__args__", ()) if get_origin(kind) is not list else ()
    plain = next((k for k in union if k is not type(None)), kind)
    names = [spelling(n) for n in (name, *item.metadata["aliases"])]
    extra: dict[str, Any] = {}
    if item.metadata["choices"]:
        annotation: Any = Literal[item.metadata["choices"]]
    elif plain in (str, int, float, list[str]):
        annotation = plain
    elif plain is bool:
        annotation = bool
        names = [f"{flag}/--no-{flag.removeprefix('--')}" for flag in names]
    else:
        annotation = Any
        extra = {"parser": functools.partial(_read_json, names[0]), "metavar": "JSON"}
    silent = item.default is None or item.default is False or item.default in ("", ())
    default = "" if silent else f" (default: {_shown(item.default)})"
    option = typer.Option(
        None,
        *names,
        help=item.metadata["help"] + default,
        rich_help_panel=_PANELS.get(group, group.capitalize()),
        **extra,
    )
    return inspect.Parameter(_dest(name), inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _shown(value: Any) -> str:
    return "on" if value is True else str(value)


def _read_json(flag: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{flag} wants JSON, and this is none ({error}): {text}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{flag} wants a JSON object like {{...}}, got {text}")
    return value
