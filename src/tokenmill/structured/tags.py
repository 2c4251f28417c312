"""Structural tags: text that is free in some places and must follow a form in others. Owns: the tree of formats, and
its grammar.

The tree is the one that xgrammar, vLLM and SGLang take under `structural_tag.format`. A control token in a literal is a
token if `special_tokens` names it: ordinary text never becomes one. Must not know: message formats, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tokenmill.structured import regex
from tokenmill.structured.limits import MAX_DEPTH, MAX_LITERAL, refuse

MAX_NODES = 4096
Embed = Callable[[Any], str]


class TagGrammar:
    """Writes one tree as rules. `embed` writes a JSON schema as a part of a grammar."""

    def __init__(self, embed: Embed, tokens: Any) -> None:
        self.embed = embed
        self.rules: list[str] = []
        self.depth = 0
        if not isinstance(tokens, dict) or not all(
            isinstance(k, str) and k and isinstance(v, int) and not isinstance(v, bool) and v >= 0
            for k, v in tokens.items()
        ):
            refuse("structural_tag: special_tokens must map texts to token ids.")
        self.tokens: dict[str, int] = dict(sorted(tokens.items(), key=lambda item: -len(item[0])))

    def document(self, root: Any) -> str:
        """The whole grammar's text."""
        start = self.node(root)
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, "TEXT: /(?s:.*)/", ""])

    def node(self, given: Any) -> str:
        """One part of the tree, as it stands in a rule."""
        if not isinstance(given, dict) or not isinstance(given.get("type"), str):
            _refuse('each format must be an object with a "type"')
        self.depth += 1
        if self.depth > MAX_DEPTH or len(self.rules) > MAX_NODES:
            _refuse("it is too deep or too large")
        write = _WRITERS.get(given["type"])
        if write is None:
            _refuse(f"the type {given['type']!r} is not supported; there are {', '.join(sorted(_WRITERS))}")
        try:
            return write(self, given)
        finally:
            self.depth -= 1

    def rule(self, body: str, options: str = "") -> str:
        """A rule of its own; -> its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def literal(self, text: Any) -> str:
        """A fixed text, control tokens as tokens; nothing for an empty one."""
        if not isinstance(text, str) or len(text) > MAX_LITERAL:
            _refuse(f"literals must be strings of at most {MAX_LITERAL} characters")
        for token, number in self.tokens.items():
            before, found, after = text.partition(token)
            if found:
                return " ".join(p for p in (self.literal(before), f"<[{number}]>", self.literal(after)) if p)
        return f"/{regex.literal(text)}/" if text else ""

    def until(self, text: Any) -> str:
        """Anything up to and including a text."""
        rest = self.literal(text)
        if not rest:
            return "TEXT"
        if rest.startswith("<["):
            return f"TEXT {rest}"
        head, *tail = rest.split(" <[", 1)
        return " ".join([self.rule(f"TEXT {head}", "[lazy]"), *("<[" + t for t in tail)])


def _refuse(why: str) -> NoReturn:
    refuse(f"structural_tag: {why}.")


def _list(given: dict[str, Any], name: str) -> list[Any]:
    found = given.get(name)
    if not isinstance(found, list) or not found:
        _refuse(f"{name} must be a list of at least one entry")
    return found


def _const(writer: TagGrammar, given: dict[str, Any]) -> str:
    return writer.literal(given.get("value")) or '""'


def _token(writer: TagGrammar, given: dict[str, Any]) -> str:
    token = given.get("token")
    number = writer.tokens.get(token) if isinstance(token, str) else token
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        _refuse("token must be a token id, or a text that special_tokens names")
    return f"<[{number}]>"


def _json(writer: TagGrammar, given: dict[str, Any]) -> str:
    return writer.rule(f"%json {writer.embed(given.get('json_schema', True))}")


def _regex(writer: TagGrammar, given: dict[str, Any]) -> str:
    pattern = given.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        _refuse("pattern must be a regular expression")
    try:
        return f"/{regex.whole(pattern)}/"
    except regex.RegexError as error:
        _refuse(f"pattern: {error}")


def _text(writer: TagGrammar, given: dict[str, Any]) -> str:
    excludes = given.get("excludes") or []
    if not isinstance(excludes, list) or not all(isinstance(e, str) and e for e in excludes):
        _refuse("excludes must be a list of strings")
    if not excludes:
        return "TEXT"
    number = len(writer.rules)
    literals = "|".join(regex.literal(e) for e in excludes)
    writer.rules.append(f"FREE_{number}: TEXT & ~/(?s:.*)({literals})(?s:.*)/")
    return f"FREE_{number}"


def _sequence(writer: TagGrammar, given: dict[str, Any]) -> str:
    return "(" + " ".join(writer.node(part) for part in _list(given, "elements")) + ")"


def _or(writer: TagGrammar, given: dict[str, Any]) -> str:
    return "(" + " | ".join(writer.node(part) for part in _list(given, "elements")) + ")"


def _repeated(mark: str) -> Callable[[TagGrammar, dict[str, Any]], str]:
    def write(writer: TagGrammar, given: dict[str, Any]) -> str:
        return f"({writer.node(given.get('content'))}){mark}"

    return write


def _tag(writer: TagGrammar, given: dict[str, Any], skip: str = "") -> str:
    begin, end = given.get("begin"), given.get("end", "")
    ends = end if isinstance(end, list) else [end]
    if not isinstance(begin, str) or not ends:
        _refuse("each tag needs begin, content and end")
    content = given.get("content")
    head = writer.literal(begin[len(skip) :])
    if isinstance(content, dict) and content.get("type") == "any_text" and not content.get("excludes"):
        bodies = [writer.until(e) for e in ends]
    else:
        middle = writer.node(content)
        bodies = [" ".join(p for p in (middle, writer.literal(e)) if p) for e in ends]
    return " ".join(p for p in (head, "(" + " | ".join(bodies) + ")") if p)


def _triggered(writer: TagGrammar, given: dict[str, Any]) -> str:
    """Free text in which each trigger begins one of the tags."""
    tags, triggers = _list(given, "tags"), _list(given, "triggers")
    if not all(isinstance(t, str) and t for t in triggers):
        _refuse("triggers must be strings")
    by_trigger: dict[str, list[str]] = {t: [] for t in triggers}
    for a in by_trigger:
        if any(a != b and a in b for b in by_trigger):
            _refuse(f"the trigger {a!r} is part of another one")
    for tag in tags:
        begin = tag.get("begin") if isinstance(tag, dict) else None
        trigger = next((t for t in by_trigger if isinstance(begin, str) and begin.startswith(t)), None)
        if trigger is None:
            _refuse(f"no trigger begins {begin!r}")
        by_trigger[trigger].append(writer.rule(_tag(writer, tag, trigger) or '""'))
    spans = [writer.rule(f"{writer.until(t)} ({' | '.join(bodies)})") for t, bodies in by_trigger.items() if bodies]
    some = " | ".join(spans)
    if given.get("stop_after_first"):
        return f"({some})" if given.get("at_least_one") else f"(({some}) | TEXT)"
    return f"({some}){'+' if given.get('at_least_one') else '*'} TEXT"


def _separated(writer: TagGrammar, given: dict[str, Any]) -> str:
    """Tags with a fixed text between them and nothing else."""
    some = writer.rule(" | ".join(f"({_tag(writer, tag)})" for tag in _list(given, "tags")))
    between = writer.literal(given.get("separator", ""))
    found = some if given.get("stop_after_first") else f"{some} ({between} {some})*"  # the separator may be empty
    return f"({found})" if given.get("at_least_one") else f"({found})?"


_WRITERS: dict[str, Callable[..., str]] = {
    "const_string": _const,
    "token": _token,
    "json_schema": _json,
    "regex": _regex,
    "any_text": _text,
    "sequence": _sequence,
    "or": _or,
    "optional": _repeated("?"),
    "star": _repeated("*"),
    "plus": _repeated("+"),
    "tag": _tag,
    "triggered_tags": _triggered,
    "tags_with_separator": _separated,
}
