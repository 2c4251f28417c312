"""What a stored model's name stands for, wherever MODEL is expected. Owns: where its weights are, and its manifest as
options. Must not know: Modelfiles, verbs, servers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.entry import Entry, Source
from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.checkpoint.modelfile_parameters import as_options
from tokenmill.checkpoint.store import Store
from tokenmill.checkpoint.stored_names import short_name
from tokenmill.core.config import data_dir
from tokenmill.core.errors import ModelError, UserError
from tokenmill.core.files import in_home, read_object
from tokenmill.core.whole_file import write_whole

DEMO = "demo"
"""The model that comes with this program."""
BASE = "-base"
"""Behind the name of a model with an adapter: the model without it."""
LEAST_RANK = 16
_MOST_CONFIG = 4 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored model as options: of the engine, and of a server."""

    entry: Entry
    options: dict[str, Any]
    server: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As people say it."""
        return short_name(self.entry.name)

    @property
    def system(self) -> str | None:
        """The system message of conversations that begin without one."""
        return self.entry.words.system or None


def open_store() -> Store:
    """This user's store."""
    return Store(data_dir())


def find_stored(name: str, store: Store | None = None, *, called: str | None = None) -> Stored | None:
    """The stored model of this name; None for a path, `demo`, or a name that nothing is stored under. `called`: what
    requests shall call it."""
    store = store or open_store()
    if name == DEMO or not store.models.is_dir() or in_home(name).exists():
        return None
    entry = store.find(name)
    return None if entry is None else as_stored(store, entry, called)


def as_stored(store: Store, entry: Entry, called: str | None = None) -> Stored:
    """What its manifest means."""
    where, revision = location(store, entry.source)
    name = called or short_name(entry.name)
    options: dict[str, Any] = {"model": where, "served_model_name": name, **as_options(entry.parameters)}
    if revision:
        options["revision"] = revision
    if entry.adapter is not None:
        path, _ = location(store, entry.adapter)
        options |= {
            "served_model_name": name + BASE,
            "enable_lora": True,
            "lora_modules": [json.dumps({"name": name, "path": path})],
            "max_lora_rank": max(LEAST_RANK, rank_of(Path(path))),
        }
    server: dict[str, Any] = {}
    words = entry.words
    if words.template:
        server["chat_template"] = str(_template_file(store, words.template))
    opening = {**({"system": words.system} if words.system else {}),
               **({"messages": words.messages} if words.messages else {})}  # fmt: skip
    if opening:
        server["opening"] = opening
    return Stored(entry, options, server)


def location(store: Store, source: Source) -> tuple[str, str]:
    """(path or hub name, revision) of weights."""
    if source.kind == "files":
        folder = store.folder(source)
        files = [name for name in source.files if name.endswith(".gguf")]
        return str(folder / files[0] if len(files) == len(source.files) == 1 else folder), ""
    if source.kind == "hub" and not Path(source.path).exists():
        return source.repo, source.revision  # the hub's cache was cleared: it is downloaded again
    if not Path(source.path).exists():
        raise UserError(f"{source.path}, where this model was, no longer exists: create or pull it again.")
    return source.path, ""


def under(stored: Stored, given: dict[str, Any]) -> dict[str, Any]:
    """Options with those of the stored model below them; of generation settings, entry by entry."""
    found = {**stored.options, **given, "model": stored.options["model"]}
    both = (stored.options.get("override_generation_config"), given.get("override_generation_config"))
    if all(both):
        found["override_generation_config"] = {**(both[0] or {}), **(both[1] or {})}
    return found


def rank_of(path: Path) -> int:
    """The largest rank of an adapter; 0: its files do not say, and the load tells what is wrong with them."""
    try:
        if path.is_dir():
            found = read_object(path / "adapter_config.json", _MOST_CONFIG)
            patterns = found.get("rank_pattern")
            ranks = [found.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
        else:
            tensors = open_gguf(path).tensors
            ranks = [min(info.shape[-2:]) for name, info in tensors.items() if name.endswith((".lora_a", ".lora_b"))]
    except ModelError:
        return 0
    return max((rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool)), default=0)


def _template_file(store: Store, text: str) -> Path:
    """The template in a file, as --chat-template takes it."""
    data = text.encode()
    path = store.home / "templates" / f"{hashlib.sha256(data).hexdigest()}.jinja"
    if not path.exists():
        with store.changing():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data)
    return path
