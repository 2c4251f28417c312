"""What JSON Schema's keywords mean. Owns: reading a schema document into sets of values (drafts 4 to 2020-12).

Every keyword that asserts something is either read here exactly or refused by name and place; annotations are
skipped. `format` is enforced, by a narrower known format where the wide one is not regular. Must not know: grammars.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

from tokenmill.core.nesting import deeper_than
from tokenmill.structured import regex
from tokenmill.structured.algebra import Algebra, pointer, refuse_keyword, tidy_array, tidy_object, value_of
from tokenmill.structured.dialects import EVERY, Dialect, named
from tokenmill.structured.evaluated import Evaluated
from tokenmill.structured.limits import (
    MAX_COUNT,
    MAX_DEPTH,
    MAX_ENUM,
    MAX_LITERAL,
    MAX_PROPERTIES,
    MAX_SPEC_BYTES,
    refuse,
)
from tokenmill.structured.references import References
from tokenmill.structured.shapes import (
    ANY,
    BOOLEANS,
    NEVER,
    SPELT,
    WHOLE,
    Array,
    At,
    Held,
    Node,
    Number,
    Object,
    Path,
    String,
    Sum,
    both,
    literal,
    tidy_number,
    tidy_string,
)

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = {  # enforced by the grammar engine, the same or a narrower one
    **{f: f for f in ("duration", "email", "ipv6", "uri")},
    "idn-email": "email",
    "iri": "uri",
    "uri-template": "uri",
}
_POINTER = r"(?:\x2f(?:[^\x00-\x07\x0b\x0e-\x1f\x2f\x7e\x7f]|\x7e[01])*)*"
_YEAR_DAY = (
    r"(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])\x2d(?:(?:0[13578]|1[02])\x2d(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)\x2d(?:0[1-9]|[12][0-9]|30)"
    r"|02\x2d(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)\x2d02\x2d29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3])\x3a[0-5][0-9]"
_TIME = rf"{_CLOCK}\x3a[0-5][0-9](?:\x2e[0-9]{{1,9}})?(?:[zZ]|[\x2b\x2d]{_CLOCK})"
# Labels without "--" in the third and fourth place, which says that they are encoded and would have to be decoded; few
# enough of them that no name is longer than 253 characters.
_ALNUM, _HOST = "[0-9A-Za-z]", r"[0-9A-Za-z\x2d]"


def _hostname(labels: int, longest: int) -> str:
    four = f"{_HOST}{_ALNUM}{_HOST}{{0,{longest - 4}}}{_ALNUM}"
    dashed = rf"{_HOST}\x2d{_ALNUM}(?:{_HOST}{{0,{longest - 5}}}{_ALNUM})?"
    label = f"{_ALNUM}(?:{_HOST}?{_ALNUM}|{four}|{dashed})?"
    return rf"{label}(?:\x2e{label}){{0,{labels - 1}}}"


_HOSTNAME = f"{_hostname(3, 63)}|{_hostname(7, 33)}"
_BASE64 = r"(?:[0-9A-Za-z\x2b\x2f]{4})*(?:[0-9A-Za-z\x2b\x2f]{2}\x3d\x3d|[0-9A-Za-z\x2b\x2f]{3}\x3d)?"
_SEGMENT = r"(?:[0-9A-Za-z\x21\x24\x26-\x2e\x3b\x3d\x40\x5f\x7e]|%[0-9a-fA-F]{2})"  # of a path, without a colon
_PATH_CHAR = rf"(?:{_SEGMENT}|\x3a)"
_HOST_CHAR = r"(?:[0-9A-Za-z\x21\x24\x26-\x2e\x3b\x3d\x5f\x7e]|%[0-9a-fA-F]{2})"
_PATHS = rf"(?:\x2f{_PATH_CHAR}*)*"
_AUTHORITY = rf"(?:(?:{_HOST_CHAR}|\x3a)*\x40)?{_HOST_CHAR}*(?:\x3a[0-9]*)?"
_URI_REFERENCE = (  # a scheme or none; hosts in brackets are left out
    rf"(?:[a-zA-Z][0-9A-Za-z\x2b\x2d\x2e]*\x3a)?"
    rf"(?:\x2f\x2f{_AUTHORITY}{_PATHS}|\x2f(?:{_PATH_CHAR}+{_PATHS})?|{_SEGMENT}+{_PATHS})?"
    rf"(?:\x3f(?:{_PATH_CHAR}|[\x2f\x3f])*)?(?:\x23(?:{_PATH_CHAR}|[\x2f\x3f])*)?"
)
FORMAT_PATTERNS = {
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _URI_REFERENCE,
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "date": _YEAR_DAY,
    "time": _TIME,
    "date-time": rf"{_YEAR_DAY}[tT]{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(?:\x2d[0-9a-fA-F]{4}){3}\x2d[0-9a-fA-F]{12}",
    "ipv4": r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\x2e){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:\x23|{_POINTER})",
}
REFUSED = {
    "disallow": "it is draft 3's; use not",
    "extends": "it is draft 3's; use allOf",
    "divisibleBy": "it is draft 3's; use multipleOf",
}
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")


def parse(given: Any) -> Any:
    """A schema document from JSON text or plain data, numbers exact, within the limits."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        if len(text) > MAX_SPEC_BYTES:
            refuse(f"the schema is larger than {MAX_SPEC_BYTES >> 10} KiB.")
        document = json.loads(text, parse_float=_decimal, parse_constant=_no_constant)
    except RecursionError:
        refuse(f"the schema is nested more than {MAX_DEPTH} deep.")
    except (TypeError, ValueError) as error:
        if hasattr(error, "param"):
            raise
        refuse(f"the schema is not JSON: {str(error)[:200]}")
    if deeper_than(document, MAX_DEPTH):
        refuse(f"the schema is nested more than {MAX_DEPTH} deep.")
    return document


