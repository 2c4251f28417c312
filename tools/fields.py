"""docs/fields.md: what becomes of every name that a client may send, written from the server's own lists.

`python tools/fields.py` writes the file; a test compares it. Owns: how the page looks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenmill.core.object_rules import Companion, ObjectRules, Refusal
from tokenmill.server.inputs.harmless import GENERATING as GENERATING_HARMLESS
from tokenmill.server.inputs.headers import (
    DONE_HEADERS,
    HARMLESS_HEADERS,
    HARMLESS_QUERIES,
    QUERIES,
    REFUSED_QUERIES,
    TOLD_HEADERS,
)
from tokenmill.server.inputs.refused import GENERATING as GENERATING_REFUSED
from tokenmill.server.inputs.schema_names import schema_name
from tokenmill.server.request_rules import ENDPOINTS, make_request_rules

PAGE = Path(__file__).resolve().parent.parent / "docs" / "fields.md"
HEAD = """# Every field of every API

This page is written by `tools/fields.py` from the lists that the server itself uses (`server/inputs/`). A name in a
request is

- **done**: it has an effect, which a test shows;
- **another spelling** of a field that is done;
- **harmless**: taken without an effect, because none is missing;
- **refused** with a 400 that names it and says why, unless its value asks for nothing (null, false, empty, or what is
  given in brackets: values that change nothing, and the default of the API that the name comes from, which its clients
  write into every request and which is not applied);
- or unknown: then it is counted (`tokenmill:ignored_fields`) and named in the answer's header `X-Tokenmill-Ignored`,
  with `X-Tokenmill-Did-You-Mean` where a field is spelled almost so. `--strict-fields` refuses it instead.
"""
FOREIGN = "it belongs "
"""How reasons begin that come from another API's fields: they are told in one sentence."""
TEXT = """Fields that one API reads are refused by the others (`stop_sequences` in `/api/chat`, `num_ctx` in
`/v1/completions`), with the place where they belong; nothing that a client believes in is lost in silence."""


def page() -> str:
    """The whole page."""
    rules = make_request_rules()
    paths: dict[str, list[str]] = defaultdict(list)
    for path, schemas in ENDPOINTS.items():
        for schema in schemas:
            paths[schema_name(schema)].append(path)
    text = [HEAD, "## Wherever text is asked for", TEXT, ""]
    text += _lists({}, GENERATING_HARMLESS, GENERATING_REFUSED)
    for name in sorted(rules, key=lambda name: name not in paths):
        where = ", ".join(f"`{path}`" for path in paths.get(name, ()))
        text.append(f"## {name}\n{where}\n" if where else f"## {name}")
        text += _rules(rules[name])
    return "\n".join([*text, *_around()]).rstrip() + "\n"


def _rules(rules: ObjectRules) -> Iterable[str]:
    if rules.done:
        yield f"**Done**: {_names(rules.done)}\n"
    for words, allowed in (("Refused where they have no effect", False), ("Harmless where they have no effect", True)):
        found = sorted((name, each) for name, each in rules.companions.items() if each.harmless == allowed)
        if found:
            yield f"**{words}**: {', '.join(f'`{name}` ({_needed(each)})' for name, each in found)}\n"
    asks = GENERATING_REFUSED.keys() <= rules.refused.keys()
    harmless = {name: why for name, why in rules.harmless.items() if not (asks and name in GENERATING_HARMLESS)}
    refused = {
        name: refusal
        for name, refusal in rules.refused.items()
        if not refusal.why.startswith(FOREIGN) and not (asks and GENERATING_REFUSED.get(name) == refusal)
    }
    yield from _lists(rules.aliases, harmless, refused)
    if asks:
        yield "And what holds wherever text is asked for.\n"


def _needed(companion: Companion) -> str:
    kinds = ", ".join(f"`{value}`" for value in companion.void if value)
    return f"with the {companion.other} {kinds}" if kinds else f"without `{companion.other}`"


def _lists(aliases: Mapping[str, str], harmless: Mapping[str, str], refused: Mapping[str, Refusal]) -> Iterable[str]:
    if aliases:
        spelled = ", ".join(f"`{name}` = `{field}`" for name, field in sorted(aliases.items()))
        yield f"**Other spellings**: {spelled}\n"
    if harmless:
        yield f"**Harmless**\n\n{_reasons(harmless)}"
    if refused:
        shown = defaultdict(list)
        for name, refusal in sorted(refused.items()):
            neutral = ", ".join(_value(value) for value in refusal.neutral)
            shown[refusal.why].append(f"`{name}`" + (f" ({neutral})" if neutral else ""))
        lines = [f"- {why}: {', '.join(names)}" for why, names in sorted(shown.items())]
        yield "**Refused**\n\n" + "\n".join(lines) + "\n"


def _around() -> Iterable[str]:
    yield "## Headers\n"
    yield f"**Done**\n\n{_reasons(DONE_HEADERS)}"
    yield f"**Harmless**\n\n{_reasons(HARMLESS_HEADERS)}"
    yield f"**Named in `X-Tokenmill-Ignored`**\n\n{_reasons(TOLD_HEADERS)}"
    yield "## Query parameters\n"
    for path, names in QUERIES.items():
        yield f"- done at `{path}`: {_names(names)}"
    for name, why in HARMLESS_QUERIES.items():
        yield f"- harmless: `{name}`: {why}"
    for (path, name), (why, neutral) in REFUSED_QUERIES.items():
        yield f"- refused at `{path}`: `{name}`{f' ({neutral})' if neutral else ''}: {why}"


def _value(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _reasons(reasons: Mapping[str, str]) -> str:
    found = defaultdict(list)
    for name, why in reasons.items():
        found[why].append(name)
    return "\n".join(f"- {why}: {_names(names)}" for why, names in found.items()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {len(page().splitlines())} lines\n")
