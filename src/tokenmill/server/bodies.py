"""From a body's bytes to a checked request. Owns: decoding and validation (in a thread if they take long), and how many
bytes of bodies are held at once.

The work is bounded by what one request may hold: ceilings are checked first (ceilings.py), and every list of a schema
stops at its first error (fields.py). Must not know: any one API, sockets.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from tokenmill.core.errors import TooLargeError
from tokenmill.core.garbage import no_collection
from tokenmill.core.object_rules import ObjectRules
from tokenmill.server.ceilings import MOST_FIELDS, check_ceilings
from tokenmill.server.doubled_names import refuse_doubled_names
from tokenmill.server.errors import HttpError
from tokenmill.structured.limits import MAX_SPEC_BYTES, refuse

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
LONG = 1 << 18
"""Work on at least this many bytes has a thread of its own, so that smaller bodies never wait for it."""
BOM = b"\xef\xbb\xbf"
"""The byte order mark that some editors put before UTF-8 text; readers of JSON may ignore it."""
_ESCAPES = re.compile(rb"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.S)
"""Escapes in a body. The group is half of a surrogate pair without the other half."""
MOST_EXACT = 1 << 53
"""Above this number, one float stands for several integers."""
MOST_WHOLE = 8
"""How often a body is validated again after floats were replaced. Each pass replaces every float that was found, and
the same fields in all entries of a list."""
PIECE = 256 << 10
"""Small parts are joined into pieces of this many bytes, because a body may arrive byte by byte."""
SMALL = 32 << 10
"""Bodies up to this many bytes are read on the event loop, which takes a few milliseconds at most."""
BODIES_AT_ONCE = 16
"""How many bodies of the largest size are held at a time. Bodies smaller than SMALL always find room."""
LARGE = 2 * MAX_SPEC_BYTES
"""Most bytes of a structure as written in the body. The engine checks the exact limit when it lowers the structure."""
STRUCTURES = frozenset(
    (
        *("structured_outputs", "response_format", "structural_tag", "json_schema", "regex", "ebnf", "grammar"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("format", "text", "parameters", "output_format", "output_config"),
    )
)
"""Fields of all APIs that hold a structure and no text for the model. (`text` holds one if it is an object.)"""
Raw = Mapping[str, Any]
Schema = type[B] | Callable[[Raw], type[B]]
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode


class Bodies:
    """The threads that read one server's bodies, and the number of bytes that it holds."""

    def __init__(self, max_body_bytes: int, rules: Mapping[str, ObjectRules]) -> None:
        self.rules = rules
        """The rules for the names in every kind of body."""
        self.room = BODIES_AT_ONCE * max(max_body_bytes, SMALL)
        # One thread each: reading holds Python's lock, so more of them would only keep the event loop from it.
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-body")
        self.slow = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-long-body")

    async def run_in_thread(self, size: int, work: Callable[[], T]) -> T:
        """Do work that takes time in proportion to a body of this size, in a thread if it is large."""
        if size <= SMALL:
            return work()
        threads = self.slow if size > LONG else self.threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.slow.shutdown(wait=False, cancel_futures=True)


class Parcel:
    """One request's body while it is held. `release` may be called twice."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self.parts: list[bytearray] = []
        self.size = 0
        self._held = 0

    def add(self, part: bytes) -> None:
        """Append a part that has arrived. Raises 503 if the server already holds as many bytes as it may."""
        if not self.parts or len(self.parts[-1]) > PIECE:
            self.parts.append(bytearray())
        self.parts[-1] += part
        self.size += len(part)
        self._held += len(part)
        self.bodies.room -= len(part)
        if self.bodies.room < 0 and self.size > SMALL:
            raise HttpError(503, "The server is reading many large bodies now; try again.", retry_after=1)

    def take(self) -> bytes:
        """The whole body. The parcel is empty afterwards, but its bytes count until `release`."""
        data = b"".join(self.parts)
        self.parts.clear()
        return data

    def fields(self) -> Mapping[str, msgspec.Raw]:
        """The body's fields, not decoded. The body stays in the parcel. Empty if the body is not an object."""
        data = b"".join(self.parts).removeprefix(BOM)
        check_ceilings(data)
        try:
            return _fields(data)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return {}

    def release(self) -> None:
        """Stop counting the body's bytes."""
        self.parts.clear()
        self.bodies.room += self._held
        self._held = 0


