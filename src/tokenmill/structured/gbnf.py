"""GBNF, llama.cpp's grammars. Owns: reading them into rules, with an error that names what cannot be read.

Must not know: the grammar engine (`lexemes` writes rules for it), tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from tokenmill.structured.classes import EVERY, LAST, Ranges, complement, normalise
from tokenmill.structured.limits import MAX_DEPTH, MAX_REPEAT, refuse
from tokenmill.structured.regex import Alt, Chars, Item, Rep, Seq
from tokenmill.structured.settled import settled

_BLANK = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DEFINES = re.compile(r"[A-Za-z0-9_-]+(?:\s|#[^\n]*)*::=")
_COUNTS = re.compile(r"\{\s*(\d{1,9})\s*(,?)\s*(\d{0,9})\s*\}")
_TOKEN = re.compile(r"<(?:\[\d{1,9}\]|[^<>\s\[\]]+)>")
_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN = {"t": 9, "n": 10, "r": 13, "\\": 92, '"': 34, "[": 91, "]": 93}


@dataclass(frozen=True, slots=True)
class Ref:
    """What the rule of this name matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the model, as `<[7]>` or `<name>`."""

    text: str


Node = Item | Ref | Token
Rules = dict[str, Alt]


def read_gbnf(text: str) -> Rules:
    """Every rule that `root` needs, by name; refuses what is no GBNF, and a grammar that no text fits."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        _refuse("there is no rule `root ::=`")
    for alt in rules.values():
        for name in refers_to(alt):
            if name not in rules:
                _refuse(f"the rule {name[:100]!r} is not there")
    alive = settled(rules, _ends)
    if "root" not in alive:
        _refuse("no text fits it: its rules need each other without end")
    kept = {name: _cut(alt, alive) for name, alt in rules.items() if name in alive}
    needed, queue = {"root"}, ["root"]
    while queue:
        new = refers_to(kept[queue.pop()]) - needed
        needed |= new
        queue += new
    return {name: alt for name, alt in kept.items() if name in needed}


def refers_to(node: Node | Seq) -> set[str]:
    """The names of the rules in a node."""
    if isinstance(node, Ref):
        return {node.name}
    if isinstance(node, Rep):
        return refers_to(node.item)
    parts = node.options if isinstance(node, Alt) else node.items if isinstance(node, Seq) else ()
    return {name for part in parts for name in refers_to(part)}


def _ends(node: Node | Seq, alive: set[str]) -> bool:
    if isinstance(node, Ref):
        return node.name in alive
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Rep):
        return node.low == 0 or _ends(node.item, alive)
    if isinstance(node, Alt):
        return any(_ends(o, alive) for o in node.options)
    return not isinstance(node, Seq) or all(_ends(i, alive) for i in node.items)


def _cut(node: Alt, alive: set[str]) -> Alt:
    """A node without its parts that never end."""

    def cut(item: Node) -> Node:
        if isinstance(item, Alt):
            return _cut(item, alive)
        if isinstance(item, Rep):
            return Rep(cut(item.item), item.low, item.high) if _ends(item.item, alive) else Alt((Seq(()),))  # type: ignore[arg-type]
        return item

    kept = [Seq(tuple(cut(i) for i in o.items)) for o in node.options if _ends(o, alive)]  # type: ignore[misc]
    return Alt(tuple(kept))


def _refuse(why: str) -> NoReturn:
    refuse(f"grammar: {why}.")


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def rules(self) -> Rules:
        found: Rules = {}
        self._blank()
        while self.at < len(self.text):
            name = self._match(_NAME)
            if name is None or not _DEFINES.match(self.text, self.at - len(name[0])):
                self._fail("a rule `name ::=` must stand")
            if name[0] in found:
                _refuse(f"the rule {name[0][:100]!r} is there twice")
            self._blank()
            self.at += 3
            found[name[0]] = self._alt()
        return found

    def _fail(self, what: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        _refuse(f"{what} in line {line}, where {self.text[self.at : self.at + 20]!r} stands")

    def _blank(self) -> None:
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _alt(self) -> Alt:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            _refuse("it is nested too deeply")
        options = [self._seq()]
        while self._peek() == "|":
            self.at += 1
            options.append(self._seq())
        self.depth -= 1
        return Alt(tuple(options))

    def _seq(self) -> Seq:
        items: list[Node] = []
        self._blank()
        while self._peek() not in ("", "|", ")") and not _DEFINES.match(self.text, self.at):
            item = self._item()
            self._blank()
            while (counts := self._quantifier()) is not None:
                item = _repeated(item, *counts)
                self._blank()
            items.append(item)
        return Seq(tuple(items))  # type: ignore[arg-type]

    def _item(self) -> Node:
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return Chars(self._class())
        if char == "(":
            self.at += 1
            found = self._alt()
            if self._peek() != ")":
                self._fail("a ) must stand")
            self.at += 1
            return found
        if char == ".":
            self.at += 1
            return Chars(EVERY)
        if (name := self._match(_NAME)) is not None:
            return Ref(name[0])
        if (token := self._match(_TOKEN)) is not None:
            return Token(token[0])
        self._fail("a text, a class, a group or the name of a rule must stand")

    def _literal(self) -> Alt:
        self.at += 1
        chars: list[Item] = []
        while self._peek() != '"':
            code = self._char()
            chars.append(Chars(((code, code),)))
        self.at += 1
        return Alt((Seq(tuple(chars)),))

    def _class(self) -> Ranges:
        self.at += 1
        negative = self._peek() == "^"
        self.at += negative
        found: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = high = self._char()
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self._char()
                if high < low:
                    self._fail("a range in [] runs backwards")
            found.append((low, high))
        self.at += 1
        ranges = normalise(tuple(found))
        return complement(ranges) if negative else ranges

    def _char(self) -> int:
        char = self._peek()
        if not char:
            self._fail('a " or ] must stand')
        self.at += 1
        if char != "\\":
            return ord(char)
        kind = self._peek()
        self.at += 1
        if kind in _PLAIN:
            return _PLAIN[kind]
        digits = self.text[self.at : self.at + _HEX.get(kind, 0)]
        if not digits or len(digits) < _HEX[kind] or not re.fullmatch("[0-9a-fA-F]+", digits):
            self.at -= 2
            self._fail(
                "there is no such escape: \\t, \\n, \\r, \\x, \\u, \\U and those of quotes, brackets and \\ are known"
            )
        self.at += len(digits)
        code = int(digits, 16)
        if code > LAST or 0xD800 <= code < 0xE000:
            _refuse(f"\\{kind}{digits} is not a character")
        return code

    def _quantifier(self) -> tuple[int, int | None] | None:
        sign = self._peek()
        if sign and sign in "*+?":
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        if sign != "{":
            return None
        found = self._match(_COUNTS)
        if found is None or (found[3] and not found[2]):
            self._fail("{n}, {n,} or {n,m} must stand")
        low = int(found[1])
        high = low if not found[2] else int(found[3]) if found[3] else None
        if (high is not None and high < low) or max(low, high or 0) > MAX_REPEAT:
            _refuse(f"{found[0]} counts backwards or beyond {MAX_REPEAT}")
        return low, high


def _repeated(item: Node, low: int, high: int | None) -> Node:
    """A repetition; what may be absent is a choice around what is there once at least."""
    if high == 0:
        return Alt((Seq(()),))
    if (low, high) == (0, 1) or low > 0:
        return Rep(item, low, high)  # type: ignore[arg-type]
    return Rep(Alt((Seq((Rep(item, 1, high),)),)), 0, 1)  # type: ignore[arg-type]
