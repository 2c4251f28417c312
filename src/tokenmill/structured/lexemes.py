"""From rules over characters to the engine's text, for exactly the same texts. Owns: which parts become lexemes.

The engine's lexer takes the longest text that a lexeme matches and never goes back. So parts may be lexemes only if no
text of one of them goes on to another text of any of them. Larger lexemes make masks quick: parts are as large as they
may be, and single characters at the least. Must not know: how people write grammars.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenmill.structured import regex
from tokenmill.structured.classes import Ranges
from tokenmill.structured.gbnf import Node, Ref, Rules, Token, refers_to
from tokenmill.structured.regex import Alt, Chars, Rep, Seq
from tokenmill.structured.settled import settled

ALONE, ALL = (500, 2000), (20_000, 60_000)
"""Most places in lexemes, and places that are reached together: for a part of one rule, for all lexemes."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A lexeme."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class LexemeGroup:
    """Parts with what stands between them and after them; `rule`: they are that rule instead."""

    parts: list[Leaf | LexemeGroup]
    between: str = " "
    mark: str = ""
    rule: str = ""


@dataclass(slots=True)
class _Automaton:
    """Of several lexemes: each state's steps (characters, next state), those that need no character, and its owner."""

    most: int
    steps: list[list[tuple[Ranges, int]]] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)

    def new(self, owner: int) -> int:
        if len(self.steps) >= self.most:
            raise _TooLarge
        self.steps.append([])
        self.free.append([])
        self.owner.append(owner)
        return len(self.steps) - 1


class _TooLarge(Exception):
    """There are more states or pairs than are looked at."""


