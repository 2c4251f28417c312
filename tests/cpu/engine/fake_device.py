"""A device that is none of ours, made of the CPU: what torch calls a private backend, in Python.

Tensors on it hold a tensor of the CPU. It refuses what real ones refuse: tensors of two devices in one operation,
float64 (Apple's GPUs have none), and reading from the host without a copy. Once made, it stays for the whole process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

NAME = "fake"
_MIXED = ("aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::_copy_from")
"""Operations that take a tensor of the host beside their own."""


class FakeTensor(torch.Tensor):
    """A tensor on the device; `inner` lies on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> FakeTensor:
        if inner.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{NAME} has no float64")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.data_ptr):
            return func(args[0].inner)
        if func in (Tensor.numpy, Tensor.pin_memory):
            raise TypeError(f"{func.__name__}: this tensor is on {NAME}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    if func._schema.name not in _MIXED:
        for x in given:
            if not isinstance(x, FakeTensor) and x.dim():
                raise RuntimeError(f"{func}: tensors of two devices, {NAME} and {x.device}")
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if target is None and args and func._schema.name == "aten::copy_" and not isinstance(args[0], FakeTensor):
        return func(args[0], args[1].inner, *args[2:], **kwargs)
    out = func(*tree_map(_open, args), **tree_map(_open, kwargs))
    known = {id(x.inner): x for x in given if isinstance(x, FakeTensor)}

    def close(x: Any) -> Any:
        if not isinstance(x, Tensor) or to_host:
            return x
        return known[id(x)] if id(x) in known else FakeTensor(x)

    return tree_map(close, out)


def _open(x: Any) -> Any:
    if isinstance(x, FakeTensor):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) else x


class Module:
    """What `torch.fake` is."""

    synchronized = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        Module.synchronized += 1


_library, _direct = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")


def install() -> None:
    """`device="fake"` works from now on; to be called before the engine is imported."""
    torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment]  # such tensors refuse to be wrapped
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    for op in (torch.ops.aten._to_copy.default,):  # torch.tensor() finds no fallback for it
        _direct.impl(op, lambda *args, op=op, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    _library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
