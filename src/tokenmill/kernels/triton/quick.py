"""A shorter way from a kernel's call to its launch. Owns: what calls are told apart by, and what was compiled for them.

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


@dataclass(slots=True)
class Ready:
    """A compiled kernel, and what its launcher wants beside the arguments."""

    kernel: Any
    launch: Callable[..., None]
    function: Any
    cooperative: bool
    dependent: bool
    packed: Any


Tell = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
"""Device and arguments -> what the call is told apart by, and what the launcher gets for each parameter."""


@dataclass(slots=True)
class Form:
    """Calls of one function that name the same arguments. kinds: of each argument as it is given; order: for each
    parameter the argument that it gets (None: its default, a constant); ways: by the arguments' types how calls are
    told apart, and what was compiled for each (None: such a call cannot take the short way)."""

    kinds: tuple[int, ...]
    order: tuple[int | None, ...]
    ways: dict[tuple[type, ...], tuple[Tell, dict[Any, Ready | None]]] = field(default_factory=dict)

    def way(self, types: tuple[type, ...]) -> tuple[Tell, dict[Any, Ready | None]]:
        """For arguments of these types."""
        found = self.ways.get(types)
        if found is None:
            found = self.ways[types] = make_tell(self.kinds, self.order, types), {}
        return found


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


def make_tell(kinds: tuple[int, ...], order: tuple[int | None, ...], types: tuple[type, ...]) -> Tell:
    """As source text, like Triton's own: in a loop the questions would cost more than the answers."""
    key, lines = ["device"], []
    passed = {}
    for i, (kind, of) in enumerate(zip(kinds, types, strict=True)):
        passed[i] = f"v{i}"
        if kind == _CONSTANT:
            key.append(f"v{i}")
            passed[i] = "None"
        elif issubclass(of, Tensor):
            lines.append(f"    p{i} = v{i}.data_ptr()")
            key += [f"v{i}.dtype", f"not p{i} & 15"]
            passed[i] = f"p{i}"
        elif of is int:  # 32 bits, 64 bits, more
            key.append(f"v{i}.bit_length() >> 5")
            if kind == _SPECIAL:
                key += [f"v{i} == 1", f"not v{i} & 15"]
        elif of is not type(None) and of is not bool and of is not float:  # a descriptor of a tensor
            key += [f"v{i}.base.dtype", f"tuple(v{i}.block_shape)", f"len(v{i}.shape)", f"getattr(v{i}, 'layout', 0)"]
    given = ", ".join(f"v{i}" for i in range(len(kinds)))
    handed = "".join(f"{'None' if place is None else passed[place]}, " for place in order)
    text = "\n".join([f"def tell(device, {given}):", *lines, f"    return ({', '.join(key)},), ({handed})"])
    made: dict[str, Any] = {}
    exec(text, made)
    tell: Tell = made["tell"]
    return tell


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
    values = (*args, *kwargs.values())
    try:
        tell, ready = form.way(tuple(map(type, values)))
        key, passed = tell(device, *values)
        found = ready.get(key, form)
    except (TypeError, AttributeError):  # a constant that cannot be looked up, an argument of another kind
        return _triton(self, *args, grid=grid, warmup=warmup, **kwargs)
    if found is None or found is form:
        kernel = _triton(self, *args, grid=grid, warmup=warmup, **kwargs)
        if found is form and kernel is not None:
            ready[key] = remember(kernel)
        return kernel
    stream = torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]
    found.launch(
        *grid, *(1, 1)[len(grid) - 1 :], stream, found.function, found.cooperative, found.dependent, None, None,
        found.packed, None, None, None, *passed,
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