class Lexemes:
    """Writes one grammar."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.plain = settled(rules, lambda alt, known: not _has_token(alt) and refers_to(alt) <= known)
        """Rules that need no rule of which they are a part, and no token: these are regular."""
        self.widths: dict[str, tuple[int, int | None]] = {}
        self.names: dict[str, str] = {}
        self.plans: dict[str, Leaf | LexemeGroup] = {}
        self.terminals: dict[str, str] = {}

    def regular(self) -> str | None:
        """The whole grammar as one expression, if it is one and not too large."""
        if "root" not in self.plain or self._size(self.rules["root"], {}) > regex.MAX_SIZE // 8:
            return None
        return regex.write(self._spelt(self.rules["root"]))

    def document(self) -> str:
        """The rules in the engine's form."""
        self.plans["root"] = self._plan(self.rules["root"])
        while True:
            leaves = list({leaf.items: None for plan in self.plans.values() for leaf in _leaves(plan)})
            try:
                unsafe = [leaves[i] for i in self._longer(leaves, ALL)]
            except _TooLarge:
                unsafe = [items for items in leaves if not _is_char(items)]
            if not unsafe:
                break
            divided = {items: self._divided(items) for items in unsafe}
            for name, plan in list(self.plans.items()):
                self.plans[name] = _replaced(plan, divided)
        lines = [f"{self._name(name)}: {self._text(plan)}" for name, plan in self.plans.items()]
        return "\n".join(["%llguidance {}", *lines, *(f"{n}: {t}" for t, n in self.terminals.items()), ""])

    # ------------------------------------------------------------ what rules are

    def _is_regular(self, node: Node | Seq) -> bool:
        if isinstance(node, Ref):
            return node.name in self.plain
        return not isinstance(node, Token) and all(map(self._is_regular, _parts(node)))

    def _size(self, node: Node | Seq, known: dict[str, int]) -> int:
        """Items when all rules are spelt out."""
        if isinstance(node, Ref):
            if node.name not in known:
                known[node.name] = self._size(self.rules[node.name], known)
            return known[node.name]
        return 1 + sum(self._size(part, known) for part in _parts(node))

    def _spelt(self, node: Node) -> Alt:
        """A regular node without references."""

        def spell(part: Node) -> Node:
            if isinstance(part, Ref):
                return self._spelt(self.rules[part.name])
            if isinstance(part, Rep):
                return Rep(spell(part.item), part.low, part.high)  # type: ignore[arg-type]
            return self._spelt(part) if isinstance(part, Alt) else part

        options = node.options if isinstance(node, Alt) else (Seq((node,)),)  # type: ignore[arg-type]
        return Alt(tuple(Seq(tuple(spell(i) for i in o.items)) for o in options))  # type: ignore[misc]

    # ------------------------------------------------------------ plans

    def _plan(self, node: Node) -> Leaf | LexemeGroup:
        if self._is_regular(node):
            return self._run((node,))
        if isinstance(node, Alt):
            return LexemeGroup([self._row(o.items) for o in node.options], " | ")
        if isinstance(node, Rep):
            return LexemeGroup([self._plan(node.item)], mark=_mark(node))
        return self._rule(node.name) if isinstance(node, Ref) else LexemeGroup([], rule=node.text)  # type: ignore[union-attr]

    def _rule(self, name: str) -> LexemeGroup:
        if name not in self.plans:
            self.plans[name] = LexemeGroup([])  # it may need itself
            self.plans[name] = self._plan(self.rules[name])
        return LexemeGroup([], rule=self._name(name))

    def _row(self, items: tuple[Node, ...]) -> LexemeGroup:
        parts: list[Leaf | LexemeGroup] = []
        at = 0
        while at < len(items):
            end = next((i for i in range(at, len(items)) if not self._is_regular(items[i])), len(items))
            if end > at:
                parts.append(self._run(items[at:end]))
            if end < len(items):
                parts.append(self._plan(items[end]))
            at = end + 1
        return LexemeGroup(parts)

    def _run(self, items: tuple[Node, ...]) -> Leaf | LexemeGroup:
        """Regular neighbours as lexemes that are as long as they may be, as far as they alone can tell."""
        parts: list[Leaf | LexemeGroup] = []
        at = 0
        while at < len(items):
            end = next((e for e in range(len(items), at, -1) if self._stands_alone(items[at:e])), at)
            parts.append(Leaf(items[at:end]) if end > at else self._divided(items[at : at + 1]))
            at = max(end, at + 1)
        return parts[0] if len(parts) == 1 else LexemeGroup(parts)

    def _stands_alone(self, items: tuple[Node, ...]) -> bool:
        low, high = self._width(Seq(items))  # type: ignore[arg-type]
        if low == high and low:
            return True  # of texts of one length, none goes on to another
        try:
            return not self._longer([items], ALONE)
        except _TooLarge:
            return False

    def _width(self, node: Node | Seq) -> tuple[int, int | None]:
        """Fewest and most characters."""
        if isinstance(node, Ref):
            if node.name not in self.widths:
                self.widths[node.name] = self._width(self.rules[node.name])
            return self.widths[node.name]
        if isinstance(node, Chars | Token):
            return 1, 1
        found = [self._width(part) for part in _parts(node)]
        if isinstance(node, Rep):
            (low, high), most = found[0], node.high
            return low * node.low, None if high is None or most is None else high * most
        lows, highs = [low for low, _ in found], [high for _, high in found if high is not None]
        add_low, add_high = (min, max) if isinstance(node, Alt) else (sum, sum)
        return add_low(lows), add_high(highs) if len(highs) == len(found) else None

    def _divided(self, items: tuple[Node, ...]) -> Leaf | LexemeGroup:
        """The same in smaller parts."""
        if len(items) > 1:
            return LexemeGroup([self._run((item,)) for item in items])
        item = items[0]
        if isinstance(item, Ref):
            return self._rule(item.name)
        if isinstance(item, Alt):
            return LexemeGroup([self._run(tuple(o.items)) for o in item.options], " | ")
        if isinstance(item, Rep):
            return LexemeGroup([self._run((item.item,))], mark=_mark(item))
        return Leaf(items)

    # ------------------------------------------------------------ comparing

    def _longer(self, lexemes: Sequence[tuple[Node, ...]], most: tuple[int, int]) -> set[int]:
        """Those with a text that begins with a whole text of one of them, or with an empty text."""
        auto = _Automaton(most[0])
        ends = [auto.new(i) for i in range(len(lexemes))]
        starts = []
        for i, items in enumerate(lexemes):
            at = ends[i]
            for item in reversed(items):
                at = self._build(auto, item, at, i)
            starts.append(at)
        closed = [_closure(auto, s) for s in range(len(auto.steps))]
        done = [ends[owner] in reached for owner, reached in zip(auto.owner, closed, strict=True)]
        steps = [[step for x in c for step in auto.steps[x]] for c in closed]
        found = {i for i, start in enumerate(starts) if done[start]}
        queue = [frozenset(starts)]
        seen, size = set(queue), 0
        while queue:  # each is the places in all lexemes that one text leads to
            places = [at for at in queue.pop() if auto.owner[at] not in found]
            size += len(places)
            if size > most[1]:
                raise _TooLarge
            for after in _led(step for at in places for step in steps[at]) - seen:
                seen.add(after)
                queue.append(after)
                if any(done[at] for at in after):
                    found |= {auto.owner[at] for at in after if steps[at]}
        return found

    def _build(self, auto: _Automaton, node: Node, after: int, owner: int) -> int:
        """States for a node before the state `after` -> the first of them."""
        if isinstance(node, Ref):
            return self._build(auto, self.rules[node.name], after, owner)
        at = auto.new(owner)
        if isinstance(node, Chars):
            auto.steps[at].append((node.ranges, after))
            return at
        if isinstance(node, Alt):
            for option in node.options:
                first = after
                for item in reversed(option.items):
                    first = self._build(auto, item, first, owner)
                auto.free[at].append(first)
            return at
        assert isinstance(node, Rep), "a token is not regular"
        auto.free[at].append(after)
        if node.high is None:
            auto.free[at].append(self._build(auto, node.item, at, owner))
        for _ in range((node.high or node.low) - node.low):
            inner = self._build(auto, node.item, at, owner)
            at = auto.new(owner)
            auto.free[at] += [after, inner]
        for _ in range(node.low):
            at = self._build(auto, node.item, at, owner)
        return at

    # ------------------------------------------------------------ writing

    def _name(self, name: str) -> str:
        return "start" if name == "root" else self.names.setdefault(name, f"r{len(self.names)}")

    def _text(self, plan: Leaf | LexemeGroup) -> str:
        if isinstance(plan, Leaf):
            text = f"/{regex.write(Alt(tuple(self._spelt(Alt((Seq(plan.items),))).options)))}/"  # type: ignore[arg-type]
            return self.terminals.setdefault(text, f"T{len(self.terminals)}")
        if plan.rule:
            return plan.rule
        inner = plan.between.join(map(self._text, plan.parts)) or '""'
        return f"({inner}){plan.mark}"


