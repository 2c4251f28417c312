"""The models file, or several model names on the command line, as one Spec per model. Owns: the file's fields, and
which key may use which model.

An entry's options have the names of flags. Options of the command line hold for every entry that does not set them.
Must not know: HTTP, how models are loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.stored import find_stored, under
from tokenmill.core.config import (
    GROUPS,
    SERVER_GROUPS,
    MessageOptions,
    ServeOptions,
    ServerConfig,
    all_options,
    make_config,
)
from tokenmill.core.errors import ParameterError, UserError, shown, why
from tokenmill.core.spellings import one_spelling
from tokenmill.core.yaml_file import read_mapping
from tokenmill.device.named import check_device
from tokenmill.engine.options.checks import check_companions, check_options
from tokenmill.server.access import Rights, digest, shown_key
from tokenmill.server.many_models.entry import Spec
from tokenmill.server.preflight import check_entry

MOST_MODELS = 1000
MOST_KNOWN = 8
"""Most names that the refusal of an unknown one lists."""
FIELDS = ("aliases", "ttl", "pin", "alone", "groups", "memory")
OWN = frozenset(
    (
        *("engines", "response_role", "chat_template", "default_chat_template_kwargs", "trust_request_chat_template"),
        *("enable_force_include_usage", "enable_per_request_metrics", "tool_call_parser", "reasoning_parser"),
        "opening",
    )
)
"""Server options that each model may set for itself."""


def read_models(
    path: Path, options: Mapping[str, Any], server: ServerConfig
) -> tuple[list[Spec], dict[str, Rights], list[str]]:
    """Read a models file: a Spec per model, rights by key (as logs show it), and the keys."""
    found = _load(path)
    unknown = [name for name in found if name not in ("models", "keys")]
    if unknown:
        raise _unknown(f"--models {path}", str(unknown[0]), ("models", "keys"))
    entries = found.get("models")
    if not isinstance(entries, dict) or not entries or not all(isinstance(name, str) for name in entries):
        raise ParameterError(f"--models {path} must hold `models`: a mapping of names to models.", param="models")
    if len(entries) > MOST_MODELS:
        raise ParameterError(f"--models {path} names {len(entries)} models; at most {MOST_MODELS} fit.", param="models")
    specs = [_spec(name, given, options, server) for name, given in entries.items()]
    keys = _read_keys(path, found.get("keys"), specs)
    return specs, {shown_key(digest(key)): right for key, right in keys.items()}, list(keys)


def name_models(models: Sequence[str], options: Mapping[str, Any], server: ServerConfig) -> list[Spec]:
    """Specs for several models with the same options, each under its own name."""
    return [_spec(name, None, options, server) for name in models]


def _load(path: Path) -> dict[str, Any]:
    found = read_mapping(path, "--models", "neither YAML nor JSON")
    if not isinstance(found, dict):
        raise ParameterError(f"--models {path} must hold a mapping with `models`.", param="models")
    return found


def _spec(name: str, given: Any, options: Mapping[str, Any], server: ServerConfig) -> Spec:
    where = f"models.{name}"
    given = {"model": given} if isinstance(given, str) else {} if given is None else given
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given):
        raise ParameterError(f"{where} must be a model, or a mapping of options.", param="models")
    named = one_spelling(given, f"{where}: ")
    own = {each: named.pop(each) for each in FIELDS if each in named}
    mine = {each: named.pop(each) for each in OWN & named.keys()}
    for each in named:
        if each in all_options(SERVER_GROUPS):
            raise ParameterError(f"{where}: {each} is an option of the whole server, not of one model.", param=each)
        if each == "served_model_name":
            raise ParameterError(f"{where}: the entry's name is the served name; aliases give more.", param=each)
        if each not in all_options(GROUPS):
            raise _unknown(where, each, (*FIELDS, *OWN, *all_options(GROUPS)))
    base = {each: value for each, value in options.items() if each not in ("model", "served_model_name")}
    try:
        asked = {**base, "model": name, **named}
        stored = find_stored(str(asked["model"]), called=name) if asked.get("revision") is None else None
        if stored is not None:
            asked, mine = under(stored, asked), {**stored.server, **mine}
        config = make_config(**{"served_model_name": name, **asked})
        spec = Spec(config, _server_of(server, mine), **_own(where, own))
        check_options(spec.engine, later=True)
        check_companions(spec.engine, named)
        check_device(spec.engine.execute.device)
        check_entry(spec.server)
    except UserError as error:
        reason = str(error)
        raise ParameterError(reason if reason.startswith(where) else f"{where}: {reason}", param=error.param) from None
    except OSError as error:  # a path that is too long, or in a folder that is closed to us
        raise ParameterError(f"{where}: {shown(error.filename)} cannot be used: {why(error)}.", param="model") from None
    if not all(each.strip() and "," not in each for each in (name, *spec.aliases)):
        raise ParameterError(f"{where}: a model's name must not be empty or contain a comma.", param="models")
    _check_effects(where, spec)
    if (twice := next((each for each in spec.names if spec.names.count(each) > 1), None)) is not None:
        raise ParameterError(f"{where}: its name {twice!r} is given twice.", param="aliases")
    return spec


def _check_effects(where: str, spec: Spec) -> None:
    """Refuse what has no effect, and a model that is none."""
    if not spec.engine.model.model.strip():
        raise ParameterError(f"{where}: model is empty: name a folder, a .gguf file or a model.", param="model")
    if spec.pin and spec.ttl:
        raise ParameterError(f"{where}: ttl has no effect beside pin: a pinned model stays loaded.", param="ttl")


def _server_of(server: ServerConfig, mine: Mapping[str, Any]) -> ServerConfig:
    """The server's options with those of one model."""
    checked = _checked_server(mine)
    serve = {name: value for name, value in checked.items() if name in ServeOptions.__dataclass_fields__}
    messages = {name: value for name, value in checked.items() if name in MessageOptions.__dataclass_fields__}
    return replace(server, serve=replace(server.serve, **serve), messages=replace(server.messages, **messages))


