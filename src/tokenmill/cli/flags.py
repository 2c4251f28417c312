"""The engine's options as flags. Owns: turning every field of core.config into a command-line option.

A field added there appears automatically in every verb that loads a model. Must not know: torch, any verb.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

import typer

from tokenmill.checkpoint.stored import Stored, find_stored, open_store, under
from tokenmill.checkpoint.stored_names import short_name
from tokenmill.cli.unloaded_model import look_for, plain_name
from tokenmill.core.config import GROUPS, EngineConfig, all_options, make_config
from tokenmill.core.config_file import read_config_file
from tokenmill.core.errors import MOST_SHOWN, ParameterError, UserError
from tokenmill.core.text_values import read_json, read_written
from tokenmill.core.vllm_arguments import ENGINE, SERVER, SPELLINGS, SWITCHES, options_alone, parsed

Verb = Callable[..., None]


def stored_names(incomplete: str) -> list[str]:
    """Completions where a model is expected: stored models. If none fits, the shell offers files."""
    try:
        entries, _ = open_store().entries()
    except (OSError, UserError):
        return []
    return [name for name in (short_name(entry.name) for entry in entries) if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """The same for verbs that load a model. The demonstration model is always there."""
    return [*(["demo"] if "demo".startswith(incomplete) else []), *stored_names(incomplete)]


MODEL = typer.Argument(
    None,
    metavar="MODEL",
    help="Folder, .gguf file, stored or hub name, or `demo` (the default).",
    autocompletion=model_names,
)
_PANELS = {
    "listen": "Listening",
    "serve": "Serving",
    "models": "Many models",
    "model": "Model",
    "files": "Files",
    "cache": "K/V cache",
    "schedule": "Scheduling",
    "execute": "Execution",
    "parallel": "Several devices",
    "speculate": "Speculation",
}


def engine_flags(verb: Verb) -> Verb:
    """Give `verb` a flag for every engine option. Options that were typed arrive in its `options` dict, and so does
    `--config`, unless the verb reads that itself."""
    own = {} if "config" in inspect.signature(verb).parameters else {"config": CONFIG}
    return with_flags("options", own | option_flags(GROUPS))(verb)


def other_flags(own: Iterable[str]) -> dict[str, inspect.Parameter]:
    """vLLM's flags that are not options: accepted because they are harmless, or refused with a reason. --help does not
    show them. own: names that the verb already has."""
    names = dict.fromkeys([*SPELLINGS, *ENGINE, *SERVER])
    return {name: _other_flag(name) for name in names if name not in set(own)}


def _other_flag(name: str) -> inspect.Parameter:
    if name in SWITCHES:
        return flag(name, bool, "", spelled=f"{spelling(name)}/--no-{spelling(name)[2:]}", hidden=True)
    return flag(name, str, "", spelled=spelling(name), hidden=True)


def resolve_vllm_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that vLLM's flags stand for. A flag that would have no effect is refused by name."""
    read = {SPELLINGS.get(name, name): parsed(value) for name, value in given.items()}
    return options_alone(read, {**ENGINE, **SERVER})


def option_flags(groups: Mapping[str, type]) -> dict[str, inspect.Parameter]:
    """One flag for each option of these groups, by option name, for `with_flags`."""
    return {name: _parameter(name, group, item, kind) for name, (group, item, kind) in all_options(groups).items()}


def with_flags(into: str, flags: Mapping[str, inspect.Parameter]) -> Callable[[Verb], Verb]:
    """Give a verb these flags. The values that were typed arrive by name in its keyword argument `into`, a dict."""

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
    """One optional flag for `with_flags`. spelled: the flag's names, if they do not follow from the option's."""
    option = typer.Option(None, *(spelled.split() or [spelling(name)]), help=help, **settings)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """The configuration, the keywords for LLM, and the stored model whose defaults they contain, if there is one."""

    config: EngineConfig
    keywords: dict[str, Any]
    stored: Stored | None = None

    @property
    def name(self) -> str:
        """The model's name."""
        return self.stored.name if self.stored is not None else self.config.model.model


def resolve_options(model: str | None, options: Mapping[str, Any]) -> tuple[EngineConfig, dict[str, Any]]:
    """Check what was typed before anything heavy is imported. Returns the configuration, and keywords for LLM."""
    found = resolve_stored(model, options)
    return found.config, found.keywords


def resolve_stored(model: str | None, options: Mapping[str, Any]) -> ResolvedOptions:
    """The same for verbs that also use a stored model's system message and template."""
    from tokenmill.device.named import check_device
    from tokenmill.engine.options.checks import check_companions, check_options

    given = {name: value for name, value in options.items() if name != "config"}
    filed, _ = read_config_file(options.get("config"))
    if model is not None or "model" in given:
        filed.pop("model", None)  # a typed one wins
    if model is not None:
        if given.setdefault("model", model) != model:
            raise ParameterError(f"Two models are named: {model!r} and --model {given['model']!r}. Give one of them.")
    given = {**filed, **given}
    if isinstance(given.get("model"), str):
        given["model"] = plain_name(given["model"])
    config = make_config(**given)
    name = config.model.model
    stored = find_stored(name, called=short_name(name)) if config.model.revision is None else None
    if stored is not None:
        given = under(stored, given)
        config = make_config(**given)
    check_options(config)
    check_companions(config)
    check_device(config.execute.device)
    look_for(config.model.model)
    return ResolvedOptions(config, {**given, "model": config.model.model}, stored)


def spelling(name: str) -> str:
    """The flag of an option: max_model_len -> --max-model-len."""
    return "--" + name.replace("_", "-")


CONFIG = flag(
    "config", Path, "YAML file with any of these options (flags win over it, and it over TOKENMILL_* variables)."
)


def _dest(name: str) -> str:
    # The positional MODEL and --model must be distinguishable.
    return f"{name}_option" if name == "model" else name


def _parameter(name: str, group: str, item: Field[Any], kind: Any) -> inspect.Parameter:
    union = getattr(kind, "__args__", ()) if get_origin(kind) is not list else ()
    plain = next((k for k in union if k is not type(None)), kind)
    names = [spelling(n) for n in (name, *item.metadata["aliases"])]
    extra: dict[str, Any] = {}
    if item.metadata["choices"]:
        annotation: Any = Literal[item.metadata["choices"]]
    elif plain is int:
        annotation = Any
        extra = {"parser": functools.partial(_read_count, names[0], kind), "metavar": "N"}
    elif plain in (str, float, list[str]):
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


def _read_count(flag: str, kind: Any, text: str) -> int | str:
    """A whole number. It may be written as 32k or 2GiB, or be left to be found out if the option's kind says so."""
    count: int | str | None = read_written(str(text), kind)[0]
    if count is None:
        raise typer.BadParameter(f"{flag} takes a whole number, not {text} (32k and 2GiB are allowed)")
    return count


def _read_json(flag: str, text: str) -> Any:
    try:
        value = read_json(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{flag} takes JSON, and this is not JSON ({error}): {text[:MOST_SHOWN]}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{flag} takes a JSON object {{...}}, not {text[:MOST_SHOWN]}")
    return value
