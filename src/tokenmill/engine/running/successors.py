"""Engines that take the place of lost ones, for callers in this process. Owns: loading them in threads beside the steps
of the others, and when to try again or to give up (deaths.py, as in a server).

An engine that is lost while the others sleep is loaded when they wake, because others use its memory now. Must not
know: requests, what is done with an engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tokenmill.engine.running.deaths import HOPELESS_S, Deaths, pause_after
from tokenmill.engine.steps.engine import Engine

log = logging.getLogger("tokenmill.engine")


class Loaded(Protocol):
    """What contains an engine."""

    @property
    def engine(self) -> Engine: ...


T = TypeVar("T", bound=Loaded)


class Successors(Generic[T]):
    """See the module's text. make: loads the engine of a number. come: called in a thread when one has loaded."""

    def __init__(self, make: Callable[[int], T], come: Callable[[], None] = lambda: None) -> None:
        self.make, self.come = make, come
        self.deaths = Deaths()
        self.lock = threading.Lock()
        self.missing: set[int] = set()
        """Lost engines that nobody loads."""
        self.coming: set[int] = set()
        self.made: list[tuple[int, T]] = []
        self.arriving = 0
        """How many have loaded and are being told of."""
        self.stop = threading.Event()
        """Ends the loads that run now."""
        self.resting = self.closed = False
        self.broken: str | None = None
        self.trouble_since: float | None = None

    def lost(self, number: int) -> None:
        """An engine has died; the next one of this number is loaded."""
        with self.lock:
            self.missing.add(number)
            self.broken = self.broken or self.deaths.count(time.monotonic())
            if self.broken is not None:
                log.error("%s", self.broken)
        self._start()

    def take(self) -> list[tuple[int, T]]:
        """Those that have loaded since the last call, with their numbers."""
        with self.lock:
            found, self.made = self.made, []
        return found

    @property
    def expected(self) -> bool:
        """Will an engine come, as far as one can know?"""
        with self.lock:
            since = self.trouble_since
            hopeless = since is not None and time.monotonic() - since > HOPELESS_S
            return bool(self.made or self.arriving) or (bool(self.coming) and not hopeless)

    def explain(self, death: str) -> str:
        """How the last engine died, and why no other one comes."""
        return death if self.broken is None else f"{death} ({self.broken})"

    def rest(self) -> None:
        """Load none until `rise`."""
        with self.lock:
            self.resting = True
        self._end()

    def rise(self) -> None:
        """Load those that are missing."""
        with self.lock:
            self.resting = False
        self._start()

    def close(self) -> None:
        """Load none any more."""
        with self.lock:
            self.closed = True
        self._end()

    def _start(self) -> None:
        with self.lock:
            if self.resting or self.closed or self.broken is not None:
                return
            numbers, self.missing = self.missing, set()
            self.coming |= numbers
            stop = self.stop
        for number in numbers:  # by its name, the thread ends before the processes that it starts (process/parent.py)
            loads = threading.Thread(target=self._load, args=(number, stop), name="load-engine", daemon=True)
            try:
                loads.start()
            except RuntimeError as error:  # there may be no more threads; whoever tells of the death must go on
                log.error("engine %d cannot be loaded: %s", number, error)
                with self.lock:
                    self.coming.discard(number)
                    self.missing.add(number)

    def _end(self) -> None:
        with self.lock:
            self.stop.set()
            self.stop = threading.Event()
            gone, self.made = self.made, []
            self.missing |= self.coming | {number for number, _ in gone}
            self.coming = set()
        for _, built in gone:
            built.engine.close()

    def _load(self, number: int, stop: threading.Event) -> None:
        vain = 0
        while not stop.is_set():
            try:
                built = self.make(number)
            except Exception as error:
                with self.lock:
                    self.trouble_since = self.trouble_since or time.monotonic()
                pause = pause_after(vain)
                vain += 1
                log.error("engine %d: it did not load (%s); the next try follows in %g s", number, error, pause)
                stop.wait(pause)
                continue
            with self.lock:
                wanted = not stop.is_set()
                if wanted:
                    self.coming.discard(number)
                    self.made.append((number, built))
                    self.trouble_since = None
                    self.arriving += 1
            if not wanted:
                built.engine.close()
                return
            log.info("engine %d has loaded again", number)
            try:
                self.come()
            finally:
                with self.lock:
                    self.arriving -= 1
            return
