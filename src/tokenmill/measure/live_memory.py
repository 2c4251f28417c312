"""Which objects hold how much memory. Owns: the bytes that an object reaches, and the most that live at once during a
run.

It works on tensors without data, too: only sizes of storages count. Must not know: what the tensors are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quant.shape_checkpoint import Packed


class Live(TorchDispatchMode):
    """The bytes of storages that are alive, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.known = WeakTensorKeyDictionary()
        self.now = self.most = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's compiler is not used here, and excluding it would import it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor not in self.known:
                self.known[tensor] = _Holder(self, tensor)
        return out


class _Holder:
    """One tensor's hold on its storage. It ends with the tensor."""

    __slots__ = ("live", "size", "storage")

    def __init__(self, live: Live, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.live, self.storage, self.size = live, storage._cdata, storage.nbytes()
        count = live.holders.get(self.storage, 0)
        live.holders[self.storage] = count + 1
        if not count:
            live.now += self.size
            live.most = max(live.most, live.now)

    def __del__(self) -> None:
        left = self.live.holders[self.storage] - 1
        if left:
            self.live.holders[self.storage] = left
        else:
            del self.live.holders[self.storage]
            self.live.now -= self.size


def held_bytes(root: object) -> int:
    """The bytes of every tensor that the object reaches, with each storage counted once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    todo: list[Any] = [root]
    packed = 0
    while todo:
        item = todo.pop()
        if id(item) in seen or item is None or isinstance(item, (int, float, str, bytes, type, ReferenceKernels)):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage()._cdata] = item.untyped_storage().nbytes()
        elif isinstance(item, Packed):
            packed += item.nbytes
        else:
            todo.extend(_inside(item))
    return packed + sum(storages.values())


def _inside(item: Any) -> Iterable[Any]:
    """The objects to which an object refers."""
    if isinstance(item, Mapping):
        return item.values()
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    if isinstance(item, MethodType):
        return (item.__self__,)
    if isinstance(item, FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or ()]
    slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ())]
    named = [getattr(item, name, None) for name in slots if not name.startswith("__")]
    return [*named, *getattr(item, "__dict__", {}).values()]
