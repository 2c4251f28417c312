"""Work as native tapes. Owns: recording what runs, and what makes a recording impossible.

A forward pass of a small model is a few dozen native calls of microseconds each, and the way from Python to each costs
as much again. Recorded while it runs (`_native.Tape`), all calls are made again at once, in the same order on the same
memory. Work that does anything but native operations in between (seen by watching torch) is not recorded.
Must not know: what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill import _native

T = TypeVar("T")

_LINE = 64
_MEMORY = frozenset({"aten::empty", "aten::empty_like"})
_CONVERSIONS = frozenset({"aten::to", "aten::_to_copy"})


class Replay:
    """A tape and everything whose addresses are on it."""

    __slots__ = ("keep", "tape")

    def __init__(self, tape: Any, keep: list[object]) -> None:
        self.tape = tape
        self.keep = keep

    def __call__(self) -> None:
        self.tape.replay()


def record(
    compute: Callable[[], T], bound: Callable[[], list[object]], room: Tensor | None = None
) -> tuple[T, Replay | None]:
    """What `compute` makes, and how to make it again in the same places; bound: what the backend has bound to
    addresses so far; room [bytes]: where temporary tensors are made as long as it lasts."""
    tape, watch = _native.Tape(), _Watch(room)
    tape.begin()
    try:
        with watch:
            made = compute()
    finally:
        tape.end()
    if watch.other or tape.size() == 0:
        return made, None
    return made, Replay(tape, [made, *watch.kept, *bound()])


class _Watch(TorchDispatchMode):
    """Sees every operation of torch: keeps the memory that is taken, notes what computes."""

    def __init__(self, room: Tensor | None = None) -> None:
        super().__init__()
        self.kept: list[object] = []
        self.other: set[str] = set()
        self.room, self.used = room, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's compiler is not in play here, and to keep it out would import it (a second, mid-service)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, made = func._schema.name, None
        if name in _MEMORY and self.room is not None:
            made = self._take(args[0], kwargs or {})
        if made is None:
            made = func(*args, **(kwargs or {}))
        self.kept.append(made)
        if name in _CONVERSIONS and _widened(made, args[0]):  # logits: once more, so that the tape has it
            _native.widen(args[0].data_ptr(), made.data_ptr(), made.numel())
        elif name not in _MEMORY and (func._schema.is_mutable or not _views(made, args)):
            self.other.add(name)
        return made

    def _take(self, like: Any, options: dict[str, Any]) -> Tensor | None:
        """The next part of the room, for a shape or as another tensor; None: it is too small, or not meant for this."""
        dtype = options.get("dtype")
        if isinstance(like, Tensor):
            if not like.is_contiguous() or like.device.type != "cpu":
                return None
            like, dtype = list(like.shape), dtype or like.dtype
        size = math.prod(like) * (dtype or torch.get_default_dtype()).itemsize
        start, self.used = self.used, self.used + -(-size // _LINE) * _LINE
        if self.room is None or self.used > self.room.numel() or str(options.get("device", "cpu")) != "cpu":
            return None
        return self.room[start : start + size].view(dtype or torch.get_default_dtype()).view(like)


def _widened(made: Tensor, x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and made.dtype == torch.float32 and x.is_contiguous() and made.is_contiguous()


def _views(made: Any, args: Any) -> bool:
    """Is the result another look at the first argument, or are these several?"""
    if isinstance(made, (list, tuple)):
        return bool(made) and all(_views(one, args) for one in made)
    if not isinstance(made, Tensor) or not args or not isinstance(args[0], Tensor):
        return False
    return made.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
