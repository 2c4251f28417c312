"""Driving an engine in the caller's thread. Owns: the engine's lock, and steps whose text goes to whoever asked.

LLM, programs and benchmarks step it. Whoever steps it advances everybody's requests. Must not know: prompts, HTTP.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from tokenmill.core.errors import EngineDeadError, ParameterError
from tokenmill.core.request import Request
from tokenmill.engine.steps.deliveries import Deliveries, Hear
from tokenmill.engine.steps.engine import Engine
from tokenmill.engine.steps.held_signals import HeldSignals
from tokenmill.process.home_process import HomeProcess
from tokenmill.text.codec import Tokenizer

EXIT_S = 10.0
"""How many seconds the interpreter's exit waits for a step of another thread."""


def wait_for_last_step(ending: threading.Event, engine_lock: threading.RLock) -> None:
    """Let no step run at the interpreter's exit: a daemon thread that is in native code then would end the process."""
    ending.set()
    engine_lock.acquire(timeout=EXIT_S)


class Driver:
    """An engine that callers step in turns. `stepping` refuses calls from inside a step (by a logits processor)."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self.deliveries = Deliveries(tokenizer, engine.abort)
        self.lock = threading.RLock()
        self.signals = HeldSignals()
        self.home = HomeProcess()
        self.stepping = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within this context no other thread touches the engine, and signals wait; `signals.let_in` asks for them."""
        self.home.check()  # another thread of the first process may hold the lock for good
        with self.lock:
            self._refuse_from_inside()
            with self.signals:
                yield

    def add(self, request: Request, hear: Hear, pooling: str | None = None) -> None:
        """Accept a request, or raise a UserError that says why not. pooling: how to pool an embedding."""
        with self.alone():
            self.engine.add(request, pooling)
            self.deliveries.add(request, hear)

    def begin(self, tokens: int) -> None:
        """See Engine.begin."""
        with self.alone(), self._inside():
            self.engine.begin(tokens)

    def step(self) -> None:
        """Make one step, of all requests that any caller has added."""
        with self.alone():
            with self._inside():
                deltas = self.engine.step()
            self.deliveries.deliver(deltas)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Within this context the engine is at work: what it calls cannot ask it."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def _refuse_from_inside(self) -> None:
        if self.stepping:
            raise ParameterError("This LLM is answering already: what it calls cannot ask it in between.")
        if self.signals.broke_in:
            raise EngineDeadError("A signal has ended a step of this engine in the middle: make another LLM.")

    def end(self, request_ids: Iterable[str]) -> None:
        """End requests now; whoever waits for them hears it."""
        with self.alone():
            for name in list(request_ids):
                self.deliveries.deliver(self.engine.abort(name))

    def leave(self, request_ids: Iterable[str]) -> None:
        """Drop requests that nobody waits for any more; plans in flight are committed or fail."""
        names = list(request_ids)
        with self.lock, self.signals:
            for name in names:
                self.engine.abort(name)
                self.deliveries.drop(name)
            with contextlib.suppress(Exception):
                for _ in range(len(self.engine.flying)):
                    self.deliveries.deliver(self.engine.step())
