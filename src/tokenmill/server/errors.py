"""Errors as clients see them. Owns: exception -> status and OpenAI's error object. Never shows a traceback or a path.

Must not know: engines, endpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from tokenmill.core.errors import BusyError, EngineDeadError, TooLargeError, UserError

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    426: "UpgradeRequiredError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
MAX_MESSAGE = 600
"""Characters: what a client sent is not sent back to it."""
MAX_PARAM = 200


class HttpError(Exception):
    """A refusal with a status of its own."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        shown = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        super().__init__(shown)
        self.status = status
        self.message = _ADDRESS.sub("0x...", shown)
        self.param = None if param is None else param[:MAX_PARAM]
        self.retry_after = retry_after


def error_object(status: int, message: str, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": kind or TYPES.get(status, "Error"), "param": param, "code": status}}


def describe_error(error: BaseException) -> HttpError:
    """Any exception as a refusal; what is not meant for people becomes a plain 500."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ValidationError):
        return _validation(error)
    if isinstance(error, BusyError):
        return HttpError(503, str(error), param=error.param, retry_after=1)
    if isinstance(error, TooLargeError):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, UserError):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, EngineDeadError):
        return HttpError(503, "The engine is not available right now; try again.", retry_after=5)
    if isinstance(error, TimeoutError):
        return HttpError(408, "The request took longer than its deadline.", param="timeout")
    return HttpError(500, f"Internal error ({type(error).__name__}); the request's id finds it in the log.")


def _validation(error: ValidationError) -> HttpError:
    """The first of pydantic's findings, without echoing the value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part)[:MAX_PARAM] for part in first["loc"] if not _is_branch(part))[:MAX_PARAM]
    rest = error.error_count() - 1
    more = f" (and {rest} more)" if rest > 0 else ""
    return HttpError(400, f"{path or 'body'}: {first['msg'][:MAX_MESSAGE]}{more}.", param=path or None)


def quoted(value: object) -> str:
    """A value that a client sent, short enough for a message."""
    return repr(value[:100]) if isinstance(value, str) else f"a {type(value).__name__}"


def _is_branch(part: int | str) -> bool:
    """Does this part of a location name a branch of a union instead of a field?"""
    return isinstance(part, str) and ("[" in part or part in _BRANCHES)


_BRANCHES = frozenset({"str", "list", "dict", "constrained-str", "TextPart", "int", "float", "bool"})


def error_bytes(found: HttpError) -> bytes:
    """The body."""
    return msgspec.json.encode(error_object(found.status, found.message, found.param))


def error_headers(found: HttpError) -> Mapping[str, str]:
    """Retry-After, or Upgrade, where it helps."""
    if found.status == 426:
        return {"upgrade": "websocket"}
    return {"retry-after": str(max(1, round(found.retry_after)))} if found.retry_after is not None else {}
