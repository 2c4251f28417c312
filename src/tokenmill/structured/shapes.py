"""Sets of JSON values as plain data. Owns: Sum (a set, by type), its shapes, and the lazy nodes that stand for sets.

A schema says which values it admits; here that is a union of shapes of one type each, so that intersection and
complement become arithmetic (algebra.py). Must not know: keywords, grammars.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import Any

from tokenmill.structured.matching import matches

Path = tuple[str, ...]
SPELT = "~"


@dataclass(frozen=True, slots=True)
class At:
    """What the subschema at this place admits."""

    path: Path


@dataclass(frozen=True, slots=True)
class Both:
    """What all of these admit; made by `both`."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Non:
    """What `part` does not admit; `path` is the keyword that asked."""

    part: Node
    path: Path


@dataclass(frozen=True, slots=True)
class Number:
    """lo..hi, each border open or not; kind "integer", "fraction" (no integers) or "any"; multiples of `step`, of none
    of `skips`."""

    kind: str = "any"
    lo: Fraction | None = None
    lo_open: bool = False
    hi: Fraction | None = None
    hi_open: bool = False
    step: Fraction | None = None
    skips: frozenset[Fraction] = frozenset()


@dataclass(frozen=True, slots=True)
class String:
    """`values`: nothing but these (then all else has been applied to them). Patterns are for whole texts.

    Some readers assert a format, others take it for a remark, so its complement cannot be told; SPELT ones are among
    the patterns, too."""

    values: frozenset[str] | None = None
    avoid: frozenset[str] = frozenset()
    lo: int = 0
    hi: int | None = None
    patterns: frozenset[str] = frozenset()
    avoid_patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()

    @property
    def named(self) -> list[str]:
        """Formats that the grammar engine has to know."""
        return sorted(f for f in self.formats if not f.startswith(SPELT))


@dataclass(frozen=True, slots=True)
class Held:
    """lo..hi items are in `node`; the first so many do not count."""

    node: Node
    lo: int = 1
    hi: int | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class Array:
    """Items by position, then `rest`; `some`: how many of them are in certain sets."""

    prefix: tuple[Node, ...] = ()
    rest: Node = None  # type: ignore[assignment]
    lo: int = 0
    hi: int | None = None
    some: frozenset[Held] = frozenset()
    unique: bool = False
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """A name that is not among `names` has a value in `node`."""

    names: frozenset[str]
    node: Node


@dataclass(frozen=True, slots=True)
class Object:
    """Known names, names by pattern, all `extra` ones; `names`: what every name must be in; `some`: all of these are
    so."""

    props: tuple[tuple[str, Node], ...] = ()
    patterns: tuple[tuple[str, Node], ...] = ()
    extra: Node = None  # type: ignore[assignment]
    required: frozenset[str] = frozenset()
    lo: int = 0
    hi: int | None = None
    names: frozenset[Node] = frozenset()
    some: frozenset[Beside] = frozenset()


@dataclass(frozen=True, slots=True)
class Sum:
    """A union, by type. `flags` are the booleans in it; an empty Sum admits nothing."""

    null: bool = False
    flags: frozenset[bool] = frozenset()
    numbers: tuple[Number, ...] = ()
    strings: tuple[String, ...] = ()
    arrays: tuple[Array, ...] = ()
    objects: tuple[Object, ...] = ()


Node = At | Both | Non | Sum
Shape = Number | String | Array | Object

NEVER = Sum()
BOOLEANS = frozenset((True, False))


def _anything() -> Sum:
    # The one set that holds itself: an array of anything is something.
    found = Sum(True, BOOLEANS, (Number(),), (String(),))
    mark: Any = At(("\0any",))
    object.__setattr__(found, "arrays", (Array(rest=mark),))
    object.__setattr__(found, "objects", (Object(extra=mark),))
    return found


ANY: Node = At(("\0any",))
"""Everything; a name, because it holds itself."""
WHOLE = _anything()
"""What ANY stands for."""
WHOLE_ARRAY, WHOLE_OBJECT = WHOLE.arrays[0], WHOLE.objects[0]


def both(a: Node, b: Node) -> Node:
    """The intersection, to be worked out when it is needed."""
    if b == ANY or a in (b, NEVER):
        return a
    if a == ANY or b == NEVER:
        return b
    parts = {p: None for node in (a, b) for p in (node.parts if isinstance(node, Both) else (node,))}
    return Both(tuple(sorted(parts, key=hash)))


def non(a: Node, path: Path) -> Node:
    """The complement, to be worked out when it is needed."""
    return NEVER if a == ANY else ANY if a == NEVER else Non(a, path)


def literal(value: Any) -> Sum:
    """Just this value (as json.loads gives it; numbers may be Fractions)."""
    if value is None:
        return Sum(null=True)
    if isinstance(value, bool):
        return Sum(flags=frozenset((value,)))
    if isinstance(value, str):
        return Sum(strings=(String(frozenset((value,))),))
    if isinstance(value, list):
        items = tuple(literal(v) for v in value)
        return Sum(arrays=(Array(items, NEVER, len(items), len(items)),))
    if isinstance(value, dict):
        props = tuple((k, literal(v)) for k, v in value.items())
        return Sum(objects=(Object(props, (), NEVER, frozenset(value)),))
    number = Fraction(value)
    return Sum(numbers=(Number(lo=number, hi=number),))


# ------------------------------------------------------------------ numbers


