"""When a host drafter should guess less, or not at all. Owns: per sequence, how often guesses are right and a balance
of what they cost and saved; over all sequences, what a step of more tokens costs.

A tried guess costs part of a step's time; a right one saves a row its share of a step. For a sequence, the number of
guesses tried is the one that gives most tokens for the time that such steps have taken here. But nothing is tried that
the balance cannot pay for. It begins with CREDIT tokens and gains ALLOWED per token, so a text in which all guesses
fail loses no more than that. Must not know: where guesses come from, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.drafting import HostDrafter
from tokenmill.core.sequence import Sequence
from tokenmill.speculate.curve import Curve

CREDIT, MOST_CREDIT = 1.0, 4.0
"""The balance that a sequence begins with, and the most that right guesses may save up."""
ALLOWED = 0.01
"""The share of the time of tokens that failed guesses may cost."""
HOPE, TRUST = 0.6, 3.0
"""How often guesses are assumed to be right before any was tried, and how many tried ones this counts for."""
FORGET = 0.95
"""Weight of older guesses beside those of one newer step."""
PLAIN = 64
"""One step in this many has no guesses, so that their cost stays known."""
LITTLE = 0.1
"""The assumed cost of a guess, in tokens, before anything is measured."""
ASKED = 2
"""Guesses tried to find out whether more of them pay by now."""
MEASURED, MOST_SPARE = 0.0025, 64.0
"""The share of all tokens' time in which a guess may be measured again that is believed to cost more than CREDIT, and
the most tokens that may be saved up for it."""
PRICED = 16
"""Steps for which costs hold at most: times change slowly."""
RESTS = 64
"""The most tokens for which a sequence does not look for guesses at all."""


class HostControl:
    """A DraftControl for host drafters. It allows no device drafts; it learns how long steps take."""

    def __init__(self, most_rows: int | None = None) -> None:
        """most_rows: with more rows there are no guesses."""
        self.most_rows = most_rows
        self.curve = Curve()
        self.rows, self.turn = 1, 0
        self.others = 0.0
        """About how many guesses the other rows try in a step."""
        self.paid = 1.0
        """What each guess cost, in tokens, in the last step that tried any."""
        self.spare = 0.0
        """Tokens that may be spent on measuring a guess again that is believed to be dear."""
        self.prices: list[float | None] = []
        self.priced = (0, 0, -PRICED)
        """The cost of 1, 2, ... guesses (None: nothing is measured), and the rows, others and turn that it is for."""

    @property
    def closed(self) -> bool:
        """Are there too many rows for guesses, or is the time of a step without them to be measured?"""
        many = self.most_rows is not None and self.rows > self.most_rows
        return many or self.turn % PLAIN == 0 or not self.curve.knows(self.rows)

    def depth(self, rows: int) -> int:
        self.rows, self.turn = max(1, rows), self.turn + 1
        self.spare = min(MOST_SPARE, self.spare + MEASURED * rows)
        return 0

    def resumes(self, rows: int) -> bool:
        """No: it never allows a device's drafts."""
        return False

    def observe(self, tried: int, accepted: int) -> None:
        """Nothing to learn: each sequence counts its own guesses."""

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """Nothing to learn: there are no drafts of a device."""

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        tried = tokens - rows
        if not tried:
            self.curve.learn(rows, seconds)
            self.others *= 0.9
            return
        self.curve.learn(tokens, seconds, rows)
        self.others += 0.1 * (tried * (rows - 1) / rows - self.others)
        self.priced = 0, 0, -PRICED
        plain = self.curve.taken(rows)
        if plain is not None:
            known = self.curve.knows(tokens)
            more = self.curve.more(tokens, rows) if known else seconds / plain - 1.0
            paid = rows * max(0.0, more or 0.0) / tried
            self.paid = paid if known else min(paid, 1.0)  # the step may have recorded something

    def price(self, rows: int, depth: int, tried: int) -> tuple[float, float]:
        plain = self.curve.taken(rows)
        if plain is None:
            return 0.0, 0.0
        return plain, plain * (self.curve.more(rows + tried, rows) or 0.0)

    def cost(self, count: int, unknown: float = 1.0) -> float:
        """The cost, in tokens, of `count` guesses of one row beside those of the others: all guesses of a step share
        their cost. unknown: the assumed cost of each where nothing is measured."""
        rows, others, turn = self.priced
        if rows != self.rows or others != round(self.others) or self.turn - turn >= PRICED:
            self.prices = []
            self.priced = self.rows, round(self.others), self.turn
        for n in range(len(self.prices) + 1, count + 1):
            now, alike = self._each(n, self.priced[1]), self._each(n, (self.rows - 1) * n)
            self.prices.append(None if now is None or alike is None else n * min(now, alike))
        found = self.prices[count - 1]
        return count * unknown if found is None else found

    def _each(self, count: int, others: int) -> float | None:
        more = self.curve.more(self.rows + others + count, self.rows)
        return None if more is None else self.rows * more / (others + count)

    def may_measure(self) -> bool:
        """Is a guess believed to be so dear that no balance ever pays for one, and was nothing spent on measuring it
        for long?"""
        price = self.cost(1)
        if price <= CREDIT or price > self.spare:
            return False
        self.spare -= price
        return True

    def best(self, right: float, most: int) -> int:
        """How many guesses give most tokens for their time. right: how often a guess is right if those before it are.
        Now and then it is one more or less, because times between measured steps need not be linear."""
        best, worth, alive, gained = 0, 1.0, 1.0, float(self.rows)
        for count in range(1, most + 1):
            alive *= right
            gained += alive
            now = gained / (self.rows + self.cost(count, LITTLE))
            if now > worth:
                best, worth = count, now
        beside = {3: 1, 7: -1}.get(self.turn % 8, 0) if best else 0
        return min(max(1, best + beside), most) if best else 0


