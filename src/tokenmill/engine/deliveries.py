"""Who hears of which request. Owns: turning token deltas into text and giving each to whoever asked for it.

The engine may be in this process or in another. Must not know: engines, how messages travel, HTTP; imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.core.request import Request, TextDelta, TokenDelta
from tokenmill.engine.outputs import OutputProcessor
from tokenmill.text.codec import Tokenizer

log = logging.getLogger("tokenmill.engine")
Hear = Callable[[TextDelta], None]


@dataclass(slots=True)
class Asked:
    """A request with outputs still to come: who receives them, and how many there are."""

    hear: Hear
    left: int


class Deliveries:
    """Takes token deltas and gives each text delta to whoever asked for it. abort: ends an output whose text has
    stopped.

    mistake: called with a request whose delivery raised an unexpected exception; other requests get their deltas."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        abort: Callable[[str, int], object],
        mistake: Callable[[str], object] | None = None,
    ) -> None:
        self.processor = OutputProcessor(tokenizer)
        self.abort = abort
        self.mistake = mistake
        self.asked: dict[str, Asked] = {}

    def add(self, request: Request, hear: Hear) -> None:
        """`hear` is called with every delta of this request from now on."""
        self.processor.add(request)
        self.asked[request.id] = Asked(hear, request.params.num_outputs)

    def drop(self, request_id: str) -> None:
        """Deliver nothing more of this request."""
        self.processor.drop(request_id)
        self.asked.pop(request_id, None)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """Abort outputs that a stop string has ended, then deliver all text."""
        texts = self._texts(deltas)
        for request_id, index in self.processor.stopped:
            self.safely(request_id, self.abort, request_id, index)
        self.processor.stopped.clear()
        for delta in texts:
            asked = self.asked.get(delta.request_id)
            if asked is None:
                continue
            if delta.finish_reason is not None:
                asked.left -= 1
                if not asked.left:
                    self.drop(delta.request_id)
            try:  # not `safely`, because this runs for every delta
                asked.hear(delta)
            except Exception:
                self._note_mistake(delta.request_id)

    def _texts(self, deltas: list[TokenDelta]) -> list[TextDelta]:
        try:
            return self.processor.process(deltas)
        except Exception:
            if self.mistake is None:
                raise
            log.exception("a step's texts could not be made together")
        texts: list[TextDelta] = []
        for delta in deltas:
            self.safely(delta.request_id, lambda one=delta: texts.extend(self.processor.process([one])))
        return texts

    def safely(self, request_id: str, work: Callable[..., object], *args: object) -> None:
        """Do work for one request; if it raises an unexpected exception, call `mistake`."""
        try:
            work(*args)
        except Exception:
            self._note_mistake(request_id)

    def _note_mistake(self, request_id: str) -> None:
        """Call it while an exception is handled: reports it to `mistake`, or else raises it to the caller."""
        if self.mistake is None:
            raise
        self.mistake(request_id)
