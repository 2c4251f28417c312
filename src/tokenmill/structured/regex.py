"""Regular expressions as JSON Schema means them. Owns: parsing the ECMA-262 syntax and writing it again in a form that
Python's `re` and the grammar engine read alike: matched against the whole text, no anchors, every class spelled out.

Must not know: schemas, tokens. What is not regular (look-around, back-references, word borders) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from tokenmill.structured.classes import EVERY, LAST, NEWLINE, Ranges, complement, named, normalise
from tokenmill.structured.limits import MAX_REPEAT

ANY = "(?s:.)"
UNSAID: Ranges = ((0, 7), (11, 11), (14, 31), (127, 127))
"""Characters that JSON strings hold only as hexadecimal escapes, which are never said."""
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
MAX_SIZE = 200_000
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_BEYOND = re.compile(r"\\U([0-9a-f]{8})")


class RegexError(ValueError):
    """The expression cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Edge:
    """`^` (start) or `$`."""

    start: bool


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    options: tuple[Seq, ...]


@dataclass(frozen=True, slots=True)
class Rep:
    """`low` to `high` times (None: without end)."""

    item: Chars | Alt
    low: int
    high: int | None


Item = Chars | Edge | Alt | Rep


def search(pattern: str) -> str:
    """The texts in which `pattern` occurs, as a portable expression for the whole text of a JSON string."""
    found = _sayable(_Parser(pattern).parse())
    if found is None:
        raise RegexError("it needs characters that JSON spells as \\uXXXX alone, which are never said")
    assert isinstance(found, Alt)
    return _write_alt(found, True, True)


def whole(pattern: str) -> str:
    """The texts that `pattern` matches from end to end."""
    return _write_alt(_Parser(pattern).parse(), False, False)


def literal(text: str) -> str:
    """An expression for exactly this text."""
    return "".join(_char(ord(c)) for c in text)


def other_than(values: frozenset[str]) -> str:
    """An expression for every text that is none of `values`."""
    trie: dict[str, dict] = {}
    ends: set[int] = set()
    for value in sorted(values):
        at = trie
        for char in value:
            at = at.setdefault(char, {})
        ends.add(id(at))
    return _outside(trie, ends)


@lru_cache(maxsize=512)
def width(portable: str) -> tuple[int, int | None]:
    """Fewest and most characters of the texts that a written expression matches (None: no end)."""
    return width_of(read(portable))


def read(portable: str) -> Alt:
    """A written expression's parts; there are no anchors among them."""
    known = _BEYOND.sub(lambda found: f"\\u{{{found[1]}}}", portable.replace(ANY, r"[\s\S]"))
    return _Parser(known).parse()


