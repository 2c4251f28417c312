"""A device whose tensors lie on the host, for tests of code that runs on GPUs. Owns: refusing what a GPU refuses, an
operation on tensors of two devices. Must not know: what computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "lazy:0"
"""A name that torch knows and can guard, and that nobody uses."""
BETWEEN = ("copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_")
"""Operations on tensors of two devices: copies, and places that a tensor of the host may name."""


class Distant(Tensor):
    """A tensor of the device."""

    near: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor) -> Distant:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=NAME
        )
        made.near = near
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the operation makes, on the device that torch would put it on."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    distant = {id(leaf.near): leaf for leaf in given if isinstance(leaf, Distant)}
    name, target = func._schema.name.split("::")[1], kwargs.get("device")
    if distant and name not in BETWEEN and any(leaf.ndim and not isinstance(leaf, Distant) for leaf in given):
        raise RuntimeError(f"{name}: tensors of two devices: {[(str(leaf.device), *leaf.shape) for leaf in given]}")
    if name in BETWEEN and name != "_to_copy":
        away = isinstance(args[0], Distant)
    else:
        away = bool(distant) if target is None else torch.device(target) == torch.device(NAME)
    if target is not None:
        kwargs = {**kwargs, "device": "cpu"}

    def opened(leaf: Any) -> Any:
        return leaf.near if isinstance(leaf, Distant) else leaf

    def closed(leaf: Any) -> Any:
        if not away or not isinstance(leaf, Tensor):
            return leaf
        return distant[id(leaf)] if id(leaf) in distant else Distant(leaf)  # what is changed in place stays itself

    with torch.inference_mode(False):  # a view of a tensor that was made outside must not be made inside
        return tree_map(closed, func(*tree_map(opened, args), **tree_map(opened, kwargs)))


class _Operations(TorchDispatchMode):
    """Tensors that are made there out of nothing, or brought there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and bringing in the compiler takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What torch does below its operations: tensors of numbers, and numbers of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and isinstance(args[0], Distant):
            return args[0].near.tolist()
        if func is torch.tensor and (target := kwargs.pop("device", None)) is not None:
            return torch.tensor(*args, **kwargs).to(target)
        return func(*args, **kwargs)


@contextmanager
def distant_device() -> Iterator[str]:
    """The device's name, while it exists."""
    with _Operations(), _Functions():
        yield NAME
