"""Where references of a schema document point. Owns: its resources ($id), their anchors, and resolving a reference.

A document may bundle several resources; each has a base of its own. Nothing outside of the document is read. Must not
know: what schemas mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

from tokenmill.structured.algebra import refuse_keyword
from tokenmill.structured.dialects import EVERY, Dialect, named
from tokenmill.structured.shapes import Path

_ONE = ("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties", "contentSchema")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_ANCHORS = ("$anchor", "$dynamicAnchor")
Place = tuple[Path, dict[str, Any], Path, Dialect]
DYNAMIC = ("$dynamicRef", "$recursiveRef")


@dataclass(slots=True)
class References:
    """The index of one document."""

    document: Any
    bases: dict[Path, str] = field(default_factory=dict)
    """The base of each resource, by the place of its root."""
    roots: dict[str, Path | None] = field(default_factory=dict)
    anchors: dict[tuple[Path, str], Path | None] = field(default_factory=dict)
    """By resource and name. None, here and in `roots`: two places have the same name."""

    unclear: bool = False
    """Does an $id stand beside a $ref, which older drafts ignore and newer ones do not?"""

    def __post_init__(self) -> None:
        for path, schema, resource, dialect in self._schemas((), self.document, (), EVERY):
            given = schema.get("$id") if dialect.knows("$id") else None
            if given is None and (not path or dialect.draft == 4) and dialect.knows("id"):
                given = schema.get("id")
            name = given.rstrip("#") if isinstance(given, str) else ""
            if path and name and "$ref" in schema and (dialect == EVERY or dialect.ref_hides):
                self.unclear = self.unclear or dialect == EVERY
                name = ""
            if not path or (name and not name.startswith("#")):
                base = self._joined(self.bases[resource], name) if path else name.partition("#")[0]
                self.bases[path], resource = base, path
                self.roots[base] = None if base in self.roots else path
            named_here = [k for k in _ANCHORS if dialect.knows(k) and isinstance(schema.get(k), str)]
            names = {schema[keyword] for keyword in named_here}
            for anchor in names | ({name[1:]} if name.startswith("#") else set()):
                self.anchors[resource, anchor] = None if (resource, anchor) in self.anchors else path

    def _schemas(self, path: Path, schema: Any, resource: Path, around: Dialect) -> Iterator[Place]:
        """Every subschema with the resource around it and its draft; children come after their parents."""
        if not isinstance(schema, dict):
            return
        dialect = named(schema, around, path)
        yield path, schema, resource, dialect
        resource = path if path in self.bases else resource
        for keyword in _ONE:
            yield from self._schemas((*path, keyword), schema.get(keyword), resource, dialect)
        for keyword in _LISTS:
            if isinstance(schema.get(keyword), list):
                for i, part in enumerate(schema[keyword]):
                    yield from self._schemas((*path, keyword, str(i)), part, resource, dialect)
        for keyword in _MAPS:
            if isinstance(schema.get(keyword), dict):
                for name, part in schema[keyword].items():
                    yield from self._schemas((*path, keyword, name), part, resource, dialect)

    def resolve(self, target: str, path: Path) -> Path:
        """The place that the reference at `path` names."""
        if path[-1] in DYNAMIC and len(self.bases) > 1:
            refuse_keyword(path, "dynamic references are not followed between several resources ($id)")
        if self.unclear:
            refuse_keyword(path, "what an $id beside a $ref means depends on the draft: name it in $schema")
        mine = next(path[:size] for size in range(len(path), -1, -1) if path[:size] in self.bases)
        base, _, fragment = target.partition("#")
        root: Path | None = mine
        if base and (root := self.roots.get(self._joined(self.bases[mine], base))) is None:
            refuse_keyword(path, "only references within the schema are followed (#/..., an $id or an anchor in it)")
        assert root is not None
        if fragment and not fragment.startswith("/"):
            found = self.anchors.get((root, unquote(fragment)))
            if found is None:
                refuse_keyword(path, f"there is no anchor, or more than one, of the name {unquote(fragment)!r} there")
            return found
        steps = fragment.split("/")[1:]
        return (*root, *(unquote(step).replace("~1", "/").replace("~0", "~") for step in steps))

    def _joined(self, base: str, target: str) -> str:
        """A reference made absolute; schemes that urljoin does not know have no paths to join."""
        return urljoin(base, target).partition("#")[0]
