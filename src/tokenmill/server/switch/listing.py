"""How lists show models, loaded or not. Owns: their names, facts and states, and the server's health.

Must not know: any one API's shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request

from tokenmill.server.backend import ModelInfo
from tokenmill.server.context import LATEST, Context, Model, ServerContext, no_such_model
from tokenmill.server.many_models.entry import Entry, State
from tokenmill.server.many_models.sleepers import client_text
from tokenmill.server.rights import models_of

VALUES = {
    State.UNLOADED: "unloaded",
    State.LOADING: "loading",
    State.READY: "loaded",
    State.DRAINING: "unloading",
    State.SLEEPING: "sleeping",
    State.FAILED: "unloaded",
}
"""States in the words of llama.cpp's router."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that requests may use. `info`: None while its model is not loaded."""

    name: str
    entry: Entry[Model]
    info: ModelInfo | None
    adapter: str | None = None
    """The adapter's folder. None: it is not an adapter."""

    @property
    def parent(self) -> str | None:
        """The model of an adapter."""
        return self.entry.name if self.adapter is not None else None

    @property
    def root(self) -> str:
        """Where the weights come from."""
        if self.adapter is not None:
            return self.adapter
        return self.entry.spec.engine.model.model if self.info is None else self.info.root

    @property
    def max_model_len(self) -> int | None:
        """The context length. None: not known before the model is loaded."""
        return self.entry.spec.engine.model.max_model_len if self.info is None else self.info.max_model_len


def context_of(entry: Entry[Model]) -> Context | None:
    """The context of a loaded model. None: it is not loaded."""
    return entry.unit.context if entry.unit is not None else None


def list_models(shared: ServerContext, request: Request) -> list[ListedModel]:
    """All names that this key may use."""
    allowed, found = models_of(shared, request), []
    for entry in shared.models.entries.values():
        if allowed is None or entry.name in allowed:
            found += _names(entry)
    return found


def _names(entry: Entry[Model]) -> list[ListedModel]:
    context = context_of(entry)
    if context is None:
        adapters = {name: served.path for name, served in entry.book.by_name.items()}
        return [ListedModel(name, entry, None, adapters.get(name)) for name in (*entry.spec.names, *adapters)]
    info = context.backend.info
    return [
        ListedModel(name, entry, info, info.folders[name] if name in info.adapters else None) for name in info.names
    ]


def find_listed(shared: ServerContext, request: Request, name: str) -> ListedModel:
    """The model of this name. Raises 404 if there is none that this key may use."""
    mine = {each.name: each for each in list_models(shared, request)}
    found = next((mine[each] for each in shared.models.spellings.of(name) if each in mine), None)
    if found is None:
        raise no_such_model(name.removesuffix(LATEST), list(mine))
    return found


def known_name(shared: ServerContext, request: Request, name: str) -> str:
    """The name of this model. Raises 404 if there is none."""
    return find_listed(shared, request, name).name


def status(entry: Entry[Model]) -> dict[str, Any]:
    """A model's state: llama.cpp's `status`, and more under tokenmill's own name."""
    life = entry.life
    value: dict[str, Any] = {"value": VALUES[entry.state]}
    if entry.state is State.FAILED:
        value["failed"] = True
    return {
        "status": value,
        "tokenmill": {
            "state": entry.state.value,
            "pinned": entry.spec.pin,
            "size": entry.size,
            "measured": entry.measured,
            "open": life.open,
            "waiting": life.waiting,
            "expires_in": entry.expires_in if entry.state in (State.READY, State.SLEEPING) else None,
            "load_s": round(life.load_s, 3),
            "loads": life.loads,
            "wakes": entry.rest.wakes,
            "can_sleep": entry.spec.sleeps,
            "sleep_level": entry.rest.level if entry.state is State.SLEEPING else 0,
            "kept": entry.rest.kept,
        },
    }


def trouble(entry: Entry[Model]) -> str | None:
    """Why the model makes no progress. None: it does, or it will be loaded when a request asks for it."""
    if entry.state is State.FAILED:
        return client_text(entry.life.error)
    context = context_of(entry)
    return None if context is None else context.backend.health()


def trouble_of_all(shared: ServerContext) -> str | None:
    """The trouble of the pinned models, which decides the server's health. Other models come and go."""
    return next(filter(None, (trouble(each) for each in shared.models.entries.values() if each.spec.pin)), None)
