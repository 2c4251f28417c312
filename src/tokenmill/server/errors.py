"""Errors as clients see them. Owns: exception -> status and OpenAI's error object. Never shows a traceback or a path.

Must not know: engines, endpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from pydantic import ValidationError

from tokenmill.core.errors import SHUTTING_DOWN, BusyError, ContextError, EngineDeadError, NotHereError, UserError
from tokenmill.server.findings import MAX_PARAM, Names, first_finding, renamed, reworded

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    417: "ExpectationFailedError",
    422: "UnprocessableEntityError",
    426: "UpgradeRequiredError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
    507: "InsufficientMemoryError",
}
Pairs = list[tuple[bytes, bytes]]
"""Headers in the form in which they are sent."""
OVERFLOW = "context_length_exceeded"
"""The code by which OpenAI's clients see that a conversation is too long for the context."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
MAX_MESSAGE = 600
"""Most characters of a message: the client's own data is not sent back to it."""


class HttpError(Exception):
    """A refusal with an HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        """`overflow`: the context cannot hold the request. Clients act on its code."""
        shown = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        super().__init__(shown)
        self.status = status
        self.message = _ADDRESS.sub("0x...", shown)
        self.param = None if param is None else param[:MAX_PARAM]
        self.retry_after = retry_after
        self.overflow: ContextError | None = None
        self.request_id: str | None = None
        """Set if the request is known: some APIs repeat it in the body."""


def with_request_id(found: HttpError, scope: Mapping[str, Any]) -> HttpError:
    """The error with the id of the request in whose scope it arose, which some APIs tell in it."""
    found.request_id = (scope.get("state") or {}).get("request_id")
    return found


def shutting_down() -> HttpError:
    """What a client hears that still waits when the server ends. Another server may soon answer in its place."""
    return HttpError(503, SHUTTING_DOWN, retry_after=5)


def error_object(found: HttpError) -> dict[str, Any]:
    """OpenAI's error body."""
    kind = TYPES.get(found.status, "Error")
    code = found.status if found.overflow is None else OVERFLOW
    return {"error": {"message": found.message, "type": kind, "param": found.param, "code": code}}


def describe_error(error: BaseException) -> HttpError:
    """Any exception as a refusal. An error that is not for users becomes a plain 500."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ValidationError):
        return _validation(error)
    if isinstance(error, BusyError):
        return HttpError(503, str(error), param=error.param, retry_after=1)
    if isinstance(error, ContextError):
        found = HttpError(400, str(error), param=error.param)
        found.overflow = error
        return found
    if isinstance(error, NotHereError):
        return HttpError(404, str(error), param=error.param)
    if isinstance(error, UserError):
        return HttpError(400, str(error), param=error.param)
    if isinstance(error, EngineDeadError):
        if str(error).endswith(SHUTTING_DOWN):
            return shutting_down()
        return HttpError(503, "The engine is not available right now; try again.", retry_after=5)
    if isinstance(error, TimeoutError):
        return HttpError(408, "The request took longer than its deadline.", param="timeout")
    return HttpError(500, f"Internal error ({type(error).__name__}); the request's id finds it in the log.")


@contextmanager
def blaming(field: str, *inner: str) -> Iterator[None]:
    """Inside this context, an error about a prompt (`prompt`, or `inner` to its reader) names the request's own field
    instead."""
    try:
        yield
    except UserError as error:
        if error.param is not None and error.param in ("prompt", *inner):
            if str(error).startswith(error.param):  # elsewhere "prompt" is a word, not a field
                error.args = (reworded(str(error), error.param, field),)
            error.param = field
        raise


def _validation(error: ValidationError) -> HttpError:
    """The first of pydantic's findings, without the value."""
    path, message = first_finding(error)
    return HttpError(400, f"{path or 'body'}: {message}", param=path or None)


@contextmanager
def renaming_fields(names: Names) -> Iterator[None]:
    """Inside this context, errors of a translated request name the fields in which they came."""
    try:
        yield
    except (UserError, ValidationError, HttpError) as error:
        found = describe_error(error)
        again = under_other_names(found, names)
        if again is found:
            raise
        raise again from error


def under_other_names(found: HttpError, names: Names) -> HttpError:
    """The same refusal with the name that its field has in the client's API."""
    name = renamed(found.param, names) if found.param is not None else None
    if found.param is None or name == found.param:
        return found
    message, param = found.message, found.param
    for part in _heads(param):
        if (new_name := renamed(part, names)) != part:
            message = reworded(message, part, new_name)
            break
    again = HttpError(found.status, message, param=name, retry_after=found.retry_after)
    again.overflow = found.overflow
    return again


def _heads(param: str) -> Iterator[str]:
    """A field, the object that holds it, and so on."""
    parts = param.split(".")
    for count in range(len(parts), 0, -1):
        yield ".".join(parts[:count])


def quoted(value: object) -> str:
    """A value that a client sent, short enough for a message and in the words of JSON."""
    if isinstance(value, str):
        return repr(value[:100])
    return _KINDS.get(type(value), "a number")


_KINDS = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object"}


def error_bytes(found: HttpError) -> bytes:
    """The body."""
    return msgspec.json.encode(error_object(found))


def error_headers(found: HttpError) -> Mapping[str, str]:
    """Retry-After or Upgrade, if they help."""
    if found.status == 426:
        return {"upgrade": "websocket"}
    return {"retry-after": str(max(1, round(found.retry_after)))} if found.retry_after is not None else {}
