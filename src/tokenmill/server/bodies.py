"""From a body's bytes to a checked request. Owns: decoding and validation, in a thread where they take long, and how
many bytes of bodies are held at once.

Ceilings come first (ceilings.py), and every list of a schema gives up at its first finding (fields.py), so the work is
bounded by what one request may hold. Must not know: any one API, sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from tokenmill.core.errors import TooLargeError
from tokenmill.core.garbage import no_collection
from tokenmill.server.ceilings import MOST_FIELDS, check_ceilings
from tokenmill.server.errors import HttpError
from tokenmill.server.inputs.plan import Plan
from tokenmill.structured.limits import MAX_SPEC_BYTES, refuse

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
THREADS = 2
BOM = b"\xef\xbb\xbf"
"""What some editors put before UTF-8 text: readers of JSON may ignore it."""
MOST_EXACT = 1 << 53
"""Beyond it a float is several integers."""
MOST_WHOLE = 8
"""Times that a body is read again after a mend: each mends all that was found, and its like in lists."""
PIECE = 256 << 10
"""What comes in single bytes is not kept in single bytes."""
SMALL = 32 << 10
"""Bytes that are read on the event loop: a few milliseconds at the very most."""
BODIES_AT_ONCE = 16
"""So many of the largest bodies are held at a time; smaller ones than SMALL always find room."""
LARGE = 2 * MAX_SPEC_BYTES
"""Bytes of a structure as it is written; the exact limit is looked at where it is worked out."""
STRUCTURES = frozenset(
    (
        *("structured_outputs", "response_format", "structural_tag", "json_schema", "regex", "ebnf", "grammar"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("format", "text", "parameters", "output_format", "output_config"),
    )
)
"""Fields of all APIs that hold a structure, and no text that a model reads (`text` does where it is no object)."""
Raw = Mapping[str, Any]
Schema = type[B] | Callable[[Raw], type[B]]
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode


class Bodies:
    """The threads of one server, and the bytes that it holds."""

    def __init__(self, max_body_bytes: int, plans: Mapping[str, Plan]) -> None:
        self.plans = plans
        """What becomes of the names in every kind of body."""
        self.room = BODIES_AT_ONCE * max(max_body_bytes, SMALL)
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenmill-body")

    async def run_in_thread(self, size: int, work: Callable[[], T]) -> T:
        """Do what takes time in proportion to a body of this size."""
        if size <= SMALL:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)


class Parcel:
    """One request's body while it is held. `release` may be called twice."""

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self.parts: list[bytearray] = []
        self.size = 0
        self._held = 0

    def add(self, part: bytes) -> None:
        """More has come; 503 when the server holds as much as it will."""
        if not self.parts or len(self.parts[-1]) > PIECE:
            self.parts.append(bytearray())
        self.parts[-1] += part
        self.size += len(part)
        self._held += len(part)
        self.bodies.room -= len(part)
        if self.bodies.room < 0 and self.size > SMALL:
            raise HttpError(503, "The server is reading many large bodies now; try again.", retry_after=1)

    def take(self) -> bytes:
        """All of it; the parcel is empty then, but counts until `release`."""
        data = b"".join(self.parts)
        self.parts.clear()
        return data

    def fields(self) -> Mapping[str, msgspec.Raw]:
        """The fields of the body, which stays where it is; none where it is no object."""
        data = b"".join(self.parts).removeprefix(BOM)
        check_ceilings(data)
        try:
            return _fields(data)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return {}

    def release(self) -> None:
        """It is held no longer."""
        self.parts.clear()
        self.bodies.room += self._held
        self._held = 0


def parse(data: bytes, schema: Schema[B], look: Callable[[type[B], dict[str, Any]], None] | None = None) -> B:
    """The request that these bytes hold, or the first thing that is wrong with it. `look`: sees all fields first, and
    may change them."""
    data = data.removeprefix(BOM)
    check_ceilings(data)
    if len(data) > LARGE:
        _refuse_large_structures(data)
    try:
        raw = _decoded(data)
    except UnicodeDecodeError as error:
        raise HttpError(400, f"The body is not UTF-8 text (byte {error.start} of a string).") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HttpError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise HttpError(400, "The body must be a JSON object.")
    if len(raw) > MOST_FIELDS:
        raise TooLargeError(f"The body has {len(raw)} fields; {MOST_FIELDS} is the most.")
    chosen: type[B] = schema if isinstance(schema, type) else schema(raw)
    if look is not None:
        look(chosen, raw)
    return validated(chosen, raw)


def validated(schema: type[B], raw: dict[str, Any]) -> B:
    """A request of these fields. JSON has one kind of number: 16.0 is taken where an integer is asked for."""
    for _ in range(MOST_WHOLE):
        try:
            return schema.model_validate(raw)
        except ValidationError as error:
            if not _make_whole(raw, error):
                raise
    return schema.model_validate(raw)


def _make_whole(raw: dict[str, Any], error: ValidationError) -> bool:
    """Replace floats that are integers where integers belong; -> was there one? Lists of numbers stay what they are."""
    found = [each["loc"] for each in error.errors(include_url=False, include_context=False) if _wants_whole(each)]
    mended = [_whole_at(raw, place) for place in found]
    return any(mended)


def _wants_whole(finding: Any) -> bool:
    return finding["type"] == "int_type" and _is_whole(finding["input"])


def _is_whole(value: Any) -> bool:
    return type(value) is float and value.is_integer() and abs(value) <= MOST_EXACT


def _whole_at(holder: Any, place: tuple[int | str, ...]) -> bool:
    """Mend what lies there, and in lists on the way each entry's: a list tells of its first finding alone, and a body
    that is read once for each would be read a thousand times."""
    if not place:
        return False
    part, *rest = place
    if isinstance(holder, list) and isinstance(part, int):
        mended = [_whole_at(entry, tuple(rest)) for entry in holder]
        return any(mended)
    if not isinstance(holder, dict) or part not in holder:  # the name of a union's branch leads nowhere
        return _whole_at(holder, tuple(rest))
    if not _is_whole(holder[part]):
        return _whole_at(holder[part], tuple(rest))
    holder[part] = int(holder[part])
    return True


def _decoded(data: bytes) -> Any:
    """Python's collector would look at all there is a hundred times while the values are made, and find nothing."""
    with no_collection():
        return _decode(data)


def _refuse_large_structures(data: bytes) -> None:
    """Before they are read: compiling them is refused anyway."""
    try:
        fields = _fields(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return  # what is wrong with it is said by who reads it
    for name in STRUCTURES.intersection(fields):
        value = memoryview(fields[name])
        if len(value) > LARGE and (name != "text" or bytes(value[:1]) == b"{"):
            refuse(f"{name} is larger than {MAX_SPEC_BYTES >> 10} KiB.")


def translated(schema: type[B], fields: Mapping[str, Any]) -> B:
    """A request in another API's words; fields that are None count as absent."""
    return validated(schema, {name: value for name, value in fields.items() if value is not None})
