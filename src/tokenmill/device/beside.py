"""Work on a GPU beside what its current stream computes. Owns: a second stream, and the order between both.

Must not know: what the work is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Beside:
    """A stream of its own."""

    def __init__(self, device: torch.device | str) -> None:
        self.stream = torch.cuda.Stream(device)

    def enqueue(self, work: Callable[[], object]) -> torch.cuda.Event:
        """Do this behind all that the current stream has been asked for; returns what tells its end."""
        asked, ended = torch.cuda.Event(), torch.cuda.Event()
        asked.record()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(asked)
            work()
            ended.record()
        return ended


def wait_for(event: torch.cuda.Event) -> None:
    """What the current stream is asked for from now on comes behind this."""
    torch.cuda.current_stream().wait_event(event)


def is_recording() -> bool:
    """Does the current stream record what it is asked for?"""
    return torch.cuda.is_current_stream_capturing()
