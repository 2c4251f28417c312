"""Which of several engines takes a request. Owns: the work that each engine has, what it has reported of its cache, and
the choice: the engine where the request has to wait for the least computation.

The cost of an engine is the sum of what it would have to compute of the prompt, what it has yet to compute of other
prompts, a share for every request that it answers (larger if that request reads more at each step), and its lead over
the others in work given lately. Its cache holds what it has reported (kvcache/cache_events.py) and what open requests
are about to add. Nothing is guessed, so evictions count at once. A session stays with its engine unless another one
would be much cheaper. Must not know: processes, HTTP.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from tokenmill.core.request import Request
from tokenmill.kvcache.cache_events import MARK_BYTES, mark_of, prompt_marks, salt_of

MOST_TOKENS = 16_384
"""How many of a prompt's first tokens are looked for in caches."""
MAX_REMEMBERED = 16_384
AGAIN = 4
"""The cost of a token that one engine would compute although another has it cached: it delays later requests and pushes
others out of the cache. With 200 prompts of 16 prefixes (tests/pure/test_picking_prefixes.py), four engines lost 1 to 2
points of a single engine's hit rate at a cost of 4, and 5 points at 1. At 6 and more their work was up to 15 % from
even."""
ANSWER = 32
"""The cost of an open request while it is answered."""
PER_BLOCK = 1
"""The additional cost of each block that it reads."""
STAY = 512 * AGAIN
"""How much more it may cost to stay with a session's engine. Elsewhere the session's history would be stored twice."""
MOST_AHEAD = 4096
"""The most prompt tokens by which an engine counts as ahead of others in work given; more is forgotten."""

SLOWER = 5 * ANSWER
"""An engine with twice as much to do as another, and so much more, is slower, however much less it was given: it has no
claim to as much work. Otherwise it would get its full share for ever, and half of all callers would wait for it."""


class OwnedMemory:
    """At most `most` values by owner and key. The owner with the most values loses those that it used least
    recently."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self.most = most
        self.count = 0
        self.owners: dict[str, OrderedDict[Hashable, int]] = {}

    def get(self, owner: str, key: Hashable) -> int | None:
        """The value that this owner put under this key."""
        own = self.owners.get(owner)
        return None if own is None else own.get(key)

    def put(self, owner: str, keys: Iterable[Hashable], value: int) -> None:
        """Remember the value under all these keys."""
        own = self.owners.setdefault(owner, OrderedDict())
        before = len(own)
        for key in keys:
            own[key] = value
            own.move_to_end(key)
        self.count += len(own) - before
        while self.count > self.most:
            self._shrink()
        if not own:
            self.owners.pop(owner, None)

    def _shrink(self) -> None:
        """Remove the excess from the largest owner, down to the size of the next one at most."""
        first, *rest = heapq.nlargest(2, self.owners, key=lambda name: len(self.owners[name]))
        largest = self.owners[first]
        floor = len(self.owners[rest[0]]) if rest else 0
        for _ in range(max(1, min(self.count - self.most, len(largest) - floor))):
            largest.popitem(last=False)
            self.count -= 1
        if not largest:
            del self.owners[first]


@dataclass(slots=True)
class OpenWork:
    """One open request at an engine. left: prompt tokens still to compute. length: tokens of its prompt and output.
    brings: the marks of blocks that its prompt will leave in the cache."""

    left: int
    length: int
    brings: list[bytes]


@dataclass(slots=True)
class Load:
    """One engine's load. held: marks of the blocks that it reports in its cache. coming: marks of blocks that open
    requests will bring, with the number of these requests. given: work that it was given so far, in prompt tokens."""

    open: dict[str, OpenWork] = field(default_factory=dict)
    pending: int = 0
    blocks: int = 0
    held: set[bytes] = field(default_factory=set)
    coming: Counter[bytes] = field(default_factory=Counter)
    given: int = 0

    @property
    def cost(self) -> int:
        """The work that comes before a new request's own tokens, and a cost for every open answer."""
        return self.pending + ANSWER * len(self.open) + PER_BLOCK * self.blocks

    def known(self, marks: list[bytes]) -> int:
        """How many blocks of a prompt need not be computed. A mark stands for all blocks before it, so the last known
        mark counts. (Layers with a window lose earlier blocks first.)"""
        held, coming = self.held, self.coming
        for count in range(len(marks), 0, -1):
            if marks[count - 1] in held or marks[count - 1] in coming:
                return count
        return 0

    def waits_for(self, work: OpenWork, left: int) -> None:
        """So many tokens of the request's prompt are still to compute; what is computed stays so."""
        before = work.left
        work.left = min(before, left)
        self.pending -= before - work.left
        if not work.left:
            self.arrived(work)

    def arrived(self, work: OpenWork) -> None:
        """The request's prompt is computed, or never will be; the engine itself reports the blocks that it left."""
        for mark in work.brings:
            self.coming[mark] -= 1
            if not self.coming[mark]:
                del self.coming[mark]
        work.brings = []


