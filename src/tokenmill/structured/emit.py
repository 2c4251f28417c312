"""From sets of JSON values to the plain schema that the grammar engine compiles. Owns: the few forms of keywords that
the engine enforces exactly, and enumerating what these cannot express (unique items, contains, counts of names).

What has no such form is refused. Must not know: how people spell schemas.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb
from typing import Any, NoReturn

from tokenmill.structured import regex
from tokenmill.structured.algebra import Algebra, item_at, pointer, tidy_array, tidy_object, value_of
from tokenmill.structured.counted import MAX_CHOICES, choices
from tokenmill.structured.excluded_texts import without
from tokenmill.structured.limits import MAX_COUNT, refuse
from tokenmill.structured.matching import matches
from tokenmill.structured.number_forms import MAX_LISTED, NumberForms
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
    Held,
    Node,
    Non,
    Object,
    String,
    Sum,
    both,
    literal,
    non,
)

MAX_INLINE = 64
"""Longer forms are written once: contains writes one for each place of each alternative."""
MAX_SPLIT = 8
MAX_PLACES, MAX_PLACINGS = 16, 300
"""contains: the items that it counts are among this many first ones; so many choices of places are tried."""

Plain = dict[str, Any]


class Emitter:
    """Writes one set, with a definition for everything that it refers to."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self.names: dict[Node, str] = {}
        self.queue: list[Node] = []
        self.others: dict[frozenset[str], str] = {}
        """Patterns of all names but these."""
        self.where: Node = ANY
        self.unsaid = False
        """Was a text left out because JSON cannot spell it without hexadecimal escapes?"""
        self.numbers = NumberForms(self._refuse)

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
            unsaid = ", except with characters that JSON spells as \\uXXXX alone, which are never said"
            refuse(f"no value fits the schema{unsaid if self.unsaid else ''}.")
        return pruned

    def _refuse(self, why: str) -> NoReturn:
        place = self.where.path if isinstance(self.where, At | Non) else ()
        refuse(f"the schema at {pointer(place)} cannot be enforced: {why}")

    def _says(self, text: str) -> bool:
        """Can JSON spell it without hexadecimal escapes?"""
        odd = any((c < " " and c not in "\b\f\n\r\t") or "\ud800" <= c <= "\udfff" or c == "\x7f" for c in text)
        self.unsaid = self.unsaid or odd
        return not odd

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
                if made is None or len(str(made)) <= MAX_INLINE:
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
            self.numbers.write(number, types, listed, options)
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

    # ------------------------------------------------------------ strings

    def _string(self, s: String, types: list[str], listed: list[Any], options: list[Plain]) -> None:
        if s == String():
            types.append("string")
            return
        if s.avoid_patterns:
            self._refuse("strings that a pattern does not match cannot be told (from not, oneOf or if)")
        if s.values is not None:
            # Characters that need hexadecimal escapes are never said: the engine would leave them out of a literal.
            s = replace(s, values=frozenset(v for v in s.values if self._says(v)))
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
        for held in a.some:
            count = sum(not self.algebra.empty(both(literal(v), held.node), 99) for v in values[held.first :])
            if count < held.lo or (held.hi is not None and count > held.hi):
                return False
        return True

    def _values(self, node: Node) -> list[Any]:
        """All values of a node, if they are a short list of scalars."""
        found = self.algebra.force(node)
        if found.arrays or found.objects:
            self._refuse("uniqueItems can only be enforced for short lists of scalars (give items an enum)")
        values: list[Any] = ([None] if found.null else []) + sorted(found.flags)
        for n in found.numbers:
            point = n.lo is not None and n.lo == n.hi
            values += [self.numbers.exact(n.lo)] if point and n.lo is not None else self.numbers.integers(n)
        for s in found.strings:
            if s.values is None or s.named:
                self._refuse("uniqueItems can only be enforced for short lists of scalars (give items an enum)")
            values += sorted(filter(self._says, s.values))
        return values

    def _placed(self, a: Array) -> list[Array]:
        """contains: one alternative for each choice of places where the items that it counts can be."""
        held = min(a.some, key=lambda h: (h.hi is not None, h.lo, hash(h)))
        others, node = a.some - {held}, held.node
        if not (a.prefix or held.first) and self.algebra.force(a.rest) == self.algebra.force(node):
            highs = [h for h in (a.hi, held.hi) if h is not None]
            simpler = tidy_array(Array((), a.rest, a.lo, min(highs) if highs else None, others, a.unique))
            return [] if simpler is None else [simpler]
        other = ANY if held.hi is None else non(node, node.path if isinstance(node, At | Non) else ())
        rest, found = both(a.rest, other), []
        for chosen in self._places(held, None if a.hi is None else max(0, a.hi - held.first)):
            places = [held.first + place for place in chosen]
            size = max(len(a.prefix), places[-1] + 1 if places else 0, 0 if other == ANY else held.first)
            asked = [ANY] * held.first + [other] * max(0, size - held.first)
            for place in places:
                asked[place] = node
            prefix = tuple(both(item_at(a, j), asked[j]) for j in range(size))
            if not any(self.algebra.empty(prefix[j]) for j in places):
                lo = max(a.lo, places[-1] + 1 if places else 0)
                found.append(tidy_array(Array(prefix, rest, lo, a.hi, others, a.unique)))
        return [f for f in found if f is not None]

    def _places(self, held: Held, longest: int | None) -> list[tuple[int, ...]]:
        """Where counted items can be: as many of the first places as leave few choices (a narrower set is safe)."""
        most = MAX_PLACES if longest is None else min(longest, MAX_PLACES)
        sizes = range(held.lo, 1 + (held.lo if held.hi is None else max(held.lo, min(held.hi, most))))
        fit = [n for n in range(held.lo, most + 1) if sum(comb(n, size) for size in sizes) <= MAX_PLACINGS]
        if not fit:
            self._refuse("contains counts more items than can be followed (minContains, maxContains)")
        return [places for size in sizes for places in combinations(range(fit[-1]), size)]

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
        if not all(map(self._says, o.required)):
            return
        props = {n: v for n, v in o.props if self._says(n)}
        for name in sorted(o.required):
            if name not in known:
                props[name] = value_of(o, name, known)
        if o.some:
            for part in self._beside(replace(o, props=tuple(props.items()))):
                self._object(part, types, options)
            return
        patterns = [found for p, v in o.patterns for found in self._free(p, v, props)]
        if o.extra == NEVER and all(v == NEVER for _, v in patterns):
            patterns = []  # beside others they stay: a name of two patterns, which the engine refuses, may be theirs
        o = replace(o, patterns=tuple(patterns))
        open_ = bool(o.patterns) or o.extra != NEVER
        possible = [n for n, v in props.items() if v != NEVER]
        lo = o.lo if o.lo > len(o.required) else 0
        hi = None if o.hi is None or (not open_ and o.hi >= len(possible)) else o.hi
        if not lo and hi is None:
            options.append(self._written(o, props))
        else:
            self._counted(o, props, options)

    def _beside(self, o: Object) -> list[Object]:
        """A name beside some others: one alternative for each name that can be it."""
        beside = min(o.some, key=lambda b: (sorted(b.names), hash(b.node)))
        known = dict(o.props)
        props = {**known, **{n: value_of(o, n, known) for n in sorted(beside.names - set(known))}}
        o = replace(o, props=tuple(props.items()), some=o.some - {beside})
        found = []
        for name in [n for n, v in o.props if n not in beside.names and v != NEVER]:
            changed = {**props, name: both(props[name], beside.node)}
            if not self.algebra.empty(changed[name]):
                found.append(replace(o, props=tuple(changed.items()), required=o.required | {name}))
        if o.patterns:
            self._refuse("objects cannot be told by names that are not listed beside patternProperties")
        held = both(o.extra, beside.node)
        if o.extra != NEVER and not self.algebra.empty(held):
            if self.algebra.force(held) != self.algebra.force(o.extra):
                self._refuse("objects cannot be told by the values of names that are not listed")
            found += self._with_unlisted(o, props)
        return [made for part in found if (made := tidy_object(part)) is not None]

    def _with_unlisted(self, o: Object, props: dict[str, Node]) -> list[Object]:
        """Objects with an unlisted name: counting it needs that all listed ones are there or absent."""
        optional = [n for n, v in props.items() if n not in o.required and v != NEVER]
        if len(optional) > MAX_SPLIT:
            self._refuse(f"objects can be told by an unlisted name beside at most {MAX_SPLIT} optional ones")
        found = []
        for chosen in (frozenset(c) for size in range(len(optional) + 1) for c in combinations(optional, size)):
            there = o.required | chosen
            kept = tuple((n, v if n in there else NEVER) for n, v in props.items())
            found.append(replace(o, props=kept, required=there, lo=max(o.lo, len(there) + 1)))
        return found

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
        dead = {n for n, v in props.items() if n not in o.required and self.algebra.empty(v)}  # they cannot be there
        props = {n: NEVER if n in dead else v for n, v in props.items()}
        optional = [n for n, v in props.items() if n not in o.required and v != NEVER]
        open_, sure = bool(o.patterns) or o.extra != NEVER, len(o.required)
        found = choices(optional, o.lo - sure, None if o.hi is None else o.hi - sure, opened=open_)
        if found is None:
            self._refuse(f"minProperties and maxProperties leave more than {MAX_CHOICES} choices of optional names")
        if not found and open_ and o.lo - sure > len(optional) + 1:
            self._refuse("minProperties can ask for one unlisted name at most")  # it could come twice
        for choice in found:
            there = o.required | frozenset(choice.there)
            kept = {n: v for n, v in props.items() if n in there or n in choice.free}
            self.algebra.budget.spend(len(kept))
            if choice.unlisted is None:
                options.append(self._written(Object((), (), NEVER, there), kept))
            elif o.hi is None and not choice.unlisted:
                absent = dict.fromkeys(props, NEVER)
                options.append(self._written(Object((), o.patterns, o.extra, there), {**absent, **kept}))
            else:
                part = self._unlisted(o, there, props) if len(kept) < len(props) else replace(o, required=there)
                options.append(self._written(part, kept, o.lo if choice.unlisted else 0, o.hi))

    def _unlisted(self, o: Object, there: frozenset[str], props: dict[str, Node]) -> Object:
        """Free names as a pattern that no listed name fits: counting needs that every listed name is required, and a
        pattern speaks of listed names as well."""
        listed = frozenset(props)
        if o.patterns:
            if o.extra != NEVER:
                self._refuse("a count of names beside patternProperties needs additionalProperties: false")
            free = [(self._without(p, listed), v) for p, v in o.patterns]
            return Object((), tuple((p, v) for p, v in free if p is not None), NEVER, there)
        if listed not in self.others:
            self.others[listed] = self._other_than(listed)
        return Object((), ((self.others[listed], o.extra),), NEVER, there)

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
        return replace(o, props=tuple(props), patterns=free, extra=NEVER, names=frozenset())

    def _free(self, pattern: str, extra: Node, props: dict[str, Node]) -> tuple[tuple[str, Node], ...]:
        """Unlisted names of a pattern. A pattern speaks of listed names as well, so it leaves out those of which it
        would ask more than they are held to."""
        force = self.algebra.force
        kept = [n for n, v in props.items() if v != NEVER and matches(pattern, n)]
        held = frozenset(n for n in kept if extra != ANY and force(both(props[n], extra)) != force(props[n]))
        found = self._without(pattern, held)
        return () if found is None else ((found, extra),)

    def _without(self, pattern: str, texts: frozenset[str]) -> str | None:
        """The pattern of the same texts but for these; None: nothing is left."""
        held = frozenset(text for text in texts if matches(pattern, text))
        self.algebra.budget.spend(len(pattern) * sum(map(len, held)))
        return without(pattern, held) if held else pattern

    def _name_pattern(self, s: String) -> str:
        size = f"{{{s.lo},{'' if s.hi is None else s.hi}}}"
        lengths = [f"{regex.ANY}{size}"] if s.lo or s.hi is not None else []
        avoid = [self._other_than(s.avoid)] if s.avoid else []
        every = [*sorted(s.patterns), *lengths, *avoid]
        if s.named or s.avoid_patterns or len(every) != 1:
            self._refuse("propertyNames can only be enforced for a list, one pattern, or one range of lengths")
        return every[0]


def _equal(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)
