"""What a key may do besides using models. Owns: which keys are restricted, who may manage the models that it shares
with others, and how the others are refused.

A key that the file of models restricts uses its models. It loads them by using them, and that is all: what takes a
model from others (unloading, sleep, how long it stays, adapters) needs `manage: true`, and what changes the models of
the whole server needs a key without restrictions. Must not know: endpoints.
"""

from __future__ import annotations

from fastapi import Request

from tokenmill.server.access import Rights
from tokenmill.server.context import ServerContext
from tokenmill.server.errors import HttpError


def models_of(shared: ServerContext, request: Request) -> frozenset[str] | None:
    """The names of the entries that this key may use. None: all."""
    found = _rights(shared, request)
    return None if found is None else found.models


def may_manage(shared: ServerContext, request: Request) -> bool:
    """May this key also change the state of the models that it may use?"""
    found = _rights(shared, request)
    return found is None or found.manage


def check_may_manage(shared: ServerContext, request: Request, param: str | None = None) -> None:
    """Refuse a key that may only use its models. param: the field of the request that asks for more."""
    if not may_manage(shared, request):
        what = f": {param}" if param is not None else ""
        raise HttpError(403, f"This key may use models but not load, unload, pause or change them{what}.", param=param)


def check_may_change_all(shared: ServerContext, request: Request) -> None:
    """Refuse a restricted key: this concerns the models of the whole server."""
    if _rights(shared, request) is not None:
        raise HttpError(403, "This key may use models but not change them.")


def _rights(shared: ServerContext, request: Request) -> Rights | None:
    return shared.rights.get(request.scope["state"].get("tenant", ""))