@dataclass(frozen=True, slots=True)
class PickRequest:
    """What the choice of an engine depends on. keys: the prompt's keys in the prefix cache."""

    name: str
    keys: list[int]
    salt: str = ""
    session: str | None = None
    owner: str = ""


def asked_of(request: Request, session: str | None = None, owner: str = "") -> PickRequest:
    """What the choice for this request depends on."""
    keys = request.prompt_keys or request.prompt_ids
    return PickRequest(request.id, keys, salt_of(request.adapter, request.salt), session, owner)


class EnginePicker:
    """Chooses engines. Each owner's sessions are remembered separately, so that no API key makes it forget
    another's."""

    def __init__(self, block_size: int = 0) -> None:
        """block_size: block size of the engines' prefix caches; 0: there are none."""
        self.block_size = block_size
        self.loads: dict[int, Load] = {}
        self.sessions = OwnedMemory()
        self._mark = lru_cache(MAX_REMEMBERED)(mark_of)

    def pick_engine(self, engines: Iterable[int], asked: PickRequest, *, only: int | None = None) -> int:
        """Choose the engine for a request, which then counts as sent there. only: the engine, if it is fixed
        already."""
        able = [only] if only is not None else list(engines)
        several = len(able) > 1 or len(self.loads) > 1
        marks = (
            prompt_marks(asked.keys, asked.salt, self.block_size, MOST_TOKENS, self._mark)
            if several and self.block_size
            else []
        )
        loads = {engine: self._load(engine) for engine in able}
        left = {e: max(1, len(asked.keys) - self.block_size * loads[e].known(marks)) for e in able}
        least = min(load.given for load in loads.values())
        cost = {e: AGAIN * left[e] + loads[e].cost + loads[e].given - least for e in able}
        best = min(able, key=lambda e: (cost[e], e))
        at = None if asked.session is None else self.sessions.get(asked.owner, asked.session)
        if at in cost and cost[at] <= cost[best] + STAY:
            best = at
        load = loads[best]
        for other in loads.values():
            if other.cost > 2 * load.cost + SLOWER:
                other.given = max(other.given, load.given)
        load.open[asked.name] = OpenWork(left[best], len(asked.keys), marks)
        load.coming.update(marks)
        load.pending += left[best]
        load.blocks += self._blocks(len(asked.keys))
        load.given += left[best] + ANSWER
        for other in self.loads.values():
            other.given = max(other.given, load.given - MOST_AHEAD)
        if asked.session is not None:
            self.sessions.put(asked.owner, (asked.session,), best)
        return best

    def cached(self, engine: int, published: bytes, gone: bytes) -> None:
        """Take in what an engine reports about its cache, as joined marks."""
        held = self._load(engine).held
        held.update(_marks(published))
        held.difference_update(_marks(gone))

    def computed(self, engine: int, name: str, tokens: int, prompt: int) -> None:
        """Note how many of a prompt's tokens are computed or were cached."""
        load, work = self._open(engine, name)
        if work is not None:
            load.waits_for(work, max(0, prompt - tokens))

    def said(self, engine: int, name: str, tokens: int) -> None:
        """Note that the answer has grown by so many tokens."""
        load, work = self._open(engine, name)
        if work is not None:
            self._grow(load, work, tokens)

    def answered(self, engine: int, name: str, tokens: int) -> None:
        """Both for an answer's tokens, which say that its prompt is computed."""
        load, work = self._open(engine, name)
        if work is not None:
            if work.left:
                load.waits_for(work, 0)
            self._grow(load, work, tokens)

    def _grow(self, load: Load, work: OpenWork, tokens: int) -> None:
        before, work.length = work.length, work.length + tokens
        load.blocks += self._blocks(work.length) - self._blocks(before)

    def done(self, engine: int, name: str) -> None:
        """Note that the request has ended there."""
        load, work = self._open(engine, name)
        if work is not None:
            del load.open[name]
            load.pending -= work.left
            load.blocks -= self._blocks(work.length)
            load.arrived(work)

    def forget(self, engine: int) -> None:
        """Forget an engine's cache and its requests: they are gone."""
        self.loads.pop(engine, None)

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size) if self.block_size else 0

    def _open(self, engine: int, name: str) -> tuple[Load, OpenWork | None]:
        """A request's engine and work; None if it has ended or died with its engine."""
        load = self.loads.get(engine) or Load()
        return load, load.open.get(name)

    def _load(self, engine: int) -> Load:
        found = self.loads.get(engine)
        if found is None:  # a new life starts level with the others
            least = min((load.given for load in self.loads.values()), default=0)
            found = self.loads[engine] = Load(given=least)
        return found


def _marks(joined: bytes) -> list[bytes]:
    return [joined[at : at + MARK_BYTES] for at in range(0, len(joined), MARK_BYTES)]