def _decimal(text: str) -> Decimal:
    value = Decimal(text)
    if abs(value.adjusted()) > 400 or len(value.as_tuple().digits) > 400:
        refuse(f"the number {text[:40]} is out of range.")
    return value


def _no_constant(text: str) -> NoReturn:
    refuse(f"{text} is not a JSON number.")


class SchemaReader:
    """One document; `algebra` works out what its places admit."""

    def __init__(self, document: Any, *, closed: bool = False) -> None:
        """closed: objects with properties and no additionalProperties admit no others."""
        self.document = document
        self.closed = closed
        self.algebra = Algebra(self.read)
        self.evaluated = Evaluated(self, IN_PLACE)
        self.references: References | None = None

    # ------------------------------------------------------------ places

    def read(self, path: Path) -> Sum:
        """What the subschema at `path` admits."""
        schema = self.at(path)
        if isinstance(schema, bool):
            return WHOLE if schema else NEVER
        if any(k in schema and not _says_nothing(schema, k) for k in UNEVALUATED):
            return self.algebra.union([found for found, _ in self.evaluated.cases(path)])
        found = self.typed(schema, path)
        for keyword, read in IN_PLACE.items():
            if keyword in schema:
                found = self.algebra.meet(found, read(self, schema[keyword], (*path, keyword)))
        return found

    def at(self, path: Path) -> Any:
        """The subschema at `path`: true, false, or an object of keywords that are not refused by name."""
        schema = self._found(path)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            refuse(f"the schema at {pointer(path)} must be an object, true or false.")
        self.algebra.budget.spend(len(schema))
        if not isinstance(schema.get("$schema", ""), str):
            _invalid((*path, "$schema"), "a string")
        for keyword, why in REFUSED.items():
            if keyword in schema and not _says_nothing(schema, keyword):
                refuse_keyword((*path, keyword), why)
        return self.dialect(path).reads(schema, path)

    def dialect(self, path: Path) -> Dialect:
        """The draft that the place is written in."""
        found = EVERY
        for size, schema in enumerate(self._along(path)):
            found = named(schema, found, path[:size])
        return found

    def _found(self, path: Path) -> Any:
        *_, found = self._along(path)
        return found

    def _along(self, path: Path) -> Iterator[Any]:
        """What lies on the way to a place: the document first, the place last."""
        yield (found := self.document)
        for i, step in enumerate(path):
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isascii() and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            else:
                refuse(f"there is nothing at {pointer(path[: i + 1])}, where a reference points.")
            yield found

    def target(self, target: Any, path: Path) -> Path:
        """Where a reference at `path` points."""
        if not isinstance(target, str):
            _invalid(path, "a string")
        if self.references is None:
            self.references = References(self.document)
        return self.references.resolve(target, path)

    # ------------------------------------------------------------ by type

    def typed(self, schema: dict, path: Path) -> Sum:
        """What the keywords about values of one type admit."""
        given = schema.get("type", list(TYPES))
        types = [given] if isinstance(given, str) else given
        if not isinstance(types, list) or not types or any(t not in TYPES for t in types):
            _invalid((*path, "type"), f"one or several of {', '.join(TYPES)}")
        numbers: tuple[Number, ...] = ()
        if "number" in types or "integer" in types:
            number = self._number(schema, path, "any" if "number" in types else "integer")
            numbers = () if number is None else (number,)
        string = self._string(schema, path) if "string" in types else None
        array = self._array(schema, path) if "array" in types else None
        item = self._object(schema, path) if "object" in types else None
        return Sum(
            "null" in types,
            BOOLEANS if "boolean" in types else frozenset(),
            numbers,
            () if string is None else (string,),
            () if array is None else (array,),
            () if item is None else (item,),
        )

    def _number(self, schema: dict, path: Path, kind: str) -> Number | None:
        lo, hi = _value(schema, path, "minimum"), _value(schema, path, "maximum")
        lo_open = hi_open = False
        low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if isinstance(low, bool):  # draft 4
            lo_open = low and lo is not None
        elif (bound := _value(schema, path, "exclusiveMinimum")) is not None and (lo is None or bound >= lo):
            lo, lo_open = bound, True
        if isinstance(high, bool):
            hi_open = high and hi is not None
        elif (bound := _value(schema, path, "exclusiveMaximum")) is not None and (hi is None or bound <= hi):
            hi, hi_open = bound, True
        step = _value(schema, path, "multipleOf")
        if step is not None and step <= 0:
            _invalid((*path, "multipleOf"), "a number above 0")
        return tidy_number(Number(kind, lo, lo_open, hi, hi_open, step))

    def _string(self, schema: dict, path: Path) -> String | None:
        patterns, formats = set(), set()
        if "pattern" in schema:
            patterns.add(_pattern(schema["pattern"], (*path, "pattern")))
        name = schema.get("format", "")
        if not isinstance(name, str):
            _invalid((*path, "format"), "a string")
        if name in FORMATS:
            formats.add(FORMATS[name])
        elif name in FORMAT_PATTERNS:
            patterns.add(FORMAT_PATTERNS[name])
            formats.add(SPELT + name)
        elif name == "regex":
            refuse_keyword((*path, "format"), "the texts that are regular expressions are not regular")
        if schema.get("contentEncoding") == "base64":
            patterns.add(_BASE64)
        if schema.get("contentMediaType") == "application/json":
            refuse_keyword((*path, "contentMediaType"), "JSON inside of a string is not regular")
        lo, hi = _count(schema, path, "minLength") or 0, _count(schema, path, "maxLength")
        return tidy_string(String(lo=lo, hi=hi, patterns=frozenset(patterns), formats=frozenset(formats)))

    def _array(self, schema: dict, path: Path) -> Array | None:
        keyword = "items" if isinstance(schema.get("items"), list) else "prefixItems"
        first = schema.get(keyword, [])
        if not isinstance(first, list):
            _invalid((*path, keyword), "a list of schemas")
        rest = "additionalItems" if keyword == "items" else "items"
        some: set[Held] = set()
        least, most = _count(schema, path, "minContains"), _count(schema, path, "maxContains")
        if "contains" in schema:
            some.add(Held(self.child((*path, "contains")), 1 if least is None else least, most))
        return tidy_array(
            Array(
                tuple(self.child((*path, keyword, str(i))) for i in range(len(first))),
                self.child((*path, rest)) if rest in schema else ANY,
                _count(schema, path, "minItems") or 0,
                _count(schema, path, "maxItems"),
                frozenset(some),
                bool(schema.get("uniqueItems", False)),
            )
        )

    def _object(self, schema: dict, path: Path) -> Object | None:
        listed, by_pattern = _mapping(schema, path, "properties"), _mapping(schema, path, "patternProperties")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
            _invalid((*path, "required"), "a list of property names")
        if len({*listed, *required}) > MAX_PROPERTIES:
            refuse(f"the schema at {pointer(path)} lists more than {MAX_PROPERTIES} properties.")
        for name in (*listed, *required):
            _check_literal(name, path)
        extra = "additionalProperties"
        patterns: dict[str, Node] = {}
        for given in by_pattern:
            place = (*path, "patternProperties", given)
            pattern = _pattern(given, place)
            patterns[pattern] = both(patterns.get(pattern, ANY), self.child(place))
        told = extra in schema or "unevaluatedProperties" in schema
        closed = self.closed and not told and bool(listed or by_pattern)
        found = Object(
            (),
            tuple(patterns.items()),
            self.child((*path, extra)) if extra in schema else NEVER if closed else ANY,
            frozenset(required),
            _count(schema, path, "minProperties") or 0,
            _count(schema, path, "maxProperties"),
            frozenset((At((*path, "propertyNames")),) if "propertyNames" in schema else ()),
        )
        bare = Object(patterns=found.patterns, extra=ANY)
        props = {n: both(self.child((*path, "properties", n)), value_of(bare, n)) for n in listed}
        props |= {n: value_of(found, n) for n in required if n not in props}  # in the order that the schema gives
        return tidy_object(replace(found, props=tuple(props.items())))

    def child(self, path: Path) -> Node:
        """A subschema as a node; the trivial ones are known at once."""
        schema = self._found(path)
        if schema is True or schema == {}:
            return ANY
        return NEVER if schema is False else At(path)

    def pattern(self, given: Any, path: Path) -> str:
        """A pattern of names for whole names."""
        return _pattern(given, path)

    # ------------------------------------------------------------ in place

    def _ref(self, target: Any, path: Path) -> Sum:
        return self.algebra.force(At(self.target(target, path)))

    def _enum(self, values: Any, path: Path) -> Sum:
        if not isinstance(values, list) or not values:
            _invalid(path, "a list of values")
        if len(values) > MAX_ENUM:
            refuse(f"the enum at {pointer(path)} has more than {MAX_ENUM} values.")
        for value in values:
            _check_literal(value, path)
        texts = frozenset(v for v in values if isinstance(v, str))
        others = [literal(v) for v in values if not isinstance(v, str)]
        return self.algebra.union([*([Sum(strings=(String(texts),))] if texts else []), *others])

    def _const(self, value: Any, path: Path) -> Sum:
        return self._enum([value], path)

    def _all_of(self, given: Any, path: Path) -> Sum:
        found = WHOLE
        for part in self.parts(given, path):
            found = self.algebra.meet(found, self.algebra.force(part))
        return found

    def _any_of(self, given: Any, path: Path) -> Sum:
        return self.algebra.union([self.algebra.force(p) for p in self.parts(given, path)])

    def _one_of(self, given: Any, path: Path) -> Sum:
        """Each option without those that it overlaps with."""
        algebra = self.algebra
        options = [algebra.force(p) for p in self.parts(given, path)]
        found = []
        for i, option in enumerate(options):
            for j, other in enumerate(options):
                if i != j and not algebra.empty(algebra.meet(option, other)):
                    option = algebra.meet(option, algebra.outside(other, path))
            found.append(option)
        return algebra.union(found)

    def parts(self, given: Any, path: Path) -> list[Node]:
        """The schemas of a list, as nodes."""
        if not isinstance(given, list) or not given:
            _invalid(path, "a list of schemas")
        return [self.child((*path, str(i))) for i in range(len(given))]

    def _not(self, given: Any, path: Path) -> Sum:
        return self.algebra.outside(self.algebra.force(At(path)), path)

    def _if(self, given: Any, path: Path) -> Sum:
        place = path[:-1]
        schema = self.at(place)
        if "then" not in schema and "else" not in schema:
            return WHOLE
        algebra = self.algebra
        condition = algebra.force(At(path))
        met, unmet = condition, algebra.outside(condition, path)
        if "then" in schema:
            met = algebra.meet(met, algebra.force(At((*place, "then"))))
        if "else" in schema:
            unmet = algebra.meet(unmet, algebra.force(At((*place, "else"))))
        return algebra.union([met, unmet])

    def dependencies(self, given: Any, path: Path) -> Sum:
        """If a name is there, other names must be there, or the whole must fit a schema."""
        if not isinstance(given, dict):
            _invalid(path, "an object")
        algebra, found = self.algebra, WHOLE
        for name, then in given.items():
            absent = Object(((name, NEVER),), extra=ANY)
            names = frozenset((name, *(then if isinstance(then, list) else ())))
            if not all(isinstance(n, str) for n in names):
                _invalid((*path, name), "a list of property names")
            order = tuple((n, ANY) for n in (then if isinstance(then, list) else ()))
            present = Sum(objects=(Object(order, extra=ANY, required=names),))
            if not isinstance(then, list):
                present = algebra.meet(present, algebra.force(At((*path, name))))
            others = Sum(True, BOOLEANS, WHOLE.numbers, WHOLE.strings, WHOLE.arrays, (absent,))
            found = algebra.meet(found, algebra.union([others, present]))
        return found


