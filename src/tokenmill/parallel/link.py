"""How hidden states get from one stage to the next. Owns: the link of one rank to its neighbours on a CPU, and none.

For every plan a stage takes one message from the stage before it and gives one to the stage behind it, whatever
becomes of the plan: a step that failed gives word of that. So nothing needs to be brought together again afterwards.
Must not know: plans, layers, processes.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

import torch
from torch import Tensor

_HEAD = struct.Struct(">q")
_FAILED = -1
_BUFFER = 4 << 20
STAGE_FAILED = "an earlier stage failed this step"
"""What a stage says that was to go on from a failed one."""


class Link(Protocol):
    """One rank's connection to the stages before and behind it. For each plan: begin, take before the layers, give
    after them, end."""

    def begin(self, tokens: int) -> None:
        """A plan of so many tokens follows."""
        ...

    def take(self) -> None:
        """Fill the inbox with the states of the stage before; raises if that stage has failed."""
        ...

    def give(self, x: Tensor) -> None:
        """Send x [tokens, hidden] to the stage behind."""
        ...

    def end(self) -> None:
        """Take and give whatever the plan has left out."""
        ...


class NoLink:
    """The link of a model that is not split into stages."""

    def begin(self, tokens: int) -> None:
        """Nothing comes."""

    def take(self) -> None:
        """Nothing comes."""

    def give(self, x: Tensor) -> None:
        """Nobody takes it."""

    def end(self) -> None:
        """Nothing is open."""


class PlannedLink:
    """The base of links between stages: each plan takes once and gives once."""

    def __init__(self, *, takes: bool, gives: bool) -> None:
        self.takes, self.gives = takes, gives
        self.tokens = 0
        self.to_take = self.to_give = False

    def begin(self, tokens: int) -> None:
        """A plan of so many tokens follows."""
        self.tokens, self.to_take, self.to_give = tokens, self.takes, self.gives

    def take(self) -> None:
        """Fill the inbox, once for each plan."""
        if self.to_take:
            self.to_take = False
            self._take()

    def give(self, x: Tensor | None) -> None:
        """Send x, once for each plan; None: there is nothing to send."""
        if self.to_give:
            self.to_give = False
            self._give(x)

    def end(self) -> None:
        """Drop what was not taken, and tell the stage behind if nothing comes."""
        try:
            self.take()
        except RuntimeError:
            pass  # reported where the plan failed
        finally:
            self.give(None)

    def _take(self) -> None:
        raise NotImplementedError

    def _give(self, x: Tensor | None) -> None:
        raise NotImplementedError


class SocketLink(PlannedLink):
    """A link between processes of one machine. `before`, `behind`: inherited sockets. inbox [most tokens, hidden]."""

    def __init__(self, before: int | None, behind: int | None, inbox: Tensor) -> None:
        super().__init__(takes=before is not None, gives=behind is not None)
        self.before = None if before is None else _own(before)
        self.behind = None if behind is None else _own(behind)
        self.inbox = inbox

    def _take(self) -> None:
        assert self.before is not None
        head = bytearray(_HEAD.size)
        _fill(self.before, memoryview(head))
        size = _HEAD.unpack(head)[0]
        if size == _FAILED:
            raise RuntimeError(STAGE_FAILED)
        place = self.inbox[: self.tokens]
        assert size == place.nbytes, "stages disagree about a step's tokens"
        _fill(self.before, _bytes_of(place))

    def _give(self, x: Tensor | None) -> None:
        assert self.behind is not None
        if x is None:
            self.behind.sendall(_HEAD.pack(_FAILED))
            return
        assert x.dtype == self.inbox.dtype, "stages exchange the compute type"
        self.behind.sendall(_HEAD.pack(x.nbytes))
        self.behind.sendall(_bytes_of(x.contiguous()))


def connect() -> tuple[int, int]:
    """Make the two ends of a link, for a stage and the one behind it."""
    one, other = socket.socketpair()
    for end in (one, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return one.detach(), other.detach()


def _own(file: int) -> socket.socket:
    found = socket.socket(fileno=file)
    found.setblocking(True)
    return found


def _bytes_of(x: Tensor) -> memoryview:
    return x.view(torch.uint8).view(-1).numpy().data


def _fill(sock: socket.socket, place: memoryview) -> None:
    while place:
        count = sock.recv_into(place)
        if not count:
            raise RuntimeError("the stage before is gone")
        place = place[count:]