def _mark(node: Rep) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    return short or f"{{{node.low},{'' if node.high is None else node.high}}}"


def _parts(node: Node | Seq) -> Sequence[Node | Seq]:
    if isinstance(node, Rep):
        return (node.item,)
    return node.options if isinstance(node, Alt) else node.items if isinstance(node, Seq) else ()


def _has_token(node: Node | Seq) -> bool:
    return isinstance(node, Token) or any(map(_has_token, _parts(node)))


def _is_char(items: tuple[Node, ...]) -> bool:
    return len(items) == 1 and isinstance(items[0], Chars)


def _leaves(plan: Leaf | LexemeGroup) -> list[Leaf]:
    return [plan] if isinstance(plan, Leaf) else [leaf for part in plan.parts for leaf in _leaves(part)]


def _replaced(plan: Leaf | LexemeGroup, divided: dict[tuple[Node, ...], Leaf | LexemeGroup]) -> Leaf | LexemeGroup:
    if isinstance(plan, Leaf):
        return divided.get(plan.items, plan)
    return LexemeGroup([_replaced(part, divided) for part in plan.parts], plan.between, plan.mark, plan.rule)


def _closure(auto: _Automaton, state: int) -> set[int]:
    seen, queue = {state}, [state]
    while queue:
        new = set(auto.free[queue.pop()]) - seen
        seen |= new
        queue += new
    return seen


def _led(steps: Iterable[tuple[Ranges, int]]) -> set[frozenset[int]]:
    """The sets of places to which single characters lead."""
    changes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for ranges, to in steps:
        for low, high in ranges:
            changes[low].append((to, 1))
            changes[high + 1].append((to, -1))
    now: dict[int, int] = defaultdict(int)
    found: set[frozenset[int]] = set()
    for code in sorted(changes):
        for to, more in changes[code]:
            now[to] += more
            if not now[to]:
                del now[to]
        if now:
            found.add(frozenset(now))
    return found