IN_PLACE: dict[str, Callable[[SchemaReader, Any, Path], Sum]] = {
    "const": SchemaReader._const,
    "enum": SchemaReader._enum,
    "$ref": SchemaReader._ref,
    "$dynamicRef": SchemaReader._ref,
    "$recursiveRef": SchemaReader._ref,
    "allOf": SchemaReader._all_of,
    "anyOf": SchemaReader._any_of,
    "oneOf": SchemaReader._one_of,
    "not": SchemaReader._not,
    "if": SchemaReader._if,
    "dependencies": SchemaReader.dependencies,
    "dependentRequired": SchemaReader.dependencies,
    "dependentSchemas": SchemaReader.dependencies,
}


def _says_nothing(schema: dict, keyword: str) -> bool:
    """Does a keyword that cannot be enforced admit everything here?"""
    return schema[keyword] is True or schema[keyword] == {}


def _invalid(path: Path, wanted: str) -> NoReturn:
    refuse(f"{pointer(path)} must be {wanted}.")


def _value(schema: dict, path: Path, keyword: str) -> Fraction | None:
    value = schema.get(keyword)
    if value is None and keyword not in schema:
        return None
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        _invalid((*path, keyword), "a number")
    return Fraction(value)


def _count(schema: dict, path: Path, keyword: str) -> int | None:
    value = _value(schema, path, keyword)
    if value is None:
        return None
    if value < 0 or value.denominator != 1:
        _invalid((*path, keyword), "an integer from 0 on")
    if value > MAX_COUNT and keyword.startswith("min"):
        refuse_keyword((*path, keyword), f"at most {MAX_COUNT} can be asked for")
    return int(value)


def _mapping(schema: dict, path: Path, keyword: str) -> dict[str, Any]:
    value = schema.get(keyword, {})
    if not isinstance(value, dict):
        _invalid((*path, keyword), "an object of schemas")
    return value


def _pattern(given: Any, path: Path) -> str:
    if not isinstance(given, str):
        _invalid(path, "a string")
    try:
        return regex.search(given)
    except regex.RegexError as error:
        refuse_keyword(path, str(error))


def _check_literal(value: Any, path: Path) -> None:
    """Literal strings are bounded: each mask inside one walks its rest."""
    if isinstance(value, str) and len(value) > MAX_LITERAL:
        refuse(f"a literal at {pointer(path)} is longer than {MAX_LITERAL} characters.")
    if isinstance(value, dict | list):
        for item in value.items() if isinstance(value, dict) else value:
            _check_literal(list(item) if isinstance(item, tuple) else item, path)
