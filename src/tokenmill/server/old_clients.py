"""Clients of HTTP/1.0, some proxies among them. They know neither chunks nor interim answers.

Owns: how an answer of unknown length reaches them. Must not know: paths, sockets.
"""

from __future__ import annotations

from typing import Any


class _UntilClosed(int):
    """The bytes that are still to come, of an answer that ends with its connection. uvicorn subtracts what it has
    sent, and asks in the end whether anything is missing."""

    def __sub__(self, sent: int) -> _UntilClosed:
        return self

    def __ne__(self, other: object) -> bool:
        return False


def answer_as_1_0(cycle: Any) -> None:
    """Have uvicorn's cycle send the answer's bytes as they are. Its connection closes afterwards in any case."""
    cycle.chunked_encoding = False
    cycle.expected_content_length = _UntilClosed(1 << 63)
    cycle.waiting_for_100_continue = False
