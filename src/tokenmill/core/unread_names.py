"""The names in a body before a schema reads it. Owns: refusing names, also those that need another one, renaming other
spellings, and finding unknown names.

It walks over the objects once before they are validated; the cost is that of the names. Must not know: HTTP, any one
API.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.errors import ParameterError
from tokenmill.core.object_rules import ObjectRules

MOST_TOLD = 16
"""Most unknown names that are reported. A body may hold many more."""
MOST_CHARS = 64
_ODD = re.compile(r"[^\x21-\x7e]|[,]")
_WORD = re.compile(r"[^\W\d]\w*")
_NO_LIMIT = {"n_predict": (-1, -2)}


@dataclass(slots=True)
class Unknown:
    """Names that no schema has, in the order of the body, each with what was probably meant; and names that stand for
    others."""

    names: dict[str, str | None] = field(default_factory=dict)
    more: bool = False
    spelled: dict[str, str] = field(default_factory=dict)
    """Fields that came under another spelling, with that spelling."""

    def add(self, path: str, name: str, rules: ObjectRules) -> None:
        """Add a name, if there is room."""
        if path + name in self.names or (shown := header_text(path + name)) in self.names:
            return
        self.tell(shown, lambda: _hint(name, rules))

    def tell(self, shown: str, hint: Callable[[], str | None] = lambda: None) -> None:
        """Add a name in the form in which it is reported."""
        if len(self.names) == MOST_TOLD:
            self.more = True
        else:
            self.names[shown] = hint()


def header_text(name: str) -> str:
    """A name as a header may carry it: short, and of printable ASCII."""
    shown = _ODD.sub("?", name[:MOST_CHARS])
    return shown + "..." if len(name) > MOST_CHARS else shown


def judge_names(raw: MutableMapping[str, Any], rules: ObjectRules, unknown: Unknown, path: str = "") -> None:
    """Refuse the names on the list of refused ones, rename other spellings to the field's name, and collect unknown
    names. A field that is null counts as absent."""
    if rules.validated:
        for name in [name for name, value in raw.items() if value is None and name in rules.fields]:
            del raw[name]
    for name in [name for name in raw if name not in rules.fields]:
        if name in rules.aliases:
            _move(raw, name, rules.aliases[name], path)
            unknown.spelled[path + rules.aliases[name]] = path + name
        elif (refusal := rules.refused.get(name)) is not None:
            if refusal.asks(raw[name]):
                text = f"{path}{name} is not supported in this version: {refusal.why}."
                raise ParameterError(text, param=f"{path}{name}")
        elif name not in rules.harmless and not unknown.more:
            unknown.add(path, name, rules)
    for name, companion in rules.companions.items():
        if name in raw and (lack := companion.lacking(raw[name], raw)) is not None:
            raise ParameterError(f"{path}{name} has no effect {lack}.", param=f"{path}{name}")
    for name, under in rules.inside.items():
        value = raw.get(name)
        if isinstance(value, dict):
            judge_names(value, under, unknown, f"{path}{name}.")
        elif isinstance(value, list):
            for part in value:
                if isinstance(part, dict):
                    judge_names(part, under, unknown, f"{path}{name}.")


def look_in_template(kwargs: Mapping[str, Any], template: Any, unknown: Unknown) -> None:
    """Collect arguments for a chat template that the template never reads."""
    text = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else template
    if not isinstance(text, str) or not text:
        return
    words = set(_WORD.findall(text))
    for name, value in kwargs.items():
        if value is not None and name not in words and not unknown.more:
            unknown.tell(header_text(f"chat_template_kwargs.{name}"))


def _move(raw: MutableMapping[str, Any], name: str, field_name: str, path: str) -> None:
    value = raw.pop(name)
    if value in _NO_LIMIT.get(name, ()) and not isinstance(value, bool):
        value = None
    elif value is None:
        return
    if raw.get(field_name) is not None and raw[field_name] != value:
        raise ParameterError(f"Give {path}{field_name} or {path}{name}, not both.", param=f"{path}{name}")
    raw[field_name] = value


def _hint(name: str, rules: ObjectRules) -> str | None:
    """The field that was probably meant."""
    known = sorted(rules.fields | rules.aliases.keys())
    bare = _bare(name[:MOST_CHARS])
    for each in known:
        if _bare(each) == bare:
            return each
    close = difflib.get_close_matches(name[:MOST_CHARS], known, n=1, cutoff=0.8)
    return close[0] if close else None


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def refuse_unknown(unknown: Unknown) -> None:
    """For --strict-fields: the first unknown name is an error."""
    for name, hint in unknown.names.items():
        more = f" Did you mean {hint}?" if hint is not None else ""
        raise ParameterError(f"{name} is not a field of this request.{more}", param=name)
