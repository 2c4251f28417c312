"""Finding the request that kills engines, in a server and for callers in this process. Owns: the suspects, which engine
is set aside for them, and which of them runs there.

When engines die again and again, the requests that ran on them are not all given up. One engine is set aside, and the
suspects are tried on it, one after the other. A request that gets past the point where engines died has passed and goes
on there. If the engine dies under one alone, that one is given up, and the other suspects go free. If it dies under one
and others that had passed, each of them is tried anew, to its end and alone. Must not know: text, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tokenmill.engine.running.said import MOST_DEATHS, PASSED, Said


class Trials:
    """See the module's text. owners: gives the engine of every request that has one. most: deaths that make a request a
    suspect."""

    def __init__(self, owners: Callable[[], Mapping[str, int]], most: int = MOST_DEATHS) -> None:
        self.owners, self.most = owners, most
        self.suspects: dict[str, Said] = {}
        """Those that wait for their trial, and the one on trial."""
        self.engine = -1
        """The engine that is set aside (-1: none)."""
        self.current: Said | None = None
        self.goal: float = 0
        """The current request has passed when it has said so many tokens."""
        self.passed: set[str] = set()
        self.contested: set[str] = set()
        """Requests whose trial was no proof: the engine died with others, too."""
        self.doubt = False
        """The caller of the one before has left, and the engine may still die of its request."""

    def engines(self, living: Sequence[int], said: Said | None, coming: Sequence[int] = ()) -> Sequence[int]:
        """Those of the living engines that may have this request now (None: a new one); it asks again while there is
        none. coming: lost engines that are being loaded."""
        if said is None or said.deaths < self.most:
            return [number for number in living if number != self.engine]
        self.suspects[said.request.id] = said
        if self.current is None:
            self._choose(living, coming)
        return [self.engine] if said is self.current and self.engine in living else []

    def _choose(self, living: Sequence[int], coming: Sequence[int]) -> None:
        owners = self.owners()
        able = [*coming, *living]  # nobody runs on those that come
        if self.engine not in able:
            self.engine = min(able, key=list(owners.values()).count, default=-1)
        if self.engine not in living:
            return
        said = min(self.suspects.values(), key=lambda each: each.num_said)  # prompts do most harm
        to_its_end = said.request.id in self.contested or said.deaths > 3 * self.most
        beside = {other for other, number in owners.items() if number == self.engine}
        if not beside - (set() if to_its_end else self.passed):
            self.current = said
            self.goal = float("inf") if to_its_end else said.num_said + PASSED * said.num_outputs

    def answered(self, name: str) -> bool:
        """Look how much the request has said. Has it passed its trial now?"""
        if self.current is None or self.current.request.id != name:
            return False
        self.doubt = False  # the engine goes on without the one before
        if self.current.num_said < self.goal:
            return False
        self.leave(name)
        if self.suspects:
            self.passed.add(name)
        return True

    def died(self, said: Said, *, alone: bool) -> bool:
        """The request's engine has died, with no other request (alone) or with several. Is this one the cause? Then the
        other suspects go free."""
        name = said.request.id
        tried, guilty = said is self.current or name in self.passed, said is self.current and alone and not self.doubt
        self._drop(name)
        if guilty:
            for other in self.suspects.values():
                other.deaths = self.most - 1  # one more death makes it a suspect again
            for each in (self.suspects, self.passed, self.contested):
                each.clear()
        elif tried:
            self.contested.add(name)
        return guilty

    def leave(self, name: str, *, doubt: bool = False) -> None:
        """The request has passed or ended, or nobody waits for it any more. doubt: its engine may work on it still."""
        self.contested.discard(name)
        self._drop(name, doubt=doubt)
        if not self.suspects:
            self.engine = -1
            self.passed.clear()

    def _drop(self, name: str, *, doubt: bool = False) -> None:
        self.passed.discard(name)
        self.suspects.pop(name, None)
        if self.current is not None and self.current.request.id == name:
            self.current, self.doubt = None, doubt
