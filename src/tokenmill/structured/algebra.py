"""Intersection, union and complement of sets of JSON values. Owns: expanding lazy nodes, and remembering the results.

It is exact: what cannot be expressed exactly is refused, and the error names the keyword. Must not know: how schemas
are spelled (`read` does), how sets become grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NoReturn

from tokenmill.core.errors import ParameterError
from tokenmill.structured.limits import MAX_ALTERNATIVES, WorkBudget, refuse
from tokenmill.structured.matching import matches
from tokenmill.structured.shapes import (
    ANY,
    BOOLEANS,
    NEVER,
    WHOLE,
    Array,
    At,
    Beside,
    Both,
    Held,
    Node,
    Non,
    Object,
    Path,
    Sum,
    both,
    meet_numbers,
    meet_strings,
    non,
    outside_number,
    outside_string,
    tidy_number,
    tidy_string,
)


def pointer(path: Path) -> str:
    """A JSON pointer as people write it."""
    return "#" + "".join("/" + p.replace("~", "~0").replace("/", "~1") for p in path)


def refuse_keyword(path: Path, why: str) -> NoReturn:
    """Refuse the keyword that stands last in `path`."""
    refuse(f"the keyword {path[-1] if path else '?'!r} at {pointer(path)} cannot be enforced: {why}")


@dataclass(slots=True)
class Algebra:
    """The sets of one schema. `read` gives what the subschema at a path admits."""

    read: Callable[[Path], Sum]
    budget: WorkBudget = field(default_factory=WorkBudget)
    known: dict[Node, Sum] = field(default_factory=dict)
    busy: set[Node] = field(default_factory=set)

    def force(self, node: Node) -> Sum:
        """Expand a node, one level deep."""
        if isinstance(node, Sum):
            return node
        if node == ANY:
            return WHOLE
        found = self.known.get(node)
        if found is not None:
            return found
        if node in self.busy:
            where = node.path if isinstance(node, At | Non) else ()
            refuse(f"the reference at {pointer(where)} leads back to itself without end")
        self.budget.spend()
        self.busy.add(node)
        try:
            found = self._work_out(node)
        finally:
            self.busy.discard(node)
        self.known[node] = found
        return found

    def _work_out(self, node: At | Both | Non) -> Sum:
        if isinstance(node, At):
            return self.read(node.path)
        if isinstance(node, Non):
            return self.outside(self.force(node.part), node.path)
        found = WHOLE
        for part in node.parts:
            found = self.meet(found, self.force(part))
        return found

    # ------------------------------------------------------------ union and intersection

    def union(self, sums: Iterable[Sum]) -> Sum:
        """What any of them admits."""
        parts = list(sums)
        found = Sum(
            any(s.null for s in parts),
            frozenset().union(*(s.flags for s in parts)),
            tuple(dict.fromkeys(n for s in parts for n in s.numbers)),
            tuple(dict.fromkeys(n for s in parts for n in s.strings)),
            tuple(dict.fromkeys(n for s in parts for n in s.arrays)),
            tuple(dict.fromkeys(n for s in parts for n in s.objects)),
        )
        return self._bounded(found)

    def _bounded(self, found: Sum) -> Sum:
        self.budget.spend(1 + len(found.numbers) // 8 + len(found.strings) + len(found.arrays) + len(found.objects))
        if max(len(found.strings), len(found.arrays), len(found.objects)) > MAX_ALTERNATIVES:
            refuse(f"the schema has more than {MAX_ALTERNATIVES} alternatives in one place. Simplify it.")
        return found

    def meet(self, a: Sum, b: Sum) -> Sum:
        """What both admit."""
        if a is b or b is WHOLE:
            return a
        if a is WHOLE:
            return b
        size = len(a.numbers) * len(b.numbers) // 2 + len(a.strings) * len(b.strings)
        self.budget.spend(size + 4 * (len(a.arrays) * len(b.arrays) + len(a.objects) * len(b.objects)))
        return self._bounded(
            Sum(
                a.null and b.null,
                a.flags & b.flags,
                _products(meet_numbers, a.numbers, b.numbers),
                _products(meet_strings, a.strings, b.strings),
                _products(self.meet_arrays, a.arrays, b.arrays),
                _products(self.meet_objects, a.objects, b.objects),
            )
        )

    def meet_arrays(self, a: Array, b: Array) -> Array | None:
        """What both admit; None if that is certainly nothing."""
        if a == WHOLE.arrays[0]:
            return b
        if b == WHOLE.arrays[0]:
            return a
        size = max(len(a.prefix), len(b.prefix))
        self.budget.spend(size)
        prefix = tuple(both(item_at(a, i), item_at(b, i)) for i in range(size))
        highs = [h for h in (a.hi, b.hi) if h is not None]
        return tidy_array(
            Array(
                prefix,
                both(a.rest, b.rest),
                max(a.lo, b.lo),
                min(highs) if highs else None,
                a.some | b.some,
                a.unique or b.unique,
                a.repeats or b.repeats,
            )
        )

    def meet_objects(self, a: Object, b: Object) -> Object | None:
        """What both admit; None if that is certainly nothing."""
        if a == WHOLE.objects[0]:
            return b
        if b == WHOLE.objects[0]:
            return a
        names = dict.fromkeys([n for n, _ in a.props] + [n for n, _ in b.props])
        self.budget.spend(len(names))
        mine, yours = dict(a.props), dict(b.props)
        props = tuple((n, both(value_of(a, n, mine), value_of(b, n, yours))) for n in names)
        highs = [h for h in (a.hi, b.hi) if h is not None]
        return tidy_object(
            Object(
                props,
                _meet_patterns(a, b),
                both(a.extra, b.extra),
                a.required | b.required,
                max(a.lo, b.lo),
                min(highs) if highs else None,
                a.names | b.names,
                a.some | b.some,
            )
        )

    # ------------------------------------------------------------ complement

    def outside(self, a: Sum, path: Path) -> Sum:
        """What `a` does not admit; `path` names the keyword that needs it."""
        if a is WHOLE:
            return NEVER
        found = Sum(not a.null, BOOLEANS - a.flags, WHOLE.numbers, WHOLE.strings, WHOLE.arrays, WHOLE.objects)
        for number in a.numbers:
            pieces = [p for n in outside_number(number) if (p := tidy_number(n)) is not None]
            found = self.meet(found, replace(WHOLE, numbers=tuple(pieces)))
        for string in a.strings:
            outer = outside_string(string)
            if outer is None:
                refuse_keyword(path, "it would have to exclude a format")
            kept = [s for o in outer if (s := tidy_string(o)) is not None]
            found = self.meet(found, replace(WHOLE, strings=tuple(kept)))
        for array in a.arrays:
            found = self.meet(found, replace(WHOLE, arrays=tuple(_outside_array(array, path))))
        for item in a.objects:
            found = self.meet(found, replace(WHOLE, objects=tuple(_outside_object(item, path))))
        return found

    # ------------------------------------------------------------ emptiness

    def empty(self, node: Node, depth: int = 5) -> bool:
        """Is it certain that nothing is admitted? (False may mean: not known.)"""
        if depth == 0:
            return False
        self.budget.spend()
        try:
            found = self.force(node)
        except ParameterError:  # it is refused where it is needed, if at all
            return False
        if found.null or found.flags or found.numbers or found.strings:
            return False
        return all(self._no_array(a, depth) for a in found.arrays) and all(
            self._no_object(o, depth) for o in found.objects
        )

    def _no_array(self, a: Array, depth: int) -> bool:
        places = range(min(a.lo, len(a.prefix) + 1))
        if any(self.empty(item_at(a, i), depth - 1) for i in places):
            return True
        fixed = a.hi is not None and a.hi <= len(a.prefix)
        some = [held for held in a.some if held.lo]
        return any(
            fixed and all(self.empty(both(p, h.node), depth - 1) for p in a.prefix[h.first : a.hi]) for h in some
        )

    def _no_object(self, o: Object, depth: int) -> bool:
        known = dict(o.props)
        if any(self.empty(value_of(o, n, known), depth - 1) for n in o.required):
            return True
        return any(
            all(self.empty(both(known[n], beside.node), depth - 1) for n in able)
            for beside in o.some
            if (able := able_names(o, beside)) is not None
        )


def _products(meet: Callable, left: tuple, right: tuple) -> tuple:
    found = (meet(a, b) for a, b in product(left, right))
    return tuple(dict.fromkeys(shape for shape in found if shape is not None))


def item_at(a: Array, i: int) -> Node:
    """What the i-th item must be in."""
    return a.prefix[i] if i < len(a.prefix) else a.rest


def value_of(o: Object, name: str, known: dict[str, Node] | None = None) -> Node:
    """What the value under this name must be in."""
    found = (dict(o.props) if known is None else known).get(name)
    if found is not None:
        return found
    found = ANY
    hit = False
    for pattern, node in o.patterns:
        if matches(pattern, name):
            found, hit = both(found, node), True
    return found if hit else o.extra


def tidy_array(a: Array) -> Array | None:
    """A canonical form; None if it is certainly empty."""
    lo, hi, rest, prefix = a.lo, a.hi, a.rest, a.prefix
    some = {held for held in a.some if (held.lo or held.hi is not None) and held.node != NEVER}
    for held in a.some:
        if (held.hi is not None and held.hi < held.lo) or (held.lo and held.node == NEVER):
            return None
        lo = max(lo, held.first + held.lo) if held.lo else lo
        if held.node == ANY:
            some.discard(held)
            most = None if held.hi is None else held.first + held.hi
            hi = most if hi is None else hi if most is None else min(hi, most)
    first = next((i for i, p in enumerate(prefix) if p == NEVER), None)
    if first is not None:
        prefix, rest = prefix[:first], NEVER
    if rest == NEVER and (hi is None or hi > len(prefix)):
        hi = len(prefix)
    if hi is not None and hi <= len(prefix):
        prefix, rest = prefix[:hi], NEVER
    if (hi is not None and hi < lo) or (a.repeats and (a.unique or (hi is not None and hi < 2))):
        return None
    while prefix and prefix[-1] == rest:
        prefix = prefix[:-1]
    return Array(prefix, rest, lo, hi, frozenset(some), a.unique, a.repeats)


def able_names(o: Object, beside: Beside) -> list[str] | None:
    """The listed names that can be what `beside` asks for; None: others can be, too."""
    if o.patterns or o.extra != NEVER:
        return None
    return [n for n, v in o.props if n not in beside.names and v != NEVER]


def tidy_object(o: Object) -> Object | None:
    """A canonical form; None if it is certainly empty."""
    if any(beside.node == NEVER or able_names(o, beside) == [] for beside in o.some):
        return None
    known = dict(o.props)
    if any(value_of(o, name, known) == NEVER for name in o.required):
        return None
    if o.hi is not None and (o.hi < o.lo or o.hi < len(o.required)):
        return None
    lo = 0 if o.lo <= len(o.required) else o.lo
    return replace(o, lo=lo)


def _meet_patterns(a: Object, b: Object) -> tuple[tuple[str, Node], ...]:
    """The pattern properties of both. A name that matches no pattern of one side falls under that side's `extra`."""
    mine, yours = dict(a.patterns), dict(b.patterns)
    found: dict[str, Node] = {}
    for pattern in [*mine, *yours]:
        # Patterns of both sides are checked to be disjoint when the grammar is made.
        left, right = mine.get(pattern, a.extra), yours.get(pattern, b.extra)
        found[pattern] = both(left, right)
    return tuple(found.items())


