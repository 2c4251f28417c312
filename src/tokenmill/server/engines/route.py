"""Which engine takes a request. Owns: least-loaded choice that prefers an engine which has seen the prompt's start, and
engines that sessions stay with.

Must not know: processes, HTTP.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

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


class Router:
    """Remembers which prompts went where."""

    def __init__(self) -> None:
        self.seen: dict[int, OrderedDict[int, None]] = {}
        self.sessions: OrderedDict[str, int] = OrderedDict()

    def choose(self, loads: Mapping[int, int], prompt_ids: list[int], salt: str, session: str | None = None) -> int:
        """The engine (a key of `loads`: open requests) for a prompt; a session stays where it was."""
        if len(loads) == 1:
            return next(iter(loads))
        if session is None:
            return self._choose(loads, prompt_ids, salt)
        engine = self.sessions.get(session, -1)
        if engine not in loads:
            engine = self._choose(loads, prompt_ids, salt)
        self.sessions[session] = engine
        self.sessions.move_to_end(session)
        if len(self.sessions) > MAX_REMEMBERED:
            self.sessions.popitem(last=False)
        return engine

    def _choose(self, loads: Mapping[int, int], prompt_ids: list[int], salt: str) -> int:
        keys = prefix_keys(prompt_ids, salt)
        idlest = min(loads.values())
        able = [engine for engine, load in loads.items() if load <= idlest + SLACK]
        best = max(able, key=lambda engine: (self._known(engine, keys), -loads[engine], -engine))
        self._remember(best, keys)
        return best

    def forget(self, engine: int) -> None:
        """That engine's cache is gone."""
        self.seen.pop(engine, None)

    def _known(self, engine: int, keys: list[int]) -> int:
        seen: Mapping[int, None] = self.seen.get(engine, {})
        for count, key in enumerate(keys):
            if key not in seen:
                return count
        return len(keys)

    def _remember(self, engine: int, keys: list[int]) -> None:
        seen = self.seen.setdefault(engine, OrderedDict())
        for key in keys:
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > MAX_REMEMBERED:
            seen.popitem(last=False)
