"""Lists in pages, as in OpenAI's API. Owns: a query's `after`, `limit` and `order`, and the list object.

Must not know: what is listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenmill.server.errors import HttpError, quoted

T = TypeVar("T")
USUAL, MOST = 20, 100
PAGED = frozenset({"after", "limit", "order"})
"""The query parameters of a list."""


@dataclass(frozen=True, slots=True)
class Page:
    """The part of a list that is wanted."""

    after: str | None = None
    limit: int = USUAL
    newest_first: bool = True


def read_limit(query: Mapping[str, str], most: int = MOST) -> int:
    """The most entries that a page may have."""
    text = query.get("limit", str(USUAL))
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        raise HttpError(400, f"limit must be an integer from 1 to {most}.", param="limit")
    return int(text)


def read_page(query: Mapping[str, str], *, order: str = "desc") -> Page:
    """The page that a query asks for. `order`: the default."""
    limit, order = read_limit(query), query.get("order", order)
    if order not in ("asc", "desc"):
        raise HttpError(400, "order must be asc or desc.", param="order")
    return Page(query.get("after"), limit, order == "desc")


def list_page(entries: Sequence[T], page: Page, id_of: Callable[[T], str], show: Callable[[T], Any]) -> dict[str, Any]:
    """The list object of one page. `entries`: all of them, the oldest first."""
    ordered = list(reversed(entries)) if page.newest_first else list(entries)
    start = 0
    if page.after is not None:
        places = (place for place, entry in enumerate(ordered) if id_of(entry) == page.after)
        start = next(places, -1) + 1
        if not start:
            raise HttpError(404, f"There is no {quoted(page.after)} in this list to go on after.", param="after")
    shown = ordered[start : start + page.limit]
    return {
        "object": "list",
        "data": [show(entry) for entry in shown],
        "first_id": id_of(shown[0]) if shown else "",
        "last_id": id_of(shown[-1]) if shown else "",
        "has_more": len(ordered) > start + page.limit,
    }