def _outside_array(a: Array, path: Path) -> list[Array]:
    found: list[Array | None] = []
    for i, node in enumerate(a.prefix):
        if node != ANY:
            found.append(Array((*[ANY] * i, non(node, path)), ANY, i + 1))
    if a.rest not in (ANY, NEVER):
        found.append(Array(rest=ANY, some=frozenset((Held(non(a.rest, path), first=len(a.prefix)),))))
    if a.lo:
        found.append(Array(rest=ANY, hi=a.lo - 1))
    if a.hi is not None:
        found.append(Array(rest=ANY, lo=a.hi + 1))
    for held in a.some:
        if held.lo == 1:
            found.append(Array((ANY,) * held.first, non(held.node, path)))
        elif held.lo:
            found.append(Array(rest=ANY, some=frozenset((replace(held, lo=0, hi=held.lo - 1),))))
        if held.hi is not None:
            found.append(Array(rest=ANY, some=frozenset((replace(held, lo=held.hi + 1, hi=None),))))
    if a.unique:
        found.append(Array(rest=ANY, repeats=True, lo=2))
    if a.repeats:
        found.append(Array(rest=ANY, unique=True))
    return [t for f in found if f is not None and (t := tidy_array(f)) is not None]


def _outside_object(o: Object, path: Path) -> list[Object]:
    if o.patterns or o.names:
        refuse_keyword(path, "it would have to exclude objects by patterns of their names")
    found: list[Object] = []
    if o.extra == NEVER and not o.props:
        found.append(Object(extra=ANY, lo=1))
    elif o.extra != ANY:
        listed = frozenset(name for name, _ in o.props)
        found.append(Object(extra=ANY, some=frozenset((Beside(listed, non(o.extra, path)),))))
    for beside in o.some:
        found.append(Object(tuple((n, ANY) for n in sorted(beside.names)), extra=non(beside.node, path)))
    for name, node in o.props:
        if node != ANY:
            found.append(Object(((name, non(node, path)),), extra=ANY, required=frozenset((name,))))
    found += [Object(((name, NEVER),), extra=ANY) for name in sorted(o.required)]
    if o.lo:
        found.append(Object(extra=ANY, hi=o.lo - 1))
    if o.hi is not None:
        found.append(Object(extra=ANY, lo=o.hi + 1))
    return [t for f in found if (t := tidy_object(f)) is not None]
