"""Ollama's `keep_alive`: how long a model stays when nobody asks. Owns: its durations, and unloading by it.

Must not know: how answers are made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from tokenmill.core.errors import ParameterError
from tokenmill.core.unread_names import Unknown
from tokenmill.server.context import ServerContext
from tokenmill.server.inputs.headers import as_headers
from tokenmill.server.many_models.entry import NEVER
from tokenmill.server.model_lookup import find_by_name, peek_fields, text_of
from tokenmill.server.ollama.answers import now
from tokenmill.server.rights import check_may_manage, may_manage
from tokenmill.server.routing import json_answer

FOREVER = "2999-12-31T00:00:00Z"
UNITS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})"
_PART = _NUMBER + rf"({'|'.join(UNITS)})"
_NOTHING = (b"", b'""', b"[]", b"null")
MOST_S = 100 * 365 * 86400.0
"""Longer times mean for ever."""


def seconds_of(said: float | str) -> float:
    """Seconds from a number, or from text such as `5m` and `1h30m`. Below zero: for ever."""
    if isinstance(said, str):
        text = said.strip()
        sign = -1.0 if text.startswith("-") else 1.0
        bare = text[1:] if text.startswith(("+", "-")) else text
        if re.fullmatch(_NUMBER, bare):
            found = sign * float(bare)
        elif re.fullmatch(f"(?:{_PART})+", bare):
            found = sign * sum(float(count) * UNITS[unit] for count, unit in re.findall(_PART, bare))
        else:
            raise ParameterError("keep_alive must be seconds, or a duration such as '5m'.", param="keep_alive")
    else:
        found = float(said)
    return NEVER if found < 0 or found > MOST_S else found


def set_keep_alive(shared: ServerContext, request: Request, said: float | str | None) -> None:
    """Set how long the model of this request stays loaded after its answer has ended. A key that may not manage models
    gets its answer, whose headers say that this had no effect: many clients always send it."""
    if said is None:
        return
    seconds, entry = seconds_of(said), request.scope["state"]["entry"]
    if entry.spec.pin or may_manage(shared, request):
        shared.models.keep(entry, seconds)
        return
    if shared.config.limits.strict_fields:
        check_may_manage(shared, request, "keep_alive")
    unread = Unknown()
    unread.tell("keep_alive")
    shared.metrics.ignored.labels("key").inc()
    request.scope["state"].setdefault("warnings", []).extend(as_headers(unread))


async def sent_away(shared: ServerContext, request: Request, asked: str, empty: dict[str, Any]) -> Response | None:
    """`keep_alive: 0` without a prompt (in the field `asked`) unloads the model, and loads nothing before. None: the
    request asks for something else, or the model is pinned."""
    models = shared.models
    if len(models.entries) == 1 and models.first.spec.pin:
        return None
    fields = await peek_fields(shared, request)
    if bytes(fields.get(asked, b"")) not in _NOTHING or not _is_zero(fields):
        return None
    name = text_of(fields, "model")
    if not name:
        return None
    entry = find_by_name(shared, request, name)
    if entry.spec.pin:
        return None
    check_may_manage(shared, request, "keep_alive")
    models.keep(entry, 0.0)
    return json_answer({"model": name, "created_at": now(), **empty, "done": True, "done_reason": "unload"})


def _is_zero(fields: Mapping[str, msgspec.Raw]) -> bool:
    try:
        duration = msgspec.json.decode(fields["keep_alive"], type=float | str)
        return seconds_of(duration) == 0
    except (KeyError, msgspec.MsgspecError, ValueError, ParameterError):
        return False
