"""Work as native tapes. Owns: recording what runs, and what makes a recording impossible.

A small model's forward pass is a few dozen native calls of microseconds, and reaching each from Python costs as much
again. So the pass is recorded while it runs (`_native.Tape`); then all calls are made again at once, in the same order
on the same memory. Torch operations in between (noticed by watching torch) cut the tape into pieces, and are made again
between these. Work with an operation that cannot be made again (`torch_between.py`) is not recorded.
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
from tokenmill.kernels.cpu.torch_between import HOST, again

T = TypeVar("T")

_LINE = 64
_MEMORY = frozenset({"aten::empty", "aten::empty_like"})
_CONVERSIONS = frozenset({"aten::to", "aten::_to_copy"})


class Replay:
    """Pieces of tape, what lies between them, and everything whose addresses are on them. spilled: bytes that torch's
    operations made outside the room."""

    __slots__ = ("calls", "keep", "spilled")

    def __init__(self, calls: list[Callable[[], object]], keep: list[object], spilled: int) -> None:
        self.calls = calls
        self.keep = keep
        self.spilled = spilled

    def __call__(self) -> None:
        for call in self.calls:
            call()


def record(
    compute: Callable[[], T], bound: Callable[[], list[object]], room: Tensor | None = None
) -> tuple[T, Replay | None]:
    """What `compute` makes, and how to make it again in the same places; bound: what the backend has bound to
    addresses so far; room [bytes]: where temporary tensors are made as long as it lasts."""
    watch = _Watch(room)
    watch.tape.begin()
    try:
        with watch:
            made = compute()
    finally:
        watch.tape.end()
    watch.cut()
    if watch.other or not watch.tapes:
        return made, None
    return made, Replay(watch.calls, [made, *watch.kept, *bound()], watch.spilled)


class _Watch(TorchDispatchMode):
    """Sees every operation of torch: keeps the memory that is taken, notes what computes."""

    def __init__(self, room: Tensor | None = None) -> None:
        super().__init__()
        self.kept: list[object] = []
        self.other: set[str] = set()
        """Operations that cannot be made again."""
        self.room, self.used, self.spilled = room, 0, 0
        self.tape, self.tapes = _native.Tape(), 0
        self.calls: list[Callable[[], object]] = []

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
        if name in _MEMORY:
            return made
        if name in _CONVERSIONS and _widened(made, args[0]):  # logits: once more, so that the tape has it
            _native.widen(args[0].data_ptr(), made.data_ptr(), made.numel())
        elif name in HOST:
            self.other.add(name)
        elif func._schema.is_mutable or not _views(made, args):
            made = self._repeated(func, args, kwargs or {}, made)
        return made

    def cut(self) -> None:
        """A piece of tape ends here; the next one has yet to begin."""
        self.tape.end()
        if self.tape.size():
            self.calls.append(self.tape.replay)
            self.tapes += 1
        self.tape = _native.Tape()

    def _repeated(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> Any:
        """The result where it will be made again, in the room if it is a new one."""
        several = type(made) is not Tensor and isinstance(made, (list, tuple))
        found = list(made) if several else [made]
        if not all(isinstance(one, Tensor) for one in found):
            self.other.add(func._schema.name)
            return made
        if not func._schema.is_mutable:
            found = [self._placed(one) for one in found]
            made = type(made)(found) if several else found[0]
        call = again(func, args, kwargs, found)
        if call is None:
            self.other.add(func._schema.name)
            return made
        self.cut()
        self.tape.begin()
        self.calls.append(call)
        return made

    def _placed(self, made: Tensor) -> Tensor:
        place = None if self.room is None else self._take(made, {})
        if place is None:
            self.spilled += made.nbytes
            return made
        self.kept.append(place)
        return place.copy_(made)

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