def parse(data: bytes, schema: Schema[B], look: Callable[[type[B], dict[str, Any]], None] | None = None) -> B:
    """The request that these bytes hold. Raises the first error in it. `look` sees all fields first and may change
    them."""
    data = data.removeprefix(BOM)
    counts = check_ceilings(data)
    if len(data) > LARGE:
        _refuse_large_structures(data)
    try:
        raw = _decoded(data)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"The body is not UTF-8 text (byte {error.start} of a string).") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        half = next((found[1] for found in _ESCAPES.finditer(data) if found[1]), None)
        why = error if half is None else f"{half.decode()} is half of a character, cut where its text was cut"
        raise HttpError(400, f"The body is not valid JSON: {why}.") from None
    if not isinstance(raw, dict):
        raise HttpError(400, "The body must be a JSON object.")
    refuse_doubled_names(data, raw, counts)
    if len(raw) > MOST_FIELDS:
        raise TooLargeError(f"The body has {len(raw)} fields; at most {MOST_FIELDS} are allowed.")
    chosen: type[B] = schema if isinstance(schema, type) else schema(raw)
    if look is not None:
        look(chosen, raw)
    return validated(chosen, raw)


def validated(schema: type[B], raw: dict[str, Any]) -> B:
    """A request made of these fields. JSON has only one kind of number, so 16.0 counts as an integer."""
    for _ in range(MOST_WHOLE):
        try:
            return schema.model_validate(raw)
        except ValidationError as error:
            if not _make_whole(raw, error):
                raise
    return schema.model_validate(raw)


def _make_whole(raw: dict[str, Any], error: ValidationError) -> bool:
    """Replace whole floats where the schema wants integers, except in lists of numbers. Returns whether there were
    any."""
    found = [each["loc"] for each in error.errors(include_url=False, include_context=False) if _wants_whole(each)]
    mended = [_whole_at(raw, place) for place in found]
    return any(mended)


def _wants_whole(finding: Any) -> bool:
    return finding["type"] == "int_type" and _is_whole(finding["input"])


def _is_whole(value: Any) -> bool:
    return type(value) is float and value.is_integer() and abs(value) <= MOST_EXACT


def _whole_at(holder: Any, place: tuple[int | str, ...]) -> bool:
    """Replace the float at `place`, and the same field in every entry of the lists on the way there. A list reports
    only its first error, so a pass per entry would read the body a thousand times."""
    if not place:
        return False
    part, *rest = place
    if isinstance(holder, list) and isinstance(part, int):
        mended = [_whole_at(entry, tuple(rest)) for entry in holder]
        return any(mended)
    if not isinstance(holder, dict) or part not in holder:  # the name of a union's branch is not part of the body
        return _whole_at(holder, tuple(rest))
    if not _is_whole(holder[part]):
        return _whole_at(holder[part], tuple(rest))
    holder[part] = int(holder[part])
    return True


def _decoded(data: bytes) -> Any:
    """Decode while Python's garbage collector is off: it would scan all objects a hundred times and find nothing."""
    with no_collection():
        return _decode(data)


def _refuse_large_structures(data: bytes) -> None:
    """Refuse large structures before they are read. Compiling them would be refused anyway."""
    try:
        fields = _fields(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return  # the reader reports the error
    for name in STRUCTURES.intersection(fields):
        value = memoryview(fields[name])
        if len(value) > LARGE and (name != "text" or bytes(value[:1]) == b"{"):
            refuse(f"{name} is larger than {MAX_SPEC_BYTES >> 10} KiB.")


def translated(schema: type[B], fields: Mapping[str, Any]) -> B:
    """A request in another API's schema, made of these fields. None counts as absent."""
    return validated(schema, {name: value for name, value in fields.items() if value is not None})
