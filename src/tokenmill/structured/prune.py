"""Branches of a plain schema that no finite value fits. Owns: finding them and removing them.

The grammar engine refuses a whole schema because of one definition that is false, and never ends on a definition that
always needs itself. Must not know: how people write schemas, how plain ones are made (`emit` does).
"""

from __future__ import annotations

from typing import Any

from tokenmill.structured.settled import settled

Plain = dict[str, Any]


def prune(document: Plain) -> Plain | None:
    """A schema for the same values without dead branches; None: no value fits."""
    defs: dict[str, Any] = document.get("$defs", {})
    alive = settled(defs, _lives)
    root = {k: v for k, v in document.items() if k != "$defs"}
    if not _lives(root, alive):
        return None
    kept = {name: _cut(schema, alive) for name, schema in defs.items() if name in alive}
    return {**_cut(root, alive), "$defs": kept} if kept else _cut(root, alive)


def _lives(schema: Any, alive: set[str]) -> bool:
    """Does some value fit that needs only the definitions in `alive`?"""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return _name(schema) in alive
    if "anyOf" in schema:
        return any(_lives(option, alive) for option in schema["anyOf"])
    if schema.get("type") == "object":
        return all(_lives(schema["properties"][name], alive) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        first = schema.get("prefixItems", [])
        items = [*first, schema.get("items", True)][: schema.get("minItems", 0)]
        return all(_lives(item, alive) for item in items)
    return True


def _cut(schema: Any, alive: set[str]) -> Any:
    """A schema without its dead parts; False where nothing is left."""
    if isinstance(schema, bool) or not _lives(schema, alive):
        return schema is True
    made = dict(schema)
    if "anyOf" in made:
        options = [_cut(option, alive) for option in made["anyOf"] if _lives(option, alive)]
        return options[0] if len(made) == 1 and len(options) == 1 else {**made, "anyOf": options}
    for keyword in ("properties", "patternProperties"):
        if keyword in made:
            made[keyword] = {name: _cut(value, alive) for name, value in made[keyword].items()}
    for keyword in ("additionalProperties", "items"):
        if keyword in made:
            made[keyword] = _cut(made[keyword], alive)
    if "prefixItems" in made:
        made["prefixItems"] = [_cut(item, alive) for item in made["prefixItems"]]
    return made


def _name(schema: Plain) -> str:
    name: str = schema["$ref"].removeprefix("#/$defs/")
    return name