@dataclass(slots=True)
class Patience:
    """One sequence's balance, in tokens. `seen`: the sequence's length at the last look. `owed`: guesses tried since,
    whose cost may have become known in between. `gained`: how many of them were right."""

    balance: float = CREDIT
    right: float = HOPE * TRUST
    tried: float = TRUST
    seen: int = -1
    owed: int = 0
    gained: int = 0

    def most(self, tokens: int, most: int, control: HostControl) -> int:
        """How many guesses to try behind this many tokens."""
        if self.owed:
            now = self.balance + self.gained - control.paid * self.owed
            self.balance = max(-MOST_CREDIT, min(MOST_CREDIT, now))
            self.owed = self.gained = 0
        if 0 <= self.seen < tokens and self.balance < CREDIT:
            self.balance = min(CREDIT, self.balance + ALLOWED * (tokens - self.seen))
        self.seen, first = tokens, control.cost(1)
        if first > self.balance:
            return 1 if control.may_measure() else 0
        count = control.best(self.right / self.tried, most)
        if not count and self.balance >= CREDIT:
            count = min(ASKED, most)
        while count and control.cost(count) > self.balance:
            count -= 1
        return count

    def rest(self, control: HostControl) -> int:
        """How many tokens must come, after a look that allowed no guess, until one may be allowed."""
        first = control.cost(1)
        if first > max(self.balance, CREDIT):
            return PRICED
        wanted = first if first > self.balance else CREDIT
        return max(1, min(RESTS, int((wanted - self.balance) / ALLOWED)))

    def learn(self, proposed: int, accepted: int) -> None:
        """`accepted` of the sequence's guesses were right. Those behind the first wrong one tell nothing."""
        self.owed, self.gained = proposed, accepted
        self.right = FORGET * self.right + accepted
        self.tried = FORGET * self.tried + min(proposed, accepted + 1)


class Careful:
    """A HostDrafter that asks another one for only as many guesses as pay."""

    def __init__(self, drafter: HostDrafter, control: HostControl) -> None:
        self.drafter = drafter
        self.control = control
        self.known: dict[int, Patience] = {}

    def propose(self, seq: Sequence, most: int) -> list[int]:
        if self.control.closed:
            return []
        patience = self.known.get(seq.id)
        if patience is None:
            patience = self.known[seq.id] = Patience()
        count = patience.most(len(seq.tokens), most, self.control)
        if count:
            return self.drafter.propose(seq, count)
        seq.guess_from = len(seq.tokens) + patience.rest(self.control)
        return []

    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None:
        patience = self.known.get(seq.id)
        if patience is not None:
            patience.learn(proposed, accepted)
        self.drafter.observe(seq, proposed, accepted)

    def forget(self, seq: Sequence) -> None:
        self.known.pop(seq.id, None)
        self.drafter.forget(seq)
