"""How far a stored model reaches. Owns: the context that its files state, read without its tensors.

Must not know: requests, how a context is stretched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.core.files import read_object
from tokenmill.models.common_keys import POSITION_NAMES

MAX_CONFIG = 4 << 20


def check_context(where: Path, parameters: dict[str, Any]) -> None:
    """Refuse a num_ctx that no load would accept. What files do not say plainly is left to the load."""
    wanted = parameters.get("num_ctx")
    reach = stated_context(where) if wanted is not None else None
    if wanted is not None and reach is not None and wanted > reach:
        raise ParameterError(
            f"num_ctx is {wanted}, and this model's context is {reach} tokens: lower it, or leave it out.",
            param="parameters.num_ctx",
        )


def stated_context(where: Path) -> int | None:
    """The positions that the files state; None: they do not, or they stretch them."""
    try:
        if where.is_dir() and (where / "config.json").exists():
            return _of_config(read_object(where / "config.json", MAX_CONFIG))
        file = where if where.is_file() else next(iter(sorted(where.glob("*.gguf"))), None)
        return None if file is None else _of_metadata(open_gguf(file).metadata)
    except (ModelError, OSError):
        return None


def _of_config(config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    whole = {**config, **text} if isinstance(text, dict) else config
    if any(_stretches(whole.get(name)) for name in ("rope_scaling", "rope_parameters")):
        return None
    return _count(next((whole[name] for name in POSITION_NAMES if whole.get(name) is not None), None))


def _stretches(rope: Any) -> bool:
    """Does a rope setting name another kind than the plain one, or are there several?"""
    kinds = [rope.get("rope_type"), rope.get("type")] if isinstance(rope, dict) else []
    several = isinstance(rope, dict) and any(isinstance(each, dict) for each in rope.values())
    return several or any(kind not in (None, "default") for kind in kinds)


def _of_metadata(metadata: dict[str, Any]) -> int | None:
    family = metadata.get("general.architecture")
    if any(str(key).startswith(f"{family}.rope.scaling.") for key in metadata):
        return None
    return _count(metadata.get(f"{family}.context_length"))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
