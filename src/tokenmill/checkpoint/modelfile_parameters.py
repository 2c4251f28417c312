"""Ollama's PARAMETERs of a model. Owns: their names and types, and what each becomes here: an option of the engine, a
default for requests, nothing (if it cannot change an answer), or a refusal.

Must not know: Modelfiles, requests.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.core.errors import ParameterError

MOST_STOPS, MOST_STOP_CHARS = 16, 256
_NUMBER = re.compile(r"[+-]?([0-9.]{1,40}(e[+-]?[0-9]{1,4})?|inf|nan)", re.ASCII | re.IGNORECASE)
"""Python reads more as a number, such as 1_0 or digits of other scripts; Ollama does not."""
_SIZES = "the engine sizes its steps itself: `serve --max-num-batched-tokens` bounds them"
_LOADED = "files are mapped into memory, and weights lie on one device"
_STEPS = "guessing ahead changes no token"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One PARAMETER. into: its name in the generation settings; option: of the engine; why: why it does nothing here,
    or is refused."""

    kind: type = float
    into: str = ""
    option: str = ""
    least: float = -math.inf
    most: float = math.inf
    why: str = ""
    refused: bool = False


_COUNT = 2**31 - 1
PARAMETERS: Mapping[str, Parameter] = {
    "temperature": Parameter(into="temperature", least=0, most=100),
    "top_k": Parameter(int, into="top_k", least=0, most=_COUNT),
    "top_p": Parameter(into="top_p", least=0, most=1),
    "min_p": Parameter(into="min_p", least=0, most=1),
    "typical_p": Parameter(into="typical_p", least=0, most=1),
    "repeat_penalty": Parameter(into="repetition_penalty", least=1e-6, most=100),
    "repeat_last_n": Parameter(int, into="repeat_last_n", least=-1, most=_COUNT),
    "presence_penalty": Parameter(into="presence_penalty", least=-2, most=2),
    "frequency_penalty": Parameter(into="frequency_penalty", least=-2, most=2),
    "mirostat": Parameter(int, into="mirostat", least=0, most=2),
    "mirostat_tau": Parameter(into="mirostat_tau", least=0, most=100),
    "mirostat_eta": Parameter(into="mirostat_eta", least=0, most=100),
    "seed": Parameter(int, into="seed", least=-(2**63), most=2**64 - 1),
    "stop": Parameter(str, into="stop"),
    "num_predict": Parameter(int, into="max_new_tokens", least=-2, most=_COUNT),
    "num_ctx": Parameter(int, option="max_model_len", least=1, most=_COUNT),
    "num_thread": Parameter(int, option="threads", least=0, most=1024),
    "num_gpu": Parameter(int, option="device", least=-1, most=_COUNT),
    "num_keep": Parameter(int, why="nothing is shifted out of a full context"),
    "num_batch": Parameter(int, why=_SIZES),
    "use_mmap": Parameter(bool, why=_LOADED),
    "use_mlock": Parameter(bool, why=_LOADED),
    "low_vram": Parameter(bool, why=_LOADED),
    "num_gqa": Parameter(int, why="the model's files set it"),
    "f16_kv": Parameter(bool, why="use `serve --kv-cache-dtype`"),
    "numa": Parameter(bool, why="threads stay on the cores that this process may use"),
    "draft_num_predict": Parameter(int, why=_STEPS),
    "main_gpu": Parameter(int, refused=True, why="`serve --device cuda:1` names another GPU"),
    "tfs_z": Parameter(refused=True, why="tail-free sampling is not built: min_p and typical_p do what it is used for"),
    "penalize_newline": Parameter(bool, refused=True, why="penalties hold for every token"),
    "rope_frequency_base": Parameter(
        refused=True, why="the model is loaded with what its files say (`serve --hf-overrides`)"
    ),
    "rope_frequency_scale": Parameter(
        refused=True, why="the model is loaded with what its files say (`serve --hf-overrides`)"
    ),
    "vocab_only": Parameter(bool, refused=True, why="the model is loaded to write text"),
    "logits_all": Parameter(bool, refused=True, why="a request asks for logprobs"),
    "embedding_only": Parameter(bool, refused=True, why="the model is loaded to write text"),
}
"""Every parameter of Ollama, including those of older versions."""

_NOTHING: dict[str, tuple[Any, ...]] = {
    "main_gpu": (0,),
    "tfs_z": (1.0,),
    "penalize_newline": (True,),
    "rope_frequency_base": (0.0,),
}
_NOTHING |= {"rope_frequency_scale": (0.0, 1.0), "vocab_only": (False,), "logits_all": (False,)}
_NOTHING |= {"embedding_only": (False,)}