def width_of(node: Item | Seq) -> tuple[int, int | None]:
    """The same of parts."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Rep):
        low, high = width_of(node.item)
        endless = high is None or (node.high is None and high > 0)
        return low * node.low, None if endless or high is None else high * (node.high or 0)
    if isinstance(node, Alt):
        found = [width_of(o) for o in node.options]
        highs = [h for _, h in found if h is not None]
        return min(low for low, _ in found), max(highs) if len(highs) == len(found) else None
    if isinstance(node, Seq):
        found = [width_of(i) for i in node.items]
        highs = [h for _, h in found if h is not None]
        return sum(low for low, _ in found), sum(highs) if len(highs) == len(found) else None
    return 0, 0


def only_chars(pattern: str, allowed: Ranges) -> bool:
    """Do all texts of `pattern` consist of these characters?"""

    def check(node: Item | Seq) -> bool:
        if isinstance(node, Chars):
            return all(any(a <= low and high <= b for a, b in allowed) for low, high in node.ranges)
        if isinstance(node, Rep):
            return check(node.item)
        if isinstance(node, Alt):
            return all(check(o) for o in node.options)
        return isinstance(node, Edge) or all(check(i) for i in node.items)

    return check(_Parser(pattern).parse())


def sayable(ranges: Ranges) -> Ranges:
    """Those of the characters that a JSON string is let say.

    The grammar engine takes a class that holds all control characters, or all but the line end, for one that holds the
    quote and the backslash as well. No class that is written for it may be such a class."""
    return ranges if ranges == EVERY else complement(normalise((*complement(ranges), *UNSAID)))


def _outside(trie: dict[str, dict], ends: set[int]) -> str:
    """Texts that do not spell a path of the trie to one of its ends."""
    stops = "" if id(trie) in ends else "|"
    if not trie:
        return f"(?:{ANY}+{stops})"
    others = complement(normalise(tuple((ord(c), ord(c)) for c in trie)))
    options = [f"{_class(sayable(others))}{ANY}*"] if sayable(others) else []
    options += [_char(ord(c)) + _outside(child, ends) for c, child in trie.items()]
    return f"(?:{'|'.join(options)}{stops})"


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def parse(self) -> Alt:
        found = self._alt()
        if self.at < len(self.text):
            raise RegexError("a ) without (")
        return found

    def _peek(self, size: int = 1) -> str:
        return self.text[self.at : self.at + size]

    def _take(self) -> str:
        if self.at >= len(self.text):
            raise RegexError("it ends in the middle of an expression")
        self.at += 1
        return self.text[self.at - 1]

    def _alt(self) -> Alt:
        self.depth += 1
        if self.depth > 50:
            raise RegexError("its groups are nested too deeply")
        options = [self._seq()]
        while self._peek() == "|":
            self.at += 1
            options.append(self._seq())
        self.depth -= 1
        return Alt(tuple(options))

    def _seq(self) -> Seq:
        items: list[Item] = []
        while self._peek() not in ("", "|", ")"):
            item = self._atom()
            low, high = self._quantifier()
            if (low, high) == (1, 1):
                items.append(item)
            elif isinstance(item, Edge):
                raise RegexError("an anchor cannot be repeated")
            else:
                items.append(Rep(item, low, high))
        return Seq(tuple(items))

    def _quantifier(self) -> tuple[int, int | None]:
        sign = self._peek()
        if sign in ("*", "+", "?") and sign:
            self.at += 1
            found: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif sign == "{" and (counts := self._counts()) is not None:
            found = counts
        else:
            return 1, 1
        if self._peek() == "?":  # lazy: another match, the same texts
            self.at += 1
        if (self._peek() in ("*", "+", "?") and self._peek()) or self._at_counts():
            raise RegexError("a quantifier follows a quantifier (possessive ones cannot be enforced)")
        return found

    def _at_counts(self) -> bool:
        """Does a count in braces come next? Other braces stand for themselves."""
        return self._peek() == "{" and self._counts() is not None

    def _counts(self) -> tuple[int, int | None] | None:
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at + 1 : end].partition(",")
        if end >= 0 and not low and comma and (not high or _is_count(high)):
            raise RegexError("{,n} means different things to different readers: write {0,n}")
        if end < 0 or not _is_count(low) or (high and not _is_count(high)):
            return None
        self.at = end + 1
        least = int(low)
        most = least if not comma else (int(high) if high else None)
        if most is not None and most < least:
            raise RegexError(f"{{{low},{high}}} counts backwards")
        if max(least, most or 0) > MAX_REPEAT:
            raise RegexError(f"it repeats something more than {MAX_REPEAT} times")
        return least, most

    def _atom(self) -> Chars | Edge | Alt:
        char = self._take()
        if char in "^$":
            return Edge(char == "^")
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._class_body())
        if char == ".":
            return Chars(complement(NEWLINE))
        if char in "*+?":
            raise RegexError(f"{char} repeats nothing")
        if char == "{":
            self.at -= 1
            if self._at_counts():
                raise RegexError("a count in braces repeats nothing")
            self.at += 1
        if char == "\\":
            if (edge := self._peek()) in ("A", "Z", "z") and edge:
                self.at += 1
                return Edge(edge == "A")
            return Chars(self._escape(in_class=False))
        return Chars(((ord(char), ord(char)),))

    def _group(self) -> Alt:
        if self._peek() == "?":
            self.at += 1
            kind = self._take()
            if (kind == "<" and self._peek() not in ("=", "!")) or (kind == "P" and self._peek() == "<"):
                self.at = self._named_group()
            elif kind != ":":
                raise RegexError(self._why_not(kind))
        found = self._alt()
        if self._peek() != ")":
            raise RegexError("a ( without )")
        self.at += 1
        return found

    def _named_group(self) -> int:
        end = self.text.find(">", self.at)
        if end < 0:
            raise RegexError("a group's name has no end")
        return end + 1

    def _why_not(self, kind: str) -> str:
        """What a group is that is none of ours."""
        if kind in "=!<":
            return "look-around is not regular and cannot be enforced"
        if kind == "P":
            return "back-references cannot be enforced"
        what = {">": "atomic groups", "#": "comments", "(": "conditional groups", "|": "branch resets"}
        return f"{what.get(kind, 'inline flags')} cannot be enforced: write the expression without"

    def _class_body(self) -> Ranges:
        negative = self._peek() == "^"
        self.at += negative
        begun = self.at
        if self._peek() == "]" and "]" in self.text[begun + 1 :]:
            raise RegexError(r"a ] that begins a class means different things to different readers: write \]")
        found: list[tuple[int, int]] = []
        while self._peek() != "]":
            if _POSIX.match(self.text, self.at):
                raise RegexError("[:alpha:] and its like mean different things to different readers: spell them out")
            low = self._class_atom(negative)
            if self._peek() == "-" and self._peek(2) not in ("-]", "-"):
                self.at += 1
                high = self._class_atom(negative)
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    raise RegexError("a range in [] must lie between two characters")
                if high[0][0] < low[0][0]:
                    raise RegexError("a range in [] runs backwards")
                found.append((low[0][0], high[0][0]))
            else:
                found += low
        self.at += 1
        inside = self.text[begun : self.at].replace("\\\\", "")
        if any(f"\\{each}" in inside and f"\\{each.upper()}" in inside for each in "dws"):
            found = list(EVERY)  # as [\s\S], the usual spelling of it
        ranges = normalise(tuple(found))
        return complement(ranges) if negative else ranges

    def _class_atom(self, negative: bool) -> Ranges:
        char = self._take()
        return self._escape(in_class=True, wide=negative) if char == "\\" else ((ord(char), ord(char)),)

    def _escape(self, *, in_class: bool, wide: bool = False) -> Ranges:
        char = self._take()
        if (known := named(char, wide)) is not None:
            return known
        if char == "0" and self._peek().isdigit():
            raise RegexError("octal escapes are not portable")
        if char in _CONTROL:
            code = _CONTROL[char]
        elif char == "b" and in_class:
            code = 8
        elif char == "c" and self._peek().isascii() and self._peek().isalpha():
            code = ord(self._take()) % 32
        elif char in "xu":
            code = self._code(char)
        elif char.isascii() and not char.isalnum():
            code = ord(char)
        else:
            kinds = {"b": "word borders", "B": "word borders", "k": "back-references"}
            kinds |= dict.fromkeys("pP", "Unicode properties")
            what = "back-references" if char.isdigit() else kinds.get(char, f"\\{char}")
            raise RegexError(f"{what} cannot be enforced")
        return ((code, code),)

    def _code(self, kind: str) -> int:
        if kind == "u" and self._peek() == "{":
            end = self.text.find("}", self.at)
            digits, self.at = self.text[self.at + 1 : end], (end if end > 0 else len(self.text)) + 1
        else:
            size = 2 if kind == "x" else 4
            digits, self.at = self._peek(size), self.at + size
            digits = digits if len(digits) == size else ""
        if not digits or any(c not in "0123456789abcdefABCDEF" for c in digits) or int(digits, 16) > LAST:
            raise RegexError(f"\\{kind} needs hexadecimal digits")
        code = int(digits, 16)
        if kind == "u" and 0xD800 <= code < 0xDC00 and (low := _LOW_HALF.match(self.text, self.at)):
            self.at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000:
            raise RegexError("half of a surrogate pair is not a character")
        return code


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _sayable(node: Item) -> Item | None:
    """What a JSON string is let say of it; None: nothing."""
    if isinstance(node, Chars):
        ranges = sayable(node.ranges)
        return Chars(ranges) if ranges or not node.ranges else None
    if isinstance(node, Rep):
        item = _sayable(node.item)
        if item is None:
            return None if node.low else Alt((Seq(()),))
        assert isinstance(item, Chars | Alt)
        return Rep(item, node.low, node.high)
    if isinstance(node, Alt):
        options = [tuple(_sayable(i) for i in o.items) for o in node.options]
        kept = tuple(Seq(tuple(i for i in o if i is not None)) for o in options if None not in o)
        return Alt(kept) if kept else None
    return node


def _has_edge(node: Item | Seq, start: bool | None = None) -> bool:
    if isinstance(node, Edge):
        return start is None or node.start is start
    if isinstance(node, Rep):
        return _has_edge(node.item, start)
    if isinstance(node, Alt):
        return any(_has_edge(o, start) for o in node.options)
    return isinstance(node, Seq) and any(_has_edge(i, start) for i in node.items)


def write(parts: Alt) -> str:
    """Parts without anchors as a portable expression."""
    return _write_alt(parts, False, False)


def _write_alt(node: Alt, left: bool, right: bool) -> str:
    """left, right: text may stand before and after what the node matches."""
    text = "(?:" + "|".join(_write_search(o, left, right) for o in node.options) + ")"
    if len(text) > MAX_SIZE:
        raise RegexError("it is too large")
    return text


def _write_search(seq: Seq, left: bool, right: bool) -> str:
    """`seq` is all of the expression, so its ends are where anchors can stand."""
    items = list(seq.items)
    while items and isinstance(items[0], Edge) and items[0].start:
        del items[0]
        left = False
    while items and isinstance(items[-1], Edge) and not items[-1].start:
        del items[-1]
        right = False
    if not any(_has_edge(i) for i in items):
        return (f"{ANY}*" if left else "") + "".join(_write(i) for i in items) + (f"{ANY}*" if right else "")
    for at in (0, len(items) - 1):
        edge = items[at]
        if isinstance(edge, Alt) and _has_edge(edge):
            spread = [Seq((*items[:at], *o.items, *items[at + 1 :])) for o in edge.options]
            return _write_alt(Alt(tuple(spread)), left, right)
    raise RegexError("^ and $ can only be enforced at the edges of an expression")


def _write(node: Item | Seq) -> str:
    if isinstance(node, Chars):
        return _class(node.ranges)
    if isinstance(node, Alt):
        return "(?:" + "|".join(_write(o) for o in node.options) + ")"
    if isinstance(node, Seq):
        return "".join(_write(i) for i in node.items)
    assert isinstance(node, Rep), "anchors have been taken away"
    high = "" if node.high is None else str(node.high)
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    return _write(node.item) + (short or f"{{{node.low},{high}}}")


def _class(ranges: Ranges) -> str:
    if not ranges:
        raise RegexError("it holds a class that no character is in")
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    if ranges == EVERY:
        return ANY
    return "[" + "".join(_char(a) + (f"-{_char(b)}" if b > a else "") for a, b in ranges) + "]"


def _char(code: int) -> str:
    if code < 128 and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
