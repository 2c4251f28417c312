"""The served model in facts, for people: size, numbers, device, context, what it can do, what requests start from.

Owns: GET /v1/card. Must not know: how the page looks, how tokens are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import tokenmill
from tokenmill.engine.options.generation import DEFAULTS, default_params
from tokenmill.measure.calibration import reading_of
from tokenmill.measure.devices import products_in, recognise
from tokenmill.measure.kept_measurements import kept_ceilings
from tokenmill.server.context import Context
from tokenmill.server.many_models.entry import Entry
from tokenmill.server.ollama.stored_files import StoredFiles, read_stored
from tokenmill.text.fill import find_fill


def card(context: Context) -> dict[str, Any]:
    """Everything that does not change while the server runs. 0 and "" mean: not known."""
    info = context.backend.info
    known, files = info.details, _files(info.root)
    return {
        "object": "card",
        "version": tokenmill.__version__,
        "model": info.names[0],
        "root": info.root,
        "family": str(known.get("family", "")),
        "format": files.format if files is not None else "",
        "parameters": files.parameters if files is not None and files.parameters else _parameters(known),
        "file_bytes": files.size if files is not None else 0,
        "weight_bytes": int(known.get("weight_bytes", 0)),
        "quantization": str(known.get("quantization") or (files.level if files is not None else "") or ""),
        "dtype": str(known.get("dtype", "")),
        "device": str(known.get("device", "")),
        "device_name": str(known.get("device_name") or known.get("device", "")),
        "context": info.max_model_len,
        "rows": info.max_rows,
        "block_size": int(known.get("block_size", 0)),
        "kv_block_bytes": float(known.get("kv_block_bytes", 0.0)),
        "load_s": round(float(known.get("load_s", 0.0)), 3),
        "can": _can(context),
        "defaults": _defaults(context),
        "ceilings": _ceilings(known),
    }


def unloaded_card(empty: dict[str, Any], entry: Entry[Any]) -> dict[str, Any]:
    """What is known of a model before it is loaded. Nothing that it might be able to do is ruled out."""
    length = entry.spec.engine.model.max_model_len or 0
    can = {**dict.fromkeys(empty["can"], True), "pictures": False}
    root = entry.spec.engine.model.model
    return {**empty, "model": entry.name, "root": root, "context": length, "rows": 0, "can": can}


def form_of(root: str, known: Mapping[str, Any], context: int) -> dict[str, Any]:
    """A model's format in a line of a list. It may read the files' heads, once."""
    files = _files(root)
    return {
        "format": files.format if files is not None else "",
        "parameters": files.parameters if files is not None and files.parameters else _parameters(known),
        "quantization": str(known.get("quantization") or (files.level if files is not None else "") or ""),
        "dtype": str(known.get("dtype", "")),
        "context": context,
    }


def _parameters(known: Mapping[str, Any]) -> int:
    """Parameters that one token uses, from its operations: two per weight. A mixture has more weights in all."""
    return int(float(known.get("flops_per_token", 0.0)) / 2)


def _can(context: Context) -> dict[str, bool]:
    tokenizer = context.backend.info.tokenizer
    template = context.chat_template or (tokenizer.chat_template if tokenizer is not None else None)
    return {
        "chat": bool(template),
        "tools": context.form.calls is not None,
        "thinking": context.form.thinking is not None,
        "structure": tokenizer is not None,
        "fill": find_fill(tokenizer) is not None,
        "pictures": False,
    }


def _defaults(context: Context) -> dict[str, Any]:
    """The settings of a chat request that sets none."""
    generation = context.backend.info.generation
    params = default_params(generation)
    found = {name: getattr(params, name) for name in DEFAULTS}
    return {**found, "frequency_penalty": 0.0, "presence_penalty": 0.0, "max_tokens": generation.get("max_new_tokens")}


def _ceilings(details: dict[str, Any]) -> dict[str, Any] | None:
    """What the device could read and compute per second, if a data sheet or a measurement says so. On a measured CPU it
    is the rate at which weights are read, because small models stay in its caches."""
    device, title = str(details.get("device", "")), str(details.get("device_name", ""))
    known = recognise(title)
    if known is not None:
        rate, flops, source = known.bytes_per_s, known.flops, known.source
    else:
        measured = kept_ceilings(device, title)
        if measured is None:
            return None
        rate = reading_of(measured.sets, measured.bytes_per_s, float(details.get("weight_bytes", 0)) or math.inf)
        flops, source = measured.flops, "measured on this machine"
    dtype = str(details.get("dtype"))
    kind = products_in("cpu" if device == "cpu" else "gpu", dtype, str(details.get("quantization") or ""))
    return {"bytes_per_s": rate, "flops": flops.get(kind) or flops.get(dtype) or 0.0, "source": source}


@lru_cache(maxsize=256)
def _files(root: str) -> StoredFiles | None:
    return read_stored(root)
