"""When a drafter of the host had better guess less, or nothing. Owns: of each sequence how often guesses are right, and
a balance of what they have cost and saved; of all of them what a step of more tokens costs.

A guess that is tried takes a part of a step's time, and a right one saves a row its part of a step. Of a sequence so
many guesses are tried as give most tokens for the time that such steps have taken here. Whatever that says, nothing is
tried that the balance cannot pay for: it begins with CREDIT tokens and gains ALLOWED for each one, so text in which all
guesses fail loses no more. Must not know: where guesses come from, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.drafting import HostDrafter
from tokenmill.core.sequence import Sequence
from tokenmill.speculate.curve import Curve

CREDIT, MOST_CREDIT = 1.0, 4.0
"""The balance that a sequence begins with, and the most that right guesses may save up."""
ALLOWED = 0.01
"""Of the time that tokens take, for guesses that fail."""
HOPE, TRUST = 0.6, 3.0
"""How often guesses are taken to be right before any was tried, and for how many tried ones that stands."""
FORGET = 0.95
"""What older guesses count for beside one newer step's."""
PLAIN = 64
"""One of so many steps is without guesses, so that what they cost stays known."""
LITTLE = 0.1
"""What a guess is hoped to cost, in tokens, where nothing has been measured."""
ASKED = 2
"""Guesses that are tried to find out whether more of them pay by now."""


class HostControl:
    """A DraftControl for guesses of the host: it makes none, and hears how long steps take."""

    def __init__(self, most_rows: int | None = None) -> None:
        """most_rows: with more rows nothing is guessed at all."""
        self.most_rows = most_rows
        self.curve = Curve()
        self.rows, self.turn = 1, 0
        self.others = 0.0
        """Guesses that one row's neighbours try in a step, about."""
        self.paid = 1.0
        """What each guess of the last step that tried any has cost, in tokens."""

    @property
    def closed(self) -> bool:
        """Are there too many rows for any guesses, or is it to be found out what a step without them takes?"""
        many = self.most_rows is not None and self.rows > self.most_rows
        return many or self.turn % PLAIN == 0 or not self.curve.knows(self.rows)

    def depth(self, rows: int) -> int:
        self.rows, self.turn = max(1, rows), self.turn + 1
        return 0

    def observe(self, tried: int, accepted: int) -> None:
        """Each sequence's guesses are its own matter."""

    def timed(self, rows: int, depth: int, seconds: float) -> None:
        """No drafts of a device."""

    def worked(self, tokens: int, rows: int, seconds: float) -> None:
        self.curve.learn(tokens, seconds)
        tried = tokens - rows
        if tried and self.curve.knows(rows):
            paid = rows * (self.curve.more(tokens, rows) or 0.0) / tried
            self.paid = paid if self.curve.knows(tokens) else min(paid, 1.0)  # something else may have run
        self.others += 0.1 * (tried * (rows - 1) / rows - self.others)

    def price(self, rows: int, depth: int, tried: int) -> tuple[float, float]:
        plain = self.curve.taken(rows)
        if plain is None:
            return 0.0, 0.0
        return plain, plain * (self.curve.more(rows + tried, rows) or 0.0)

    def cost(self, count: int, unknown: float = 1.0) -> float:
        """Of so many guesses of one row beside those of the others, in tokens; all that are tried share what they cost
        together. unknown: what each is taken to cost where nothing is known."""
        return count * min(
            self._each(count, round(self.others), unknown), self._each(count, (self.rows - 1) * count, unknown)
        )

    def _each(self, count: int, others: int, unknown: float) -> float:
        more = self.curve.more(self.rows + others + count, self.rows)
        return unknown if more is None else self.rows * more / (others + count)

    def best(self, right: float, most: int) -> int:
        """How many guesses, each of which is right so often if those before it are, give most tokens for their time;
        now and then one more or less, because what lies between measured steps may be otherwise than a line."""
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
    """Of one sequence, in tokens; `seen`: how many of them it had when it was last looked at; `owed`: guesses that were
    tried since, what they cost may have become known in between."""

    balance: float = CREDIT
    right: float = HOPE * TRUST
    tried: float = TRUST
    seen: int = -1
    owed: int = 0

    def most(self, tokens: int, most: int, control: HostControl) -> int:
        """How many guesses to try behind so many tokens."""
        if self.owed:
            self.balance = max(-MOST_CREDIT, self.balance - control.paid * self.owed)
            self.owed = 0
        if 0 <= self.seen < tokens and self.balance < CREDIT:
            self.balance = min(CREDIT, self.balance + ALLOWED * (tokens - self.seen))
        self.seen = tokens
        count = control.best(self.right / self.tried, most)
        if not count and self.balance >= CREDIT:
            count = min(ASKED, most)
        while count and control.cost(count) > self.balance:
            count -= 1
        return count

    def learn(self, proposed: int, accepted: int) -> None:
        """Of its guesses so many were right; those behind the first wrong one say nothing."""
        self.owed = proposed
        self.balance = min(MOST_CREDIT, self.balance + accepted)
        self.right = FORGET * self.right + accepted
        self.tried = FORGET * self.tried + min(proposed, accepted + 1)


class Careful:
    """A HostDrafter that asks another one for as many guesses as pay."""

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
        return self.drafter.propose(seq, count) if count else []

    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None:
        patience = self.known.get(seq.id)
        if patience is not None:
            patience.learn(proposed, accepted)
        self.drafter.observe(seq, proposed, accepted)

    def forget(self, seq: Sequence) -> None:
        self.known.pop(seq.id, None)
        self.drafter.forget(seq)