def read_written(written: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Read parameters as a Modelfile writes them. A ParameterError names one that cannot be used."""
    found: dict[str, Any] = {}
    for name, text in written:
        parameter = _known(name)
        if name == "stop":
            found.setdefault(name, []).append(text)
        elif name in found:
            raise ParameterError(f"PARAMETER {name} stands twice.", param=name)
        else:
            found[name] = _from_text(name, text, parameter.kind)
    return check_parameters(found)


def check_parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for JSON: values must have the right type and size. Parameters whose value asks for nothing are left
    out."""
    found = {}
    for name, value in given.items():
        parameter = _known(name)
        if value is None:
            continue
        value = _checked(name, value, parameter)
        if parameter.refused:
            if value not in _NOTHING[name]:
                raise ParameterError(f"PARAMETER {name} cannot be used: {parameter.why}.", param=name)
            continue
        found[name] = value
    return found


def written(parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Parameters as a Modelfile writes them."""
    lines = []
    for name, value in sorted(parameters.items()):
        values = value if isinstance(value, list) else [value]
        lines += [(name, str(each).lower() if isinstance(each, bool) else str(each)) for each in values]
    return lines


def listed(parameters: Mapping[str, Any]) -> str:
    """Parameters as Ollama lists them: a name and a value in each line, texts in quotes."""
    pairs = ((name, value if isinstance(value, list) else [value]) for name, value in sorted(parameters.items()))
    return "\n".join(f"{name:30} {json.dumps(each, ensure_ascii=False)}" for name, values in pairs for each in values)


def of_generation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Generation settings under the names of Ollama's parameters; those that it does not have are left out."""
    names = {parameter.into: name for name, parameter in PARAMETERS.items() if parameter.into}
    found = {names[into]: value for into, value in settings.items() if into in names and value is not None}
    return {**found, "temperature": 0.0} if settings.get("do_sample") is False else found


def as_options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options with the same meaning. Defaults of requests become generation settings."""
    options: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    for name, value in parameters.items():
        parameter = PARAMETERS[name]
        if parameter.into:
            generation |= _setting(parameter.into, value)
        elif name == "num_gpu":
            options |= {"device": "cpu"} if value == 0 else {}
        elif parameter.option and value:
            options[parameter.option] = value
    if generation.get("temperature"):
        generation["do_sample"] = True  # the model's files may set these otherwise
    return {**options, **({"override_generation_config": generation} if generation else {})}


def _setting(into: str, value: Any) -> dict[str, Any]:
    nothing = (into == "seed" and value == -1) or (into == "max_new_tokens" and value <= 0)
    nothing = nothing or (into in ("top_p", "typical_p") and value == 0)
    return {} if nothing else {into: value}


def _known(name: str) -> Parameter:
    parameter = PARAMETERS.get(name) if isinstance(name, str) else None
    if parameter is None:
        close = difflib.get_close_matches(str(name), PARAMETERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PARAMETERS)}."
        raise ParameterError(f"PARAMETER {ascii(name)[:60]} is not known: {hint}", param="parameters")
    return parameter


def _from_text(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}[text.strip().lower()]
        if not _NUMBER.fullmatch(text):
            raise ValueError
        return kind(text)
    except (KeyError, ValueError):
        raise _wrong(name, text, kind) from None


def _checked(name: str, value: Any, parameter: Parameter) -> Any:
    if name == "stop":
        return _stops(value)
    kind = parameter.kind
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not kind or not isinstance(value, (int, float)):
        raise _wrong(name, value, kind)
    if kind is not bool and not (parameter.least <= value <= parameter.most and math.isfinite(value)):
        raise ParameterError(
            f"PARAMETER {name} must be from {parameter.least:g} to {parameter.most:g}, not {value}.", param=name
        )
    return value


def _stops(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(t, str) and 0 < len(t) <= MOST_STOP_CHARS for t in texts):
        raise ParameterError(
            f"PARAMETER stop is a text of 1 to {MOST_STOP_CHARS} characters, or several.", param="stop"
        )
    if len(texts) > MOST_STOPS:
        raise ParameterError(f"PARAMETER stop has {len(texts)} texts; give at most {MOST_STOPS}.", param="stop")
    return list(texts)


def _wrong(name: str, value: Any, kind: type) -> ParameterError:
    wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
    return ParameterError(f"PARAMETER {name} is {wanted}, not {ascii(value)[:60]}.", param=name)
