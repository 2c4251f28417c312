"""What a stream's options ask for. Owns: when a chunk is due, and whether chunks carry usage.

Must not know: shapes of chunks.
"""

from __future__ import annotations

from tokenmill.core.request import TextDelta
from tokenmill.server.openai.schemas import SamplingFields


class StreamPace:
    """The pace of one stream, for all its choices."""

    def __init__(self, body: SamplingFields, *, usage_forced: bool) -> None:
        options = body.stream_options
        self.usage_at_end = usage_forced or bool(options and options.usage_at_end)
        self.usage_always = usage_forced or (self.usage_at_end and bool(options and options.continuous_usage_stats))
        self.interval = body.stream_interval or 1
        self.said = 0
        """Tokens shown so far. Usage counts these while the stream runs."""
        self._held: dict[int, list[TextDelta]] = {}

    def due(self, index: int, delta: TextDelta) -> list[TextDelta]:
        """The deltas of a choice that the next chunk shows. Empty: it is not due before more tokens have come."""
        held = self._held.setdefault(index, [])
        held.append(delta)
        gathered = sum(len(each.token_ids) for each in held)
        if delta.finish_reason is None and gathered < self.interval and not (gathered == 0 and delta.text):
            return []
        del self._held[index]
        self.said += gathered
        return held
