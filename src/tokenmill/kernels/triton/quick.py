"""A shorter way from a kernel's call to its launch. Owns: what a call may be told apart by, and what was compiled for it.

Triton looks at each argument anew in order to know what a kernel is compiled for, about 5 us for a tensor, and a step
that is not recorded makes a thousand launches. Here a call is told apart by less: by what Triton would specialise it
on (types, whether addresses and whole numbers are multiples of 16, ones, all constants), found in one pass. The first
call of its kind takes Triton's way; later ones hand addresses straight to the launcher that it made. Tested to tell
apart whatever Triton does. Only for the version of Triton that it was written for: others keep their own way.
Must not know: kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

VERSION = "3.6."
_CONSTANT, _SPECIAL, _TYPED = range(3)
"""What an argument is: known when the kernel is compiled, also an option; told apart by type and divisibility; by type
alone."""
_INT32 = 1 << 31


@dataclass(slots=True)
class Ready:
    """A compiled kernel, and what its launcher wants beside the arguments."""

    kernel: Any
    launch: Callable[..., None]
    function: Any
    cooperative: bool
    dependent: bool
    packed: Any


@dataclass(slots=True)
class Form:
    """Calls of one function that name the same arguments. kinds: of each argument as it is given; order: for each
    parameter the argument that it gets (None: its default, a constant); ready: by what calls are told apart by. A kind
    of call that cannot take the short way has None there."""

    kinds: tuple[int, ...]
    order: tuple[int | None, ...]
    ready: dict[tuple[Any, ...], Ready | None] = field(default_factory=dict)


def form_of(function: Any, names: tuple[Any, ...]) -> Form | None:
    """names: how many arguments have none, then the others' names. None: such calls cannot take the short way."""
    count, *named = names
    parameters = {parameter.name: parameter for parameter in function.params}
    given = [*parameters][:count] + named
    if any(p.annotation_type or p.do_not_specialize_on_alignment for p in function.params if not p.is_constexpr):
        return None
    if any(name not in given and not p.is_constexpr for name, p in parameters.items()):
        return None
    kinds = []
    for name in given:
        parameter = parameters.get(name)
        constant = parameter is None or parameter.is_constexpr
        kinds.append(_CONSTANT if constant else _TYPED if parameter.do_not_specialize else _SPECIAL)
    places = {name: i for i, name in enumerate(given)}
    return Form(tuple(kinds), tuple(places.get(name) for name in parameters))


def tell_apart(kinds: tuple[int, ...], values: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What a call with these arguments is told apart by, and what the launcher gets for each."""
    key: list[Any] = []
    passed: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind == _CONSTANT:
            key.append((type(value), value) if isinstance(value, (bool, float)) else value)
            passed.append(None)
        elif isinstance(value, Tensor):
            address = value.data_ptr()
            key.append(value.dtype if address % 16 == 0 else (value.dtype,))
            passed.append(address)
        else:
            key.append(_mark(kind, value))
            passed.append(value)
    return key, passed


def _mark(kind: int, value: Any) -> Any:
    """What an argument that is no tensor is told apart by."""
    if value is None:
        return None
    if type(value) is int:
        size = 0 if -_INT32 <= value < _INT32 else 1 if value < 1 << 63 else 2
        return size if kind == _TYPED else (size, value == 1, value % 16 == 0)
    if type(value) is bool or type(value) is float:
        return type(value)
    base = getattr(value, "base", None)
    if not isinstance(base, Tensor):
        raise TypeError("an argument of another kind")
    return type(value), base.dtype, tuple(value.block_shape), len(value.shape), getattr(value, "layout", None)


def remember(kernel: Any) -> Ready | None:
    """What later calls need of a compiled kernel; None: it asks for memory at each launch, which Triton sees to."""
    kernel = kernel.result() if hasattr(kernel, "result") else kernel
    launcher = kernel.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    return Ready(
        kernel, launcher.launch, kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl,
        kernel.packed_metadata,
    )  # fmt: skip


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """In place of JITFunction.run."""
    forms = self.__dict__.setdefault("tokenmill_forms", {})
    names = (len(args), *kwargs)
    form = forms.get(names, forms)
    if form is forms:
        form = forms[names] = form_of(self, names)
    if form is None or warmup or callable(grid) or self.pre_run_hooks:
        return _triton(self, *args, grid=grid, warmup=warmup, **kwargs)
    device = torch._C._cuda_getDevice()  # type: ignore[attr-defined]
    try:
        key, passed = tell_apart(form.kinds, (*args, *kwargs.values()))
        found = form.ready.get(same := (device, *key), form)
    except TypeError:  # a constant that cannot be looked up
        return _triton(self, *args, grid=grid, warmup=warmup, **kwargs)
    if found is None or found is form:
        kernel = _triton(self, *args, grid=grid, warmup=warmup, **kwargs)
        if found is form and kernel is not None:
            form.ready[same] = remember(kernel)
        return kernel
    stream = torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]
    found.launch(
        *grid, *(1, 1)[len(grid) - 1 :], stream, found.function, found.cooperative, found.dependent, None, None,
        found.packed, None, None, None, *(None if place is None else passed[place] for place in form.order),
    )  # fmt: skip
    return found.kernel


_triton: Callable[..., Any] = JITFunction.run


def install(*, wanted: bool) -> None:
    """Have this process's kernels launched so, or as Triton does, if this is the version that is known and nobody else
    has put a way of his own there."""
    global _triton
    if not wanted and JITFunction.run is _run:
        JITFunction.run = _triton
    elif wanted and triton.__version__.startswith(VERSION) and JITFunction.run.__module__ == "triton.runtime.jit":
        _triton = JITFunction.run
        JITFunction.run = _run
