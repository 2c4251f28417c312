"""Signals while an engine's books do not agree. Owns: holding them back until they do.

A Python program may raise an exception from any signal's handler, as Ctrl-C does, between any two lines. In the middle
of a step that would leave a plan half written down. So handlers run between steps; the second signal of its kind breaks
in, and so does one that has waited very long, because a step may hang. Must not know: engines.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of handlers, which takes 60 us a step
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
NUMBERS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]
"""Those whose handlers may well raise. Profilers have others."""
PATIENCE_S = 60.0


class HeldSignals:
    """`with` it, handlers wait in the main thread; no other thread ever runs them. It may be entered again from
    within, by one thread at a time."""

    def __init__(self) -> None:
        self.broke_in = False
        """A signal did not wait: what was being done is half done."""
        self._depth = 0
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: dict[int, FrameType | None] = {}
        self._hold = self._hear  # one object, so that it can be recognised
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if not self._depth:
                self._take()
            self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if not self._depth:
            for number, handler in self._before.items():
                if _signal.getsignal(number) is self._hold:
                    _signal.signal(number, handler)
            self.let_in()

    def let_in(self) -> None:
        """Now the books agree: run the handlers of signals that have come."""
        while self._came:
            self._stop_timer()
            number, frame = self._came.popitem()
            self._before[number](number, frame)

    def _take(self) -> None:
        for number in NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler) and handler is not self._hold:
                self._before[number] = handler
                _signal.signal(number, self._hold)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._depth:  # on the way in or out
            self._before[number](number, frame)
        elif number in self._came:
            self._came.pop(number)
            self._stop_timer()  # or this signal would come once more, long after
            self.broke_in = True
            self._before[number](number, frame)
        else:
            self._came[number] = frame
            if self._timer is None:
                self._timer = threading.Timer(PATIENCE_S, os.kill, (os.getpid(), number))
                self._timer.daemon = True
                self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