def tidy_number(n: Number) -> Number | None:
    """A canonical form, None if it is empty."""
    lo, lo_open, hi, hi_open, step = n.lo, n.lo_open, n.hi, n.hi_open, n.step
    if n.kind == "integer":  # multiples of p/q that are integers are the multiples of p
        step = None if step is None or step.numerator == 1 else Fraction(step.numerator)
    grid = Fraction(1) if n.kind == "integer" and step is None else step
    if grid is not None:  # borders move to the next multiple, which is in the set
        lo, lo_open = None if lo is None else _multiple(lo, grid, lo_open, up=True), False
        hi, hi_open = None if hi is None else _multiple(hi, grid, hi_open, up=False), False
    if lo is not None and hi is not None and (lo > hi or (lo == hi and (lo_open or hi_open))):
        return None
    if any(grid is not None and (grid / s).denominator == 1 for s in n.skips):
        return None
    if n.kind == "fraction" and step is not None and step.denominator == 1:
        return None
    if lo is not None and lo == hi:
        return Number(lo=lo, hi=hi) if _admits_number(n, lo) else None
    return Number(n.kind, lo, lo_open, hi, hi_open, step, n.skips)


def _multiple(border: Fraction, step: Fraction, is_open: bool, *, up: bool) -> Fraction:
    """The multiple nearest to a border, inside of it."""
    count = border / step
    if up:
        return step * (floor(count) + 1 if is_open else ceil(count))
    return step * (ceil(count) - 1 if is_open else floor(count))


def _admits_number(n: Number, value: Fraction) -> bool:
    whole = value.denominator == 1
    if (n.kind == "integer" and not whole) or (n.kind == "fraction" and whole):
        return False
    if n.step is not None and (value / n.step).denominator != 1:
        return False
    return not any((value / s).denominator == 1 for s in n.skips)


def meet_numbers(a: Number, b: Number) -> Number | None:
    """What both admit."""
    if a.kind != b.kind and "any" not in (a.kind, b.kind):
        return None
    kind = b.kind if a.kind == "any" else a.kind
    lo, lo_open = max(_low(a), _low(b))[1:] if (a.lo, b.lo) != (None, None) else (None, False)
    hi, hi_open = min(_high(a), _high(b))[1:] if (a.hi, b.hi) != (None, None) else (None, False)
    step = a.step if b.step is None else b.step
    if a.step is not None and b.step is not None:
        step = Fraction(lcm(a.step.numerator, b.step.numerator), gcd(a.step.denominator, b.step.denominator))
    return tidy_number(Number(kind, lo, bool(lo_open), hi, bool(hi_open), step, a.skips | b.skips))


def _low(n: Number) -> tuple:
    return ((n.lo, n.lo_open) if n.lo is not None else (float("-inf"), False)), n.lo, n.lo_open


def _high(n: Number) -> tuple:
    return ((n.hi, not n.hi_open) if n.hi is not None else (float("inf"), True)), n.hi, n.hi_open


def outside_number(n: Number) -> list[Number]:
    """The numbers that `n` does not admit."""
    found = []
    if n.lo is not None:
        found.append(Number(hi=n.lo, hi_open=not n.lo_open))
    if n.hi is not None:
        found.append(Number(lo=n.hi, lo_open=not n.hi_open))
    if n.kind != "any":
        found.append(Number("fraction" if n.kind == "integer" else "integer"))
    if n.step is not None:
        found.append(Number(skips=frozenset((n.step,))))
    return found + [Number(step=s) for s in n.skips]


# ------------------------------------------------------------------ strings


def tidy_string(s: String) -> String | None:
    """A canonical form, None if it is empty. Formats are not judged here: they stay with the values."""
    if s.values is not None:
        kept = frozenset(v for v in s.values if _admits_string(s, v))
        return String(kept, formats=s.formats) if kept else None
    if (s.hi is not None and s.hi < s.lo) or s.patterns & s.avoid_patterns:
        return None
    if s.hi == 0:
        return tidy_string(String(frozenset(("",)), s.avoid, 0, None, s.patterns, s.avoid_patterns, s.formats))
    avoid = frozenset(v for v in s.avoid if len(v) >= s.lo and (s.hi is None or len(v) <= s.hi))
    return String(None, avoid, s.lo, s.hi, s.patterns, s.avoid_patterns, s.formats)


def _admits_string(s: String, value: str) -> bool:
    if value in s.avoid or len(value) < s.lo or (s.hi is not None and len(value) > s.hi):
        return False
    return all(matches(p, value) for p in s.patterns) and not any(matches(p, value) for p in s.avoid_patterns)


def meet_strings(a: String, b: String) -> String | None:
    """What both admit."""
    values = a.values if b.values is None else b.values if a.values is None else a.values & b.values
    highs = [h for h in (a.hi, b.hi) if h is not None]
    return tidy_string(
        String(
            values,
            a.avoid | b.avoid,
            max(a.lo, b.lo),
            min(highs) if highs else None,
            a.patterns | b.patterns,
            a.avoid_patterns | b.avoid_patterns,
            a.formats | b.formats,
        )
    )


def outside_string(s: String) -> list[String] | None:
    """The strings that `s` does not admit; None: cannot be said."""
    if s.formats:
        return None
    if s.values is not None:
        return [String(avoid=s.values)]
    found = [String(values=s.avoid)] if s.avoid else []
    if s.lo:
        found.append(String(hi=s.lo - 1))
    if s.hi is not None:
        found.append(String(lo=s.hi + 1))
    found += [String(avoid_patterns=frozenset((p,))) for p in s.patterns]
    return found + [String(patterns=frozenset((p,))) for p in s.avoid_patterns]
