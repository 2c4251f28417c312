"""Which of several engines takes a request. Owns: what each has to do, which beginnings of prompts it has seen, and the
choice: where the least is left to compute before the request's own tokens come.

The cost of an engine is what it would have to compute of the prompt, what it has yet to compute of others', and a share
for every request that it answers. A session stays with its engine while what is cached there is worth more than its
queue. Hashes are stable: any process gives the same. Must not know: processes, HTTP.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

STRIDE = 64
MAX_STRIDES = 256
MAX_REMEMBERED = 16_384
STAY = 512
"""Tokens, besides its prompt's, that a session lets go before it when it stays with its engine: what was said there
last is cached, and more may be than the prompt shows."""
ANSWER = 32
"""Prompt tokens that an open request counts for while it is answered."""


def prefix_keys(prompt_ids: list[int], salt: str) -> list[bytes]:
    """One hash per stride of the prompt, each covering everything before it."""
    keys: list[bytes] = []
    seed = salt.encode(errors="surrogatepass")
    for start in range(0, min(len(prompt_ids) - STRIDE, STRIDE * (MAX_STRIDES - 1)) + 1, STRIDE):
        part = array("q", prompt_ids[start : start + STRIDE]).tobytes()
        seed = blake2b(seed + part, digest_size=8).digest()
        keys.append(seed)
    return keys


class Memory:
    """Values by owner and key, at most `most`: the owner with most of them loses those it used least recently."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self.most = most
        self.count = 0
        self.owners: dict[str, OrderedDict[Hashable, int]] = {}

    def get(self, owner: str, key: Hashable) -> int | None:
        """What was put under this key by this owner."""
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
        """The largest owner gives up what is too much, but no more than to the size of the next one."""
        first, *rest = heapq.nlargest(2, self.owners, key=lambda name: len(self.owners[name]))
        largest = self.owners[first]
        floor = len(self.owners[rest[0]]) if rest else 0
        for _ in range(max(1, min(self.count - self.most, len(largest) - floor))):
            largest.popitem(last=False)
            self.count -= 1
        if not largest:
            del self.owners[first]


@dataclass(slots=True)
class Load:
    """What one engine has to do: prompt tokens left of each open request, and prefixes that it has been sent."""

    left: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    seen: Memory = field(default_factory=Memory)

    @property
    def cost(self) -> int:
        """Tokens that come before those of a new request, and a share for every answer."""
        return self.pending + ANSWER * len(self.left)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the choice depends on."""

    name: str
    prompt_ids: list[int]
    salt: str = ""
    session: str | None = None
    owner: str = ""


class Router:
    """Remembers which prompts went where, for each owner apart: no key makes the server forget another one's."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        """most: strides of prompts that an engine's cache may hold."""
        self.most = most
        self.loads: dict[int, Load] = {}
        self.sessions = Memory()

    def pick_engine(self, engines: Iterable[int], asked: Asked, *, only: int | None = None) -> int:
        """The engine for a request, which counts as sent there from now on. only: it is settled already."""
        able = [only] if only is not None else list(engines)
        owner = asked.owner if asked.salt else ""  # without a salt keys share what is cached
        keys = prefix_keys(asked.prompt_ids, asked.salt) if len(able) > 1 or len(self.loads) > 1 else []
        left = {engine: self._uncached(engine, asked, owner, keys) for engine in able}
        cost = {engine: left[engine] + self._load(engine).cost for engine in able}
        best = min(able, key=lambda engine: (cost[engine], engine))
        at = None if asked.session is None else self.sessions.get(asked.owner, asked.session)
        if at in cost and cost[at] <= cost[best] + STAY + len(asked.prompt_ids):
            best = at
        load = self._load(best)
        load.seen.put(owner, keys, best)
        load.left[asked.name] = left[best]
        load.pending += left[best]
        if asked.session is not None:
            self.sessions.put(asked.owner, (asked.session,), best)
        return best

    def computed(self, engine: int, name: str, tokens: int, prompt: int) -> None:
        """So many of the prompt's tokens are computed, or were cached."""
        load = self._load(engine)
        before = load.left.get(name)
        if before is not None:
            load.left[name] = now = min(before, max(0, prompt - tokens))
            load.pending -= before - now

    def done(self, engine: int, name: str) -> None:
        """The request has ended there."""
        load = self._load(engine)
        load.pending -= load.left.pop(name, 0)

    def forget(self, engine: int) -> None:
        """That engine's cache is gone, and what it had to do."""
        self.loads.pop(engine, None)

    def _load(self, engine: int) -> Load:
        found = self.loads.get(engine)
        if found is None:
            found = self.loads[engine] = Load(seen=Memory(self.most))
        return found

    def _uncached(self, engine: int, asked: Asked, owner: str, keys: list[bytes]) -> int:
        seen = self._load(engine).seen
        known = 0
        for key in keys:
            if seen.get(owner, key) is None:
                break
            known += STRIDE
        return max(1, len(asked.prompt_ids) - known)
