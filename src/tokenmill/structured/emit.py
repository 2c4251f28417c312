"""From sets of JSON values to the plain schema that the grammar engine compiles. Owns: the few forms of keywords that
the engine enforces exactly, and enumerating what these cannot express (unique items, contains, counts of names).

What has no such form is refused. Must not know: how people spell schemas.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from math import inf
from typing import Any, NoReturn

from tokenmill.structured import regex
from tokenmill.structured.algebra import Algebra, item_at, pointer, tidy_array, tidy_object, value_of
from tokenmill.structured.excluded_texts import without
from tokenmill.structured.limits import MAX_COUNT, refuse
from tokenmill.structured.matching import matches
from tokenmill.structured.prune import prune
from tokenmill.structured.shapes import (
    ANY,
    BOOLEANS,
    NEVER,
    WHOLE,
    WHOLE_ARRAY,
    WHOLE_OBJECT,
    Array,
    At,
    Node,
    Non,
    Number,
    Object,
    String,
    Sum,
    both,
    literal,
    meet_numbers,
)

LARGEST = 1 << 53
MAX_LISTED = 1000
MAX_SPLIT = 8
MAX_PLACES = 16
"""contains: the item must be among this many first ones."""
MAX_GAPS = 24
MAX_STEP = 10_000

Plain = dict[str, Any]


class Emitter:
    """Writes one set, with a definition for everything that it refers to."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self.names: dict[Node, str] = {}
        self.queue: list[Node] = []
        self.where: Node = ANY

    def document(self, root: Node) -> Plain:
        """The schema of `root`."""
        self.where = root
        found = self._sum(self.algebra.force(root))
        defs: dict[str, Any] = {}
        while self.queue:
            self.where = self.queue.pop()
            made = self._sum(self.algebra.force(self.where))
            defs[self.names[self.where]] = False if made is None else made
        pruned = None if found is None else prune({**found, "$defs": defs})
        if pruned is None:
            refuse("no value fits the schema.")
        return pruned

    def _refuse(self, why: str) -> NoReturn:
        place = self.where.path if isinstance(self.where, At | Non) else ()
        refuse(f"the schema at {pointer(place)} cannot be enforced: {why}")

    def _node(self, node: Node) -> Any:
        """A subschema, or a reference to it."""
        if node == ANY:
            return {}
        if node == NEVER:
            return False
        if node not in self.names:
            found = self.algebra.force(node)
            whole = (not found.arrays or found.arrays == (WHOLE_ARRAY,)) and (
                not found.objects or found.objects == (WHOLE_OBJECT,)
            )
            if whole and len(found.strings) + len(found.numbers) < 8:
                here, self.where = self.where, node
                made = self._sum(found)
                self.where = here
                return False if made is None else made
            self.names[node] = str(len(self.names))
            self.queue.append(node)
        return {"$ref": f"#/$defs/{self.names[node]}"}

    def _sum(self, found: Sum) -> Plain | None:
        """None: nothing fits."""
        if found == WHOLE:
            return {}
        types: list[str] = []
        listed: list[Any] = []
        options: list[Plain] = []
        if found.null:
            types.append("null")
        if found.flags == BOOLEANS:
            types.append("boolean")
        else:
            listed += sorted(found.flags)
        for number in found.numbers:
            self._number(number, types, listed, options)
        for string in found.strings:
            self._string(string, types, listed, options)
        for array in found.arrays:
            self._array(array, types, listed, options)
        for item in found.objects:
            self._object(item, types, options)
        if types:
            options.insert(0, {"type": types[0] if len(types) == 1 else types})
        if listed:
            options.append({"enum": listed})
        if not options:
            return None
        return options[0] if len(options) == 1 else {"anyOf": options}

    # ------------------------------------------------------------ numbers

    def _number(self, n: Number, types: list[str], listed: list[Any], options: list[Plain]) -> None:
        if n == Number():
            types.append("number")
        elif n.lo is not None and n.lo == n.hi:
            listed.append(self._exact(n.lo))
        elif n.kind == "integer" and n.skips:
            listed += self._integers(n)
        elif n.skips or n.kind == "fraction":
            options += self._between(n)
        else:
            made: Plain = {"type": "integer" if n.kind == "integer" else "number"}
            n = _step_inside(n)
            lo, hi = n.lo, n.hi
            # Beyond 2^53 the engine counts inexactly: a narrower border is safe, a wider one is not.
            hi = None if hi is None else min(hi, Fraction(LARGEST))
            lo = None if lo is None else max(lo, Fraction(-LARGEST))
            if lo is not None:
                made["exclusiveMinimum" if n.lo_open and lo == n.lo else "minimum"] = self._exact(lo)
            if hi is not None:
                made["exclusiveMaximum" if n.hi_open and hi == n.hi else "maximum"] = self._exact(hi)
            if n.step is not None:
                odd = n.step.numerator
                while odd % 2 == 0 or odd % 5 == 0:
                    odd //= 2 if odd % 2 == 0 else 5
                if odd > MAX_STEP:  # remainders are states of an automaton
                    self._refuse(f"multipleOf has more than {MAX_STEP} remainders to follow")
                made["multipleOf"] = self._exact(n.step)
            options.append(made)

    def _integers(self, n: Number) -> list[int]:
        """All integers of the set, or only those near zero: a narrower set is safe."""
        lo = -MAX_LISTED // 2 if n.lo is None else int(n.lo)
        hi = max(lo, 0) + MAX_LISTED // 2 if n.hi is None else int(n.hi)
        lo = max(lo, hi - MAX_LISTED) if n.lo is None else lo
        step = n.step or Fraction(1)
        return [
            i
            for i in range(lo, min(hi, lo + MAX_LISTED) + 1)
            if (i / step).denominator == 1 and all((i / s).denominator > 1 for s in n.skips)
        ]

    def _between(self, n: Number) -> list[Plain]:
        """Numbers between neighbouring integers or multiples, near zero: a narrower set is safe."""
        grids = [*n.skips, *([Fraction(1)] if n.kind == "fraction" else [])]
        if len(grids) != 1 or n.step is not None:
            self._refuse("multiples of one number that are not multiples of another cannot be told apart")
        first = -MAX_GAPS // 2
        if n.hi is not None:
            first = min(first, n.hi // grids[0] - MAX_GAPS)
        if n.lo is not None:
            first = max(first, n.lo // grids[0])
        found: list[Plain] = []
        for k in range(first, first + MAX_GAPS + 1):
            gap = Number(lo=k * grids[0], lo_open=True, hi=(k + 1) * grids[0], hi_open=True)
            part = meet_numbers(gap, Number(lo=n.lo, lo_open=n.lo_open, hi=n.hi, hi_open=n.hi_open))
            if part is not None:
                self._number(part, [], [], found)
        return found

    def _exact(self, value: Fraction) -> int | float:
        if value.denominator == 1 and abs(value) <= LARGEST:
            return int(value)
        near = float(value) if abs(value) <= LARGEST else inf
        if near == inf or abs(near) < 1e-9 or Fraction(Decimal(repr(near))) != value:
            self._refuse("it holds a number that is too large or too long to be compared exactly")
        return near

    # ------------------------------------------------------------ strings

    def _string(self, s: String, types: list[str], listed: list[Any], options: list[Plain]) -> None:
        if s == String():
            types.append("string")
            return
        if s.avoid_patterns:
            self._refuse("strings that a pattern does not match cannot be told (from not, oneOf or if)")
        if s.values is not None:
            # Characters that need hexadecimal escapes are never said: the engine would leave them out of a literal.
            s = replace(s, values=frozenset(v for v in s.values if _sayable(v)))
            if not s.values or not s.named:
                listed += sorted(s.values or ())
                return
        made: Plain = {"type": "string"}
        lo, hi = s.lo, s.hi
        for low, high in map(regex.width, s.patterns):  # bounds that the pattern implies are costly for the engine
            if (high is not None and high < lo) or (hi is not None and low > hi):
                return
            lo, hi = 0 if low >= lo else lo, None if hi is None or (high is not None and high <= hi) else hi
        if lo > MAX_COUNT:
            self._refuse(f"strings longer than {MAX_COUNT} characters cannot be asked for")
        if lo:
            made["minLength"] = lo
        if hi is not None:
            made["maxLength"] = min(hi, MAX_COUNT)
        patterns = sorted(s.patterns)
        if s.values is not None:
            patterns.append("|".join(regex.literal(v) for v in sorted(s.values)))
        if s.avoid:
            patterns.append(self._other_than(s.avoid))
        more: list[Plain] = [{"pattern": f"^(?:{p})$"} for p in patterns] + [{"format": f} for f in s.named]
        if len(more) == 1:
            made |= more[0]
        elif more:
            made["allOf"] = [{"type": "string", **m} for m in more]
        options.append(made)

    def _other_than(self, values: frozenset[str]) -> str:
        self.algebra.budget.spend(2 * sum(map(len, values)))
        return regex.other_than(values)

    # ------------------------------------------------------------ arrays

    def _array(self, a: Array, types: list[str], listed: list[Any], options: list[Plain]) -> None:
        if a == WHOLE_ARRAY:
            types.append("array")
        elif a.repeats:
            self._refuse("arrays with equal items cannot be told (uniqueItems below not, oneOf or if)")
        elif a.unique and not self._told_apart(a):
            listed += self._unique(a)
        elif a.some:
            for part in self._placed(a):
                self._array(part, types, listed, options)
        else:
            if a.lo > MAX_COUNT:
                self._refuse(f"more than {MAX_COUNT} items cannot be asked for")
            made: Plain = {"type": "array"}
            if a.prefix:
                made["prefixItems"] = [self._node(n) for n in a.prefix]
            if a.rest != ANY:
                made["items"] = self._node(a.rest)
            if a.lo:
                made["minItems"] = a.lo
            if a.hi is not None and a.rest != NEVER:
                made["maxItems"] = min(a.hi, MAX_COUNT)
            options.append(made)

    def _told_apart(self, a: Array) -> bool:
        """Are the items different by their schemas already?"""
        if a.hi is None or a.hi > 16:
            return False
        nodes = [item_at(a, i) for i in range(a.hi)]
        return all(self.algebra.empty(both(x, y)) for x, y in combinations(nodes, 2))

    def _unique(self, a: Array) -> list[Any]:
        """All arrays of different items when they are few, else those in the order of the values."""
        rest = [] if a.rest == NEVER else self._values(a.rest)
        places = [self._values(n) for n in a.prefix]
        found = self._arrangements(a, places, rest, ordered=False)
        if found is None and not places:
            found = self._arrangements(a, places, rest, ordered=True)
        if found is None:
            self._refuse("uniqueItems has too many arrays to list")
        return found

    def _arrangements(self, a: Array, places: list[list[Any]], rest: list[Any], *, ordered: bool) -> list[Any] | None:
        found: list[list[Any]] = []
        level: list[list[Any]] = [[]]
        size = 0
        while level and (a.hi is None or size <= a.hi):
            if size >= a.lo:
                found += [v for v in level if self._has_some(a, v)]
            values = places[size] if size < len(places) else rest
            if len(found) + len(level) * len(values) > 4 * MAX_LISTED:
                return None
            self.algebra.budget.spend(len(level) * len(values))
            size += 1
            if ordered:
                level = [[*v, new] for v in level for new in values[values.index(v[-1]) + 1 if v else 0 :]]
            else:
                level = [[*v, new] for v in level for new in values if not any(_equal(new, old) for old in v)]
        return found

    def _has_some(self, a: Array, values: list[Any]) -> bool:
        return all(any(not self.algebra.empty(both(literal(v), s), 99) for v in values) for s in a.some)

    def _values(self, node: Node) -> list[Any]:
        """All values of a node, if they are a short list of scalars."""
        found = self.algebra.force(node)
        if found.arrays or found.objects:
            self._refuse("uniqueItems can only be enforced for short lists of scalars (give items an enum)")
        values: list[Any] = ([None] if found.null else []) + sorted(found.flags)
        for n in found.numbers:
            point = n.lo is not None and n.lo == n.hi
            values += [self._exact(n.lo)] if point and n.lo is not None else self._integers(n)
        for s in found.strings:
            if s.values is None or s.named:
                self._refuse("uniqueItems can only be enforced for short lists of scalars (give items an enum)")
            values += sorted(filter(_sayable, s.values))
        return values

    def _placed(self, a: Array) -> list[Array]:
        """contains: one alternative for each place where the item can be."""
        some = next(iter(a.some))
        others = a.some - {some}
        if not a.prefix and self.algebra.force(a.rest) == self.algebra.force(some):
            simpler = tidy_array(Array((), a.rest, max(a.lo, 1), a.hi, others, a.unique))
            return [] if simpler is None else [simpler]
        found = []
        for i in range(MAX_PLACES if a.hi is None else min(a.hi, MAX_PLACES)):
            prefix = [item_at(a, j) for j in range(max(i + 1, len(a.prefix)))]
            prefix[i] = both(prefix[i], some)
            if not self.algebra.empty(prefix[i]):
                found.append(tidy_array(Array(tuple(prefix), a.rest, max(a.lo, i + 1), a.hi, others, a.unique)))
        return [f for f in found if f is not None]

    # ------------------------------------------------------------ objects

    def _object(self, o: Object, types: list[str], options: list[Plain]) -> None:
        if o == WHOLE_OBJECT:
            types.append("object")
            return
        named = self._named(o)
        if named is None:
            return
        o = named
        known = dict(o.props)
        if not all(map(_sayable, o.required)):
            return
        props = {n: v for n, v in o.props if _sayable(n)}
        for name in sorted(o.required):
            if name not in known:
                props[name] = value_of(o, name, known)
        open_ = bool(o.patterns) or o.extra != NEVER
        possible = [n for n, v in props.items() if v != NEVER]
        lo = o.lo if o.lo > len(o.required) else 0
        hi = None if o.hi is None or (not open_ and o.hi >= len(possible)) else o.hi
        if not lo and hi is None:
            options.append(self._written(o, props))
        else:
            self._counted(o, props, options)

    def _written(self, o: Object, props: dict[str, Node], lo: int = 0, hi: int | None = None) -> Plain:
        made: Plain = {"type": "object"}
        if props:
            made["properties"] = {n: self._node(v) for n, v in props.items()}
        if o.patterns:
            made["patternProperties"] = {f"^(?:{p})$": self._node(v) for p, v in o.patterns}
        if o.extra != ANY:
            made["additionalProperties"] = self._node(o.extra)
        required = [n for n in props if n in o.required]
        if required:
            made["required"] = required
        if lo:
            made["minProperties"] = lo
        if hi is not None:
            made["maxProperties"] = min(hi, MAX_COUNT)
        return made

    def _counted(self, o: Object, props: dict[str, Node], options: list[Plain]) -> None:
        """min- and maxProperties: one alternative for each choice of the optional names."""
        optional = [n for n, v in props.items() if n not in o.required and v != NEVER]
        if len(optional) > MAX_SPLIT:
            self._refuse(f"minProperties and maxProperties need at most {MAX_SPLIT} optional properties")
        open_ = bool(o.patterns) or o.extra != NEVER
        for size in range(len(optional) + 1):
            for chosen in combinations(optional, size):
                there = o.required | frozenset(chosen)
                kept = {n: v for n, v in props.items() if n in there}
                if o.hi is not None and len(there) > o.hi:
                    continue
                if not open_ or len(there) == o.hi:
                    if len(there) >= o.lo:
                        options.append(self._written(Object((), (), NEVER, there), kept))
                    continue
                if o.lo - len(there) > 1:
                    # The engine lets a free name come twice, which would count twice.
                    self._refuse("minProperties can ask for one unlisted name at most")
                absent = frozenset(props) - there
                part = self._unlisted(o, there, props) if absent else Object((), o.patterns, o.extra, there)
                options.append(self._written(part, kept, o.lo if o.lo > len(there) else 0, o.hi))

    def _unlisted(self, o: Object, there: frozenset[str], props: dict[str, Node]) -> Object:
        """Free names as a pattern that no listed name fits: counting needs that every listed name is required, and a
        pattern speaks of listed names as well."""
        if o.patterns:
            self._refuse("minProperties and maxProperties cannot be enforced together with patternProperties")
        return Object((), ((self._other_than(frozenset(props)), o.extra),), NEVER, there)

    def _named(self, o: Object) -> Object | None:
        """propertyNames, turned into listed names or a pattern."""
        for node in o.names:
            found = self.algebra.force(node)
            if found.strings == WHOLE.strings:
                continue
            o = self._one_names(o, found)
            made = tidy_object(o)
            if made is None:
                return None
            o = made
        return o

    def _one_names(self, o: Object, names: Sum) -> Object:
        known = dict(o.props)
        listed: set[str] = set()
        patterns: list[str] = []
        for s in names.strings:
            if s.values is not None and not s.named:
                listed |= s.values
            else:
                patterns.append(self._name_pattern(s))

        def fits(name: str) -> bool:
            return name in listed or any(matches(p, name) for p in patterns)

        props = [(n, v if fits(n) else NEVER) for n, v in o.props]
        props += [(n, value_of(o, n, known) if fits(n) else NEVER) for n in sorted(o.required - set(known))]
        have = {n for n, _ in props}
        props += [(n, value_of(o, n, known)) for n in sorted(listed - have)]
        free: tuple[tuple[str, Node], ...] = ()
        if patterns and o.patterns:
            self._refuse("propertyNames cannot be enforced together with patternProperties")
        if patterns and o.extra != NEVER:
            free = self._free("|".join(f"(?:{p})" for p in patterns), o.extra, dict(props))
        return Object(tuple(props), free, NEVER, o.required, o.lo, o.hi)

    def _free(self, pattern: str, extra: Node, props: dict[str, Node]) -> tuple[tuple[str, Node], ...]:
        """Unlisted names of a pattern. A pattern speaks of listed names as well, so it leaves out those of which it
        would ask more than they are held to."""
        force = self.algebra.force
        kept = [n for n, v in props.items() if v != NEVER and matches(pattern, n)]
        held = frozenset(n for n in kept if extra != ANY and force(both(props[n], extra)) != force(props[n]))
        self.algebra.budget.spend(len(pattern) * sum(map(len, held)))
        found = without(pattern, held) if held else pattern
        return () if found is None else ((found, extra),)

    def _name_pattern(self, s: String) -> str:
        size = f"{{{s.lo},{'' if s.hi is None else s.hi}}}"
        lengths = [f"{regex.ANY}{size}"] if s.lo or s.hi is not None else []
        avoid = [self._other_than(s.avoid)] if s.avoid else []
        every = [*sorted(s.patterns), *lengths, *avoid]
        if s.named or s.avoid_patterns or len(every) != 1:
            self._refuse("propertyNames can only be enforced for a list, one pattern, or one range of lengths")
        return every[0]


def _step_inside(n: Number) -> Number:
    """Where an open whole border and the other one lie between the same two integers, the engine takes the border
    itself in: it moves inside by less than any written number would (a narrower set is safe)."""
    if n.kind == "integer" or n.lo is None or n.hi is None or n.step is not None or n.hi - n.lo >= 1:
        return n
    places = max(len(str(_decimal(b)).partition(".")[2]) for b in (n.lo, n.hi))
    tiny = Fraction(1, 10 ** min(9, places + 6))
    low = n.lo_open and n.lo >= 0 and n.lo.denominator == 1
    high = n.hi_open and n.hi <= 0 and n.hi.denominator == 1
    if (low or high) and n.hi - n.lo <= tiny:
        refuse("the borders of a number lie too close to each other to be compared exactly.")
    if low:
        return replace(n, lo=n.lo + tiny, lo_open=False)
    return replace(n, hi=n.hi - tiny, hi_open=False) if high else n


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def _sayable(text: str) -> bool:
    """Can JSON spell it without hexadecimal escapes?"""
    return not any((c < " " and c not in "\b\f\n\r\t") or "\ud800" <= c <= "\udfff" or c == "\x7f" for c in text)


def _equal(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)
