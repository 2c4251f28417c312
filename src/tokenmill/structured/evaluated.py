"""unevaluatedProperties and unevaluatedItems: what other keywords of the same place leave open. Owns: cases, each a set
with the names and items that were evaluated in it.

A keyword such as anyOf evaluates what those of its schemas evaluate that fit, so a place has one case for each way to
fit. A case with more evaluated names admits more, and so a case that adds none to another's is left out. Must not know:
how sets are worked out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tokenmill.structured.algebra import Algebra, pointer, tidy_array, tidy_object
from tokenmill.structured.dialects import Dialect
from tokenmill.structured.limits import refuse
from tokenmill.structured.shapes import ANY, NEVER, WHOLE, Array, At, Node, Object, Path, Sum

MAX_CASES = 200


class Reader(Protocol):
    """Reads a document; see SchemaReader."""

    algebra: Algebra

    def at(self, path: Path) -> Any:
        """The subschema at `path`."""
        ...

    def dialect(self, path: Path) -> Dialect:
        """The draft that the place is written in."""
        ...

    def typed(self, schema: dict[str, Any], path: Path) -> Sum:
        """What its keywords about values of one type admit."""
        ...

    def parts(self, given: Any, path: Path) -> list[Node]:
        """The schemas of a list."""
        ...

    def child(self, path: Path) -> Node:
        """A subschema as a node."""
        ...

    def target(self, target: Any, path: Path) -> Path:
        """Where a reference points."""
        ...

    def pattern(self, given: Any, path: Path) -> str:
        """A pattern of names for whole names."""
        ...

    def dependencies(self, given: Any, path: Path) -> Sum:
        """What names ask for."""
        ...


InPlace = Mapping[str, Callable[[Any, Any, Path], Sum]]
"""How each keyword that holds beside the others is read."""


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """What has been evaluated: these names, names of these patterns, or all; the first so many items, those that fit
    one of `some`, or all."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    every_name: bool = False
    items: int = 0
    some: frozenset[Node] = frozenset()
    every_item: bool = False

    def __or__(self, other: SeenKeys) -> SeenKeys:
        return SeenKeys(
            self.names | other.names,
            self.patterns | other.patterns,
            self.every_name or other.every_name,
            max(self.items, other.items),
            self.some | other.some,
            self.every_item or other.every_item,
        )


NOTHING = SeenKeys()
Case = tuple[Sum, SeenKeys]