def _checked_server(mine: Mapping[str, Any]) -> dict[str, Any]:
    from tokenmill.core.config import make_server_config

    make_server_config({}, **mine)
    return dict(mine)


def _own(where: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an entry that are not options."""
    found: dict[str, Any] = {}
    for name, value in own.items():
        if name in ("pin", "alone"):
            if not isinstance(value, bool):
                raise ParameterError(f"{where}: {name} must be true or false, got {shown(value)}.", param=name)
            found[name] = value
        elif name in ("ttl", "memory"):
            number, least = isinstance(value, int | float) and not isinstance(value, bool), int(name == "memory")
            if not number or not least <= value < 1e18:
                wanted = "seconds, not negative" if name == "ttl" else "bytes, at least 1"
                raise ParameterError(f"{where}: {name} must be a number ({wanted}), got {shown(value)}.", param=name)
            found[name] = float(value) if name == "ttl" else int(value)
        else:
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
                raise ParameterError(f"{where}: {name} must be a list of names.", param=name)
            found[name] = tuple(texts) if name == "aliases" else frozenset(texts)
    return found


def _read_keys(path: Path, given: Any, specs: Sequence[Spec]) -> dict[str, Rights]:
    """What each key may do: a list of models, or a mapping with `models` and `manage`."""
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(key, str) and key for key in given):
        raise ParameterError(f"--models {path}: `keys` must be a mapping of keys to lists of models.", param="keys")
    named = {name: spec.names[0] for spec in specs for name in spec.names}
    found = {}
    for number, (key, right) in enumerate(given.items(), 1):
        where = f"--models {path}: key {number}"
        fields = right if isinstance(right, dict) else {"models": right}
        for each in fields:
            if each not in ("models", "manage"):
                raise _unknown(where, str(each), ("models", "manage"))
        models, manage = fields.get("models"), fields.get("manage", False)
        texts = [models] if isinstance(models, str) else models
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise ParameterError(f"{where} needs a list of models.", param="keys")
        if not isinstance(manage, bool):
            raise ParameterError(f"{where}: manage must be true or false.", param="keys")
        for each in texts:
            if each not in named:
                raise _unknown(where, each, tuple(named))
        found[key] = Rights(frozenset(named[each] for each in texts), manage)
    return found


def _unknown(where: str, name: str, known: Sequence[str]) -> ParameterError:
    close = difflib.get_close_matches(name, known, n=1)
    listed = f" Known: {', '.join(known)}." if 0 < len(known) <= MOST_KNOWN else ""
    hint = f" Did you mean {close[0]!r}?" if close else listed
    return ParameterError(f"{where}: there is no {name[:100]!r} here.{hint}", param=name[:100])
