"""Structural tags: text that is free in some places and must follow a form in others. Owns: the tree of formats, and
its grammar.

The tree is the one that xgrammar, vLLM and SGLang take under `structural_tag.format`. A control token in a literal is a
token if `special_tokens` names it: ordinary text never becomes one. The engine's lexer takes the longest text that a
lexeme matches and never goes back. So neighbours that are regular become one lexeme, which ends as soon as it can
where a fixed text ends it and more follows. Must not know: message formats, requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NoReturn

from tokenmill.core.errors import ParameterError, shown
from tokenmill.structured import regex
from tokenmill.structured.compiled_grammar import UNFORCED
from tokenmill.structured.limits import MAX_COUNT, MAX_DEPTH, MAX_LITERAL, PARAM, refuse

MAX_NODES = 4096
Embed = Callable[[Any], str]


Kind = Literal["fixed", "bounded", "choice", "endless", "free", "token", "rule"]
_SHORT = ("fixed", "bounded", "choice")
_ONE_BYTE = re.compile(r"/([0-9A-Za-z]|\\x[0-7][0-9a-f])/")


@dataclass(frozen=True, slots=True)
class RulePart:
    """A part of a rule. All but tokens and rules are regular and can be parts of one lexeme: "fixed" is one text,
    "bounded" and "endless" are expressions, "choice" is made of short ones that can be lexemes as well, "free" is any
    text until what follows it."""

    text: str
    kind: Kind


Parts = list[RulePart]


class TagGrammar:
    """Writes one tree as rules. `embed` writes a JSON schema as a part of a grammar."""

    def __init__(self, embed: Embed, tokens: Any) -> None:
        self.embed = embed
        self.rules: list[str] = []
        self.depth = 0
        self.forcing = True
        if not isinstance(tokens, dict) or not all(
            isinstance(k, str) and k and isinstance(v, int) and not isinstance(v, bool) and v >= 0
            for k, v in tokens.items()
        ):
            refuse("structural_tag: special_tokens must map texts to token ids.")
        self.tokens: dict[str, int] = dict(sorted(tokens.items(), key=lambda item: -len(item[0])))

    def document(self, root: Any) -> str:
        """The whole grammar's text."""
        start = self.row(self.parts(root, True), True)
        head = "%llguidance {}" if self.forcing else UNFORCED
        return "\n".join([head, f"start: {start}", *self.rules, "TEXT: /(?s:.*)/", ""])

    def parts(self, given: Any, last: bool) -> Parts:
        """One node of the tree. last: nothing can follow it."""
        kind = given.get("type") if isinstance(given, dict) else None
        if not isinstance(kind, str):
            _refuse('each format must be an object with a "type"')
        self.depth += 1
        if self.depth > MAX_DEPTH or len(self.rules) > MAX_NODES:
            _refuse("it is too deep or too large")
        write, fields = _WRITERS.get(kind, (None, ()))
        if write is None:
            _refuse(f"the type {kind!r} is not supported; there are {', '.join(sorted(_WRITERS))}")
        check_fields(given, ("type", *fields), f"the type {kind!r}")
        try:
            return write(self, given, last)
        finally:
            self.depth -= 1

    def rule(self, body: str, options: str = "") -> str:
        """A rule of its own; -> its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """A terminal of its own; -> its name."""
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def literal(self, text: Any) -> Parts:
        """A fixed text, control tokens as tokens; nothing for an empty one."""
        if not isinstance(text, str) or len(text) > MAX_LITERAL:
            _refuse(f"literals must be strings of at most {MAX_LITERAL} characters")
        for token, number in self.tokens.items():
            before, found, after = text.partition(token)
            if found:
                return [*self.literal(before), RulePart(f"<[{number}]>", "token"), *self.literal(after)]
        return [RulePart(f"/{regex.literal(text)}/", "fixed")] if text else []

    def free(self, given: dict[str, Any]) -> RulePart:
        """Any text, without those that `excludes` lists."""
        excluded = _excluded(given)
        return RulePart(self.terminal(f"TEXT & {excluded}") if excluded else "TEXT", "free")

    def row(self, parts: Parts, last: bool) -> str:
        """Parts one after the other, as they stand in a rule."""
        written: list[str] = []
        run: Parts = []
        for part in [*parts, RulePart("", "token" if last else "rule")]:
            if part.kind not in ("token", "rule"):
                run.append(part)
                continue
            written += self._lexemes(run, part.kind == "token")
            written += [part.text] if part.text else []
            run = []
        return " ".join(written) or '""'

    def _lexemes(self, run: Parts, ends: bool) -> list[str]:
        """Regular neighbours. ends: nothing, or a token, follows them."""
        written: list[str] = []
        at = 0  # what stands before it is written
        for i, part in enumerate(run):
            if part.kind == "choice" and not ends:
                written += [*self._lexeme(run[at:i], False), part.text]
                at = i + 1
            elif part.kind == "free" and run[i + 1 : i + 2] and run[i + 1].kind == "fixed":
                end = next((j for j in range(i + 1, len(run)) if run[j].kind != "fixed"), len(run))
                written += [*self._lexeme(run[at:i], False), self._until(run[i:end])]
                at = end
        return written + self._lexeme(run[at:], ends)

    def _lexeme(self, run: Parts, ends: bool) -> list[str]:
        if not run:
            return []
        if not ends and any(p.kind == "free" for p in run):
            _refuse("what follows any_text must be a fixed text or a control token, which ends it")
        endless = any(p.kind == "endless" for p in run)
        if endless and not ends and run[-1].kind == "fixed":
            return [self._until(run)]
        self.forcing = self.forcing and (ends or not endless)
        if len(run) == 1 and not (ends and run[0].kind == "choice"):
            return [run[0].text]
        return [self.terminal(" ".join(p.text for p in run))]

    def _until(self, run: Parts) -> str:
        """Parts until the fixed text behind them. If that is one byte and may come at once, it is a lexeme of its own:
        directly behind a lexeme that could have gone on, the engine overlooks that such a lazy one has ended."""
        body = " ".join(p.text for p in run)
        at_once = "".join(_ONE_BYTE.findall(run[-1].text)) if all(map(_may_be_empty, run[:-1])) else ""
        if not at_once:
            return self.rule(body, "[lazy]")
        later = self.terminal(f"({body}) & /[^{at_once}](?s:.*)/")
        return f"({self.rule(f'/[{at_once}]/', '[lazy]')} | {self.rule(later, '[lazy]')})"


def check_fields(given: dict[str, Any], known: tuple[str, ...], what: str) -> None:
    """Refuse fields that have no effect."""
    unknown = sorted(str(name) for name, value in given.items() if name not in known and value is not None)
    if unknown:
        _refuse(f"{what} has no field {unknown[0]!r}; it has {', '.join(known)}")


def _refuse(why: str) -> NoReturn:
    refuse(f"structural_tag: {why}.")


def _list(given: dict[str, Any], name: str) -> list[Any]:
    found = given.get(name)
    if not isinstance(found, list) or not found:
        _refuse(f"{name} must be a list of at least one entry")
    return found


def _switch(given: dict[str, Any], name: str) -> bool:
    found = given.get(name)
    if found is not None and not isinstance(found, bool):
        _refuse(f"{name} must be true or false")
    return bool(found)


def _excluded(given: dict[str, Any]) -> str:
    """A terminal for all texts that hold none of `excludes`; nothing if there are none."""
    excludes = given.get("excludes") or []
    if not isinstance(excludes, list) or not all(isinstance(e, str) and 0 < len(e) <= MAX_LITERAL for e in excludes):
        _refuse("excludes must be a list of strings")
    return f"~/(?s:.*)({'|'.join(map(regex.literal, excludes))})(?s:.*)/" if excludes else ""


def _const(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    return writer.literal(given.get("value"))


def _token(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    token = given.get("token")
    number = writer.tokens.get(token) if isinstance(token, str) else token
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        _refuse("token must be a token id, or a text that special_tokens names")
    return [RulePart(f"<[{number}]>", "token")]


def _json(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    if given.get("style", "json") != "json":
        _refuse(f"the style {given['style']!r} is not supported; there is 'json'")
    title = given.get("title")
    if title is not None and not isinstance(title, str):
        _refuse("title must be a string")
    try:
        schema = writer.embed(given.get("json_schema", True))
    except ParameterError as error:
        if title is None:
            raise
        refuse(f"{shown(title)}: {str(error).removeprefix(f'{PARAM}: ')}")
    return [RulePart(writer.rule(f"%json {schema}"), "rule")]


def _regex(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    pattern = given.get("pattern")
    if not isinstance(pattern, str) or not pattern:
        _refuse("pattern must be a regular expression")
    try:
        found = regex.whole(pattern)
    except regex.RegexError as error:
        _refuse(f"pattern: {error}")
    kind: Literal["bounded", "endless"] = "endless" if regex.width(found)[1] is None else "bounded"
    excluded = _excluded(given)
    return [RulePart(writer.terminal(f"/{found}/ & {excluded}") if excluded else f"/{found}/", kind)]


def _text(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    return [writer.free(given)]


def _sequence(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    elements = _list(given, "elements")
    return [p for i, e in enumerate(elements) for p in writer.parts(e, last and i == len(elements) - 1)]


def _or(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    return _choice(writer, [writer.parts(e, last) for e in _list(given, "elements")], last)


def _choice(writer: TagGrammar, options: list[Parts], last: bool) -> Parts:
    if len(options) == 1:
        return options[0]
    kind = _kind(list(chain.from_iterable(options)))
    texts = [" ".join(p.text for p in o) or '""' if kind == "endless" else writer.row(o, last) for o in options]
    return [RulePart(f"({' | '.join(texts)})", kind)]


def _may_be_empty(part: RulePart) -> bool:
    if part.kind == "free":
        return True
    return part.kind in ("bounded", "endless") and part.text[:1] == "/" and regex.width(part.text[1:-1])[0] == 0


def _kind(parts: Parts) -> Kind:
    """What parts make together."""
    if all(p.kind in _SHORT for p in parts):
        return "choice"
    return "endless" if all(p.kind in (*_SHORT, "endless") for p in parts) else "rule"


def _repeated(low: int, high: int | None) -> Callable[..., Parts]:
    mark = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((low, high)) or f"{{{low},{'' if high is None else high}}}"

    def write(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
        inner = writer.parts(given.get("content"), last and high == 1)
        if not inner:
            return []
        kind = _kind(inner)
        text = " ".join(p.text for p in inner) if kind == "endless" else writer.row(inner, last and high == 1)
        return [RulePart(f"({text}){mark}", kind)]

    return write


def _repeat(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    low, high = given.get("min", 0), given.get("max", -1)
    if not all(isinstance(n, int) and not isinstance(n, bool) and -1 <= n <= MAX_COUNT for n in (low, high)) or low < 0:
        _refuse(f"min and max must be integers from 0 to {MAX_COUNT}, max -1 where there is no end")
    if 0 <= high < low or high == 0:
        _refuse("max must be at least 1 and not below min")
    return _repeated(low, None if high < 0 else high)(writer, given, last)


def _tag(writer: TagGrammar, given: dict[str, Any], last: bool, skip: str = "") -> Parts:
    begin, end = given.get("begin"), given.get("end", "")
    ends = end if isinstance(end, list) else [end]
    if not isinstance(begin, str):
        _refuse("each tag needs begin, a text (a token can stand before it in a sequence)")
    if not ends:
        _refuse("each tag needs an end; it may be empty")
    closings = [writer.literal(e) for e in ends]
    head = writer.literal(begin[len(skip) :])
    content = writer.parts(given.get("content"), last and not any(closings))
    if len(closings) == 1:
        return [*head, *content, *closings[0]]
    if all(len(c) == 1 and c[0].kind == "fixed" for c in closings):
        return [*head, *content, RulePart("(" + " | ".join(c[0].text for c in closings) + ")", "fixed")]
    return [*head, *_choice(writer, [[*content, *closing] for closing in closings], last)]


def _checked_tag(writer: TagGrammar, tag: Any, last: bool, skip: str = "") -> Parts:
    if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
        _refuse('tags must be objects of the type "tag"')
    check_fields(tag, ("type", "begin", "content", "end"), "the type 'tag'")
    return _tag(writer, tag, last, skip)


def _triggered(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    """Free text in which each trigger begins one of the tags."""
    tags, triggers = _list(given, "tags"), _list(given, "triggers")
    if not all(isinstance(t, str) and t for t in triggers):
        _refuse("triggers must be strings")
    by_trigger: dict[str, list[str]] = {t: [] for t in triggers}
    for a in by_trigger:
        if any(a != b and a in b for b in by_trigger):
            _refuse(f"the trigger {a!r} is part of another one")
    once, some_must = _switch(given, "stop_after_first"), _switch(given, "at_least_one")
    for tag in tags:
        begin = tag.get("begin") if isinstance(tag, dict) else None
        trigger = next((t for t in by_trigger if isinstance(begin, str) and begin.startswith(t)), None)
        if trigger is None:
            _refuse(f"no trigger begins {begin!r}")
        ends = last and once
        by_trigger[trigger].append(writer.rule(writer.row(_checked_tag(writer, tag, ends, trigger), ends)))
    text = writer.free(given)
    spans = [
        writer.rule(f"{writer.row([text, *writer.literal(t)], False)} ({' | '.join(bodies)})")
        for t, bodies in by_trigger.items()
        if bodies
    ]
    some = " | ".join(spans)
    begun = [RulePart(f"({some})", "rule")]
    if once and some_must:
        return begun
    used = [t for t, bodies in by_trigger.items() if bodies]
    untriggered = writer.free({"excludes": [*(given.get("excludes") or []), *used]})
    if once:
        return _choice(writer, [begun, [untriggered]], last)
    return [RulePart(f"({some}){'+' if some_must else '*'}", "rule"), untriggered]


def _separated(writer: TagGrammar, given: dict[str, Any], last: bool) -> Parts:
    """Tags with a fixed text between them and nothing else."""
    once = _switch(given, "stop_after_first")
    ends = last and once
    options = [_checked_tag(writer, tag, ends) for tag in _list(given, "tags")]
    between = writer.literal(given.get("separator", ""))  # it may be empty
    kind: Kind = "choice" if _kind(list(chain(between, *options))) == "choice" else "rule"
    name = writer.terminal if kind == "choice" else writer.rule
    some = name(" | ".join(f"({writer.row(o, ends)})" for o in options))
    led = name(" | ".join(f"({writer.row([*between, *o], False)})" for o in options))
    found = some if once else f"{some} {led}*"
    return [RulePart(f"({found})" if _switch(given, "at_least_one") else f"({found})?", kind)]


_WRITERS: dict[str, tuple[Callable[..., Parts], tuple[str, ...]]] = {
    "const_string": (_const, ("value",)),
    "token": (_token, ("token",)),
    "json_schema": (_json, ("json_schema", "style", "title")),
    "regex": (_regex, ("pattern", "excludes")),
    "any_text": (_text, ("excludes",)),
    "sequence": (_sequence, ("elements",)),
    "or": (_or, ("elements",)),
    "optional": (_repeated(0, 1), ("content",)),
    "star": (_repeated(0, None), ("content",)),
    "plus": (_repeated(1, None), ("content",)),
    "repeat": (_repeat, ("content", "min", "max")),
    "tag": (_tag, ("begin", "content", "end")),
    "triggered_tags": (_triggered, ("triggers", "tags", "at_least_one", "stop_after_first", "excludes")),
    "tags_with_separator": (_separated, ("tags", "separator", "at_least_one", "stop_after_first")),
}
