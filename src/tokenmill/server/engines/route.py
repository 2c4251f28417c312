"""Which engine takes a request. Owns: least-loaded choice that prefers an engine which has seen the prompt's start, and
engines that sessions stay with.

Must not know: processes, HTTP.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping

STRIDE = 64
MAX_STRIDES = 64
MAX_REMEMBERED = 16_384
SLACK = 4
"""How many more open requests an engine may have than the idlest one before a known prefix no longer draws it."""


def prefix_keys(prompt_ids: list[int], salt: str) -> list[int]:
    """One hash per stride of the prompt, each covering everything before it."""
    keys: list[int] = []
    seed = hash(salt)
    for start in range(0, min(len(prompt_ids) - STRIDE, STRIDE * MAX_STRIDES) + 1, STRIDE):
        seed = hash((seed, *prompt_ids[start : start + STRIDE]))
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


class Router:
    """Remembers which prompts went where, for each owner apart: no key makes the server forget another one's."""

    def __init__(self) -> None:
        self.seen: dict[int, Memory] = {}
        self.sessions = Memory()

    def choose(
        self, loads: Mapping[int, int], prompt_ids: list[int], salt: str, session: str | None = None, owner: str = ""
    ) -> int:
        """The engine (a key of `loads`: open requests) for a prompt; a session stays where it was."""
        if len(loads) == 1:
            return next(iter(loads))
        engine = None if session is None else self.sessions.get(owner, session)
        if engine is None or engine not in loads:
            engine = self._choose(loads, prompt_ids, salt, owner)
        if session is not None:
            self.sessions.put(owner, (session,), engine)
        return engine

    def _choose(self, loads: Mapping[int, int], prompt_ids: list[int], salt: str, owner: str) -> int:
        owner = owner if salt else ""  # without a salt keys share what is cached
        keys = prefix_keys(prompt_ids, salt)
        idlest = min(loads.values())
        able = [engine for engine, load in loads.items() if load <= idlest + SLACK]
        best = max(able, key=lambda engine: (self._known(engine, owner, keys), -loads[engine], -engine))
        self.seen.setdefault(best, Memory()).put(owner, keys, best)
        return best

    def forget(self, engine: int) -> None:
        """That engine's cache is gone."""
        self.seen.pop(engine, None)

    def _known(self, engine: int, owner: str, keys: list[int]) -> int:
        seen = self.seen.get(engine)
        if seen is None:
            return 0
        for count, key in enumerate(keys):
            if seen.get(owner, key) is None:
                return count
        return len(keys)
