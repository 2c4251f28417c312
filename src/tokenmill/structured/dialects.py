"""What the drafts of JSON Schema do not share. Owns: which draft a `$schema` names, and what a schema says in it.

A document that names no draft, or one of its own, is read as all drafts together: a keyword means what the drafts that
know it mean. Must not know: what keywords admit, where references point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenmill.structured.algebra import pointer, refuse_keyword
from tokenmill.structured.limits import refuse
from tokenmill.structured.shapes import Path

_NAMED = re.compile(r"^https?://json-schema\.org/draft(?:-0([0-9])|/(2019-09|2020-12))/")
_NUMBERS = {"4": 4, "5": 4, "6": 6, "7": 7, "2019-09": 2019, "2020-12": 2020}  # draft 5 changed no keyword
_LAST = 9999
# The first and the last draft of each keyword that not all of them have. All keep `dependencies`: newer drafts leave it
# to whoever reads them.
_KNOWN = {
    **dict.fromkeys(("const", "contains", "propertyNames", "$id"), (6, _LAST)),
    **dict.fromkeys(("if", "then", "else", "contentEncoding", "contentMediaType"), (7, _LAST)),
    **dict.fromkeys(("minContains", "maxContains", "dependentRequired", "dependentSchemas"), (2019, _LAST)),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$anchor"), (2019, _LAST)),
    **dict.fromkeys(("prefixItems", "$dynamicRef", "$dynamicAnchor"), (2020, _LAST)),
    "$recursiveRef": (2019, 2019),
    "additionalItems": (4, 2019),
    "id": (4, 4),
}
_BORDERS = ("exclusiveMinimum", "exclusiveMaximum")


@dataclass(frozen=True, slots=True)
class Dialect:
    """One draft, or all of them together."""

    draft: int | None = None

    @property
    def ref_hides(self) -> bool:
        """Do keywords beside a `$ref` say nothing?"""
        return self.draft is not None and self.draft <= 7

    @property
    def contains_evaluates(self) -> bool:
        """Has `contains` seen the items that fit it, for unevaluatedItems?"""
        return self.draft != 2019

    def knows(self, keyword: str) -> bool:
        """Does the keyword mean something?"""
        first, last = _KNOWN.get(keyword, (0, _LAST))
        return self.draft is None or first <= self.draft <= last

    def reads(self, schema: dict[str, Any], path: Path) -> dict[str, Any]:
        """A schema without what says nothing in this draft; a value that only other drafts read is refused."""
        if self.draft is None:
            return schema
        if self.ref_hides and "$ref" in schema:
            return {"$ref": schema["$ref"]}
        if self.draft == 2020 and isinstance(schema.get("items"), list):
            refuse_keyword((*path, "items"), "$schema names draft 2020-12, in which a list of schemas is prefixItems")
        for border in _BORDERS:
            if border in schema and isinstance(schema[border], bool) is not (self.draft == 4):
                wanted = "true or false, as in the draft" if self.draft == 4 else "a number, as in the draft"
                refuse(f"{pointer((*path, border))} must be {wanted} that $schema names.")
        return {keyword: value for keyword, value in schema.items() if self.knows(keyword)}


EVERY = Dialect()


def named(schema: Any, around: Dialect, path: Path) -> Dialect:
    """The draft of a schema that lies in a document of the draft `around`."""
    if not isinstance(schema, dict) or not isinstance(schema.get("$schema"), str):
        return around
    found = _NAMED.match(schema["$schema"])
    if found is None:
        return EVERY
    number = found[1] or found[2]
    if number not in _NUMBERS:
        refuse_keyword((*path, "$schema"), "drafts 4 to 2020-12 are read")
    return Dialect(_NUMBERS[number])
