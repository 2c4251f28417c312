"""GET /v1/models as Anthropic answers it: for requests with its header. Owns: the shape of a model and of their list.

Must not know: engines, how OpenAI words the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.responses import Response

from tokenmill.server.context import Context
from tokenmill.server.errors import HttpError, quoted
from tokenmill.server.pages import read_limit
from tokenmill.server.routing import json_answer
from tokenmill.server.switch.listing import ListedModel, find_listed, list_models

MOST = 1000


def models_answer(context: Context, request: Request, created: int) -> Response:
    """All models, or the one that the path names."""
    name = request.path_params.get("name")
    if name is not None:
        return json_answer(_card(find_listed(context.shared, request, name), created))
    return json_answer(_listed(list_models(context.shared, request), request.query_params, created))


def _card(shown: ListedModel, created: int) -> dict[str, Any]:
    name, longest = shown.name, shown.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
        "capabilities": None,
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }


def _listed(models: Sequence[ListedModel], query: Mapping[str, str], created: int) -> dict[str, Any]:
    cards, limit = {each.name: each for each in models}, read_limit(query, MOST)
    names = list(cards)
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise HttpError(400, "Give after_id or before_id, not both.", param="after_id")
    left, more = names, False
    if before is not None:
        left = names[: _place(names, before, "before_id")]
        more, left = len(left) > limit, left[-limit:]
    else:
        left = names[_place(names, after, "after_id") + 1 :] if after is not None else names
        more, left = len(left) > limit, left[:limit]
    ends = {"first_id": left[0], "last_id": left[-1]} if left else {"first_id": None, "last_id": None}
    return {"data": [_card(cards[name], created) for name in left], "has_more": more, **ends}


def _place(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise HttpError(400, f"There is no model {quoted(name)} in this list to go on from.", param=param)
    return names.index(name)