@dataclass(slots=True)
class Evaluated:
    """The cases of one document's places."""

    reader: Reader
    in_place: InPlace
    busy: set[Path] = field(default_factory=set)

    def cases(self, path: Path) -> list[Case]:
        """Every way to fit the schema at `path`."""
        schema = self.reader.at(path)
        if isinstance(schema, bool):
            return [(WHOLE, NOTHING)] if schema else []
        if path in self.busy:
            refuse(f"the reference at {pointer(path)} leads back to itself without end")
        self.busy.add(path)
        try:
            found = [(self.reader.typed(schema, path), self._own(schema, path))]
            for keyword, read in self.in_place.items():
                if keyword in schema:
                    own = _BY_KEYWORD.get(keyword)
                    given, place = schema[keyword], (*path, keyword)
                    more = [(read(self.reader, given, place), NOTHING)] if own is None else own(self, given, place)
                    found = self._all([found, more])
        finally:
            self.busy.discard(path)
        return [self._closed(case, schema, path) for case in found]

    def _all(self, parts: Iterable[list[Case]]) -> list[Case]:
        """One case of each."""
        found: list[Case] = [(WHOLE, NOTHING)]
        for part in parts:
            found = [both for one in found for other in part if (both := self._both(one, other)) is not None]
            self._bounded(found)
        return found

    def _both(self, one: Case, other: Case) -> Case | None:
        met = self.reader.algebra.meet(one[0], other[0])
        return None if met == NEVER else (met, one[1] | other[1])

    def _of(self, node: Node) -> list[Case]:
        """Of a subschema as a node."""
        return (
            self.cases(node.path) if isinstance(node, At) and node != ANY else [(WHOLE, NOTHING)] if node == ANY else []
        )

    def _bounded(self, found: list[Case]) -> None:
        if len(found) > MAX_CASES:
            refuse(f"what is unevaluated has more than {MAX_CASES} cases in one place. Simplify the schema.")

    # ------------------------------------------------------------ by keyword

    def _ref(self, given: Any, path: Path) -> list[Case]:
        return self.cases(self.reader.target(given, path))

    def _all_of(self, given: Any, path: Path) -> list[Case]:
        return self._all(map(self._of, self.reader.parts(given, path)))

    def _any_of(self, given: Any, path: Path) -> list[Case]:
        """Each schema alone, and those together that have seen more than each of them."""
        algebra, found = self.reader.algebra, list[Case]()
        for part in self.reader.parts(given, path):
            for case in self._of(part):
                joined = [
                    both
                    for one in found
                    if (one[1] | case[1]) not in (one[1], case[1])
                    if (both := self._both(one, case)) is not None and not algebra.empty(both[0])
                ]
                found += [case, *joined]
                self._bounded(found)
        return found

    def _one_of(self, given: Any, path: Path) -> list[Case]:
        algebra, found = self.reader.algebra, list[Case]()
        options = self.reader.parts(given, path)
        for i, option in enumerate(options):
            for one, seen in self._of(option):
                for j, other in enumerate(options):
                    if i != j and not algebra.empty(algebra.meet(one, algebra.force(other))):
                        one = algebra.meet(one, algebra.outside(algebra.force(other), path))
                found.append((one, seen))
        self._bounded(found)
        return found

    def _if(self, given: Any, path: Path) -> list[Case]:
        place = path[:-1]
        schema, met = self.reader.at(place), self.cases(path)
        if "then" not in schema and "else" not in schema:
            return [(WHOLE, NOTHING), *met]  # whoever fits has seen more
        algebra = self.reader.algebra
        unmet: list[Case] = [(algebra.outside(algebra.force(At(path)), path), NOTHING)]
        if "then" in schema:
            met = self._all([met, self.cases((*place, "then"))])
        if "else" in schema:
            unmet = self._all([unmet, self.cases((*place, "else"))])
        return [*met, *unmet]

    def _dependencies(self, given: Any, path: Path) -> list[Case]:
        found: list[list[Case]] = []
        names = (
            {name: then for name, then in given.items() if isinstance(then, list)} if isinstance(given, dict) else given
        )
        found.append([(self.reader.dependencies(names, path), NOTHING)])
        for name, then in given.items():
            if isinstance(then, list):
                continue
            absent = replace(WHOLE, objects=(Object(((name, NEVER),), extra=ANY),))
            there = replace(NEVER, objects=(Object(extra=ANY, required=frozenset((name,))),))
            found.append([(absent, NOTHING), *self._all([[(there, NOTHING)], self.cases((*path, name))])])
        return self._all(found)

    # ------------------------------------------------------------ what is seen, and what is left

    def _own(self, schema: dict[str, Any], path: Path) -> SeenKeys:
        """What a place's own keywords evaluate; they are checked by now."""
        listed = isinstance(schema.get("items"), list)
        by_pattern = (*path, "patternProperties")
        counted = "contains" in schema and self.reader.dialect(path).contains_evaluates
        return SeenKeys(
            frozenset(schema.get("properties", {})),
            frozenset(self.reader.pattern(p, (*by_pattern, p)) for p in schema.get("patternProperties", {})),
            "additionalProperties" in schema,
            len(schema.get("items" if listed else "prefixItems", [])),
            frozenset((At((*path, "contains")),) if counted else ()),
            ("additionalItems" if listed else "items") in schema,
        )

    def _closed(self, case: Case, schema: dict[str, Any], path: Path) -> Case:
        """The case with what its place says of all that has not been evaluated."""
        algebra, (found, seen) = self.reader.algebra, case
        if "unevaluatedProperties" in schema:
            if not seen.every_name:
                names = tuple((name, ANY) for name in sorted(seen.names))
                patterns = tuple((pattern, ANY) for pattern in sorted(seen.patterns))
                other = self.reader.child((*path, "unevaluatedProperties"))
                held = tidy_object(Object(names, patterns, other))
                found = algebra.meet(found, replace(WHOLE, objects=() if held is None else (held,)))
            seen = replace(seen, every_name=True)
        if "unevaluatedItems" in schema:
            if not seen.every_item:
                other = self.reader.child((*path, "unevaluatedItems"))
                if seen.some and other != ANY:
                    nodes = [*seen.some, *([] if other == NEVER else [other])]
                    other = nodes[0] if len(nodes) == 1 else algebra.union(map(algebra.force, nodes))
                row = tidy_array(Array((ANY,) * seen.items, other))
                found = algebra.meet(found, replace(WHOLE, arrays=() if row is None else (row,)))
            seen = replace(seen, every_item=True)
        return found, seen


_BY_KEYWORD: dict[str, Callable[[Evaluated, Any, Path], list[Case]]] = {
    "$ref": Evaluated._ref,
    "$dynamicRef": Evaluated._ref,
    "$recursiveRef": Evaluated._ref,
    "allOf": Evaluated._all_of,
    "anyOf": Evaluated._any_of,
    "oneOf": Evaluated._one_of,
    "if": Evaluated._if,
    "dependencies": Evaluated._dependencies,
    "dependentSchemas": Evaluated._dependencies,
}
