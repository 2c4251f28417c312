"""Notes of loads whose kernels are all compiled. Owns: the key of such a load, and the notes.

The key covers what decides the kernels, not where files lie, what the weights are, or who is served. A model that is
moved, downloaded again or given another seed is the same load. A note that is wrong costs a load only the time to
compile what is missing. Must not know: kernels, processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.config import EngineConfig, cache_dir
from tokenmill.core.files import in_home
from tokenmill.core.whole_file import write_whole
from tokenmill.device.gpu import Gpu

PACKAGE = Path(__file__).parents[2]
UNRELATED: dict[str, tuple[str, ...]] = {
    "model": ("model", "tokenizer", "skip_tokenizer_init", "revision", "seed", "trust_remote_code",
              "served_model_name"),
    "cache": ("gpu_memory_utilization", "enable_prefix_caching"),
    "schedule": ("scheduling_policy", "max_waiting"),
    "execute": ("device", "executor", "pipeline_depth", "threads", "check_weights", "disable_log_stats",
                "check_structured"),
    "adapters": ("lora_modules", "max_cpu_loras"),
    "speculate": (),
}  # fmt: skip
"""By group, options that have no effect on kernels, in groups whose other options do."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def note_of(config: EngineConfig, gpu: Gpu, raw: Mapping[str, Any]) -> Path:
    """The path of the note that all kernels of this load exist. raw: the model's config."""
    from triton import __version__, knobs

    options = {group: asdict(getattr(config, group)) for group in UNRELATED}
    for group, names in UNRELATED.items():
        for name in names:
            del options[group][name]
    model = {key: value for key, value in raw.items() if not key.startswith("_") and key != "transformers_version"}
    drafter = (config.speculate.speculative_config or {}).get("model")
    if isinstance(drafter, str):
        said = options["speculate"]["speculative_config"]
        options["speculate"]["speculative_config"] = said | {"model": stored(drafter, told=True)}
    weights = [] if config.model.load_format == "dummy" else stored(config.model.model)
    digest = hashlib.blake2b(digest_size=16)
    # Where Triton looks is a part of it: what is noted of one folder says nothing of another.
    about = replace(gpu, free=0), options, model, weights, __version__, sys.version, str(knobs.cache.dir)
    digest.update(msgspec.json.encode(about, order="deterministic", enc_hook=str))
    for kind in ("*.py", "*.json"):  # measured ways decide how kernels are cut
        for source in sorted((PACKAGE / "kernels" / "triton").rglob(kind)):
            digest.update(source.read_bytes())
    return cache_dir() / "kernels" / f"{digest.hexdigest()}.json"


def stored(name: str, *, told: bool = False) -> list[Any]:
    """What lies in a model's folder or file, wherever that is: sizes, which follow from the weights' format; told:
    with what its config says. A name that is none of a path says it itself."""
    path = in_home(name)
    if path.is_file():
        return [path.name, path.stat().st_size]
    if not path.is_dir():
        return [name]
    found: list[Any] = sorted((f.name, f.stat().st_size) for pattern in WEIGHTS for f in path.glob(pattern))
    config = path / "config.json"
    if told and config.is_file():
        found.append(hashlib.blake2b(config.read_bytes(), digest_size=16).hexdigest())
    return found


def keep(note: Path, places: list[str]) -> None:
    """Note which files exist once all kernels of a load are compiled."""
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_whole(note, msgspec.json.encode(places))


def is_kept(note: Path) -> bool:
    """Was a load like this compiled before, and do all its files still exist?"""
    try:
        places = msgspec.json.decode(note.read_bytes(), type=list[str])
    except (OSError, msgspec.MsgspecError):
        return False
    return bool(places) and all(os.path.isfile(place) for place in places)
