"""A simulated GPU, to prove what can be proved without a real one. Owns: tensors without numbers, launches that are
noted instead of made, and recordings that are checked. `ahead_worker.py` uses it to compile kernels before a GPU is
used; bench/gpu_compile.py uses it to check models.

Everything between a request and a launch runs as on the device: the engine, plans in flight, recorded steps, which
kernel is chosen and what it is specialised on. Tensors are torch's "meta" tensors, and asking one for a number raises.
So a step that waits for the device where it must not is found. A recording must not cross devices, nor read memory that
is given back later or that another recording makes. Results are made up: every token is the same.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from tokenmill.device.gpu import Gpu

_META = torch.device("meta")
_IS_CUDA = torch._C.TensorBase.__dict__["is_cuda"].__get__
TOKEN = 7
"""What every step chooses."""


@dataclass(slots=True)
class Kernel:
    """One kernel as it would be compiled."""

    name: str
    function: Any
    key: str
    options: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    phase: str
    grid: tuple[int, ...]
    new_arguments: bool = True
    """No kernel before it takes arguments of these types, so that what launches one of them launches it, too."""

    def known(self) -> dict[str, Any]:
        """What is fixed when it is compiled, by name."""
        names = [parameter.name for parameter in self.function.params]
        return {names[place[0]]: value for place, value in self.constants.items()}


@dataclass(slots=True)
class Capture:
    """A recording: memory that was taken in it, and memory that it reads from elsewhere (with who reads it)."""

    name: str
    graph: weakref.ref[Any]
    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    used: dict[int, tuple[StorageWeakRef, str]] = field(default_factory=dict)
    launches: int = 0


class Standin:
    """What has happened on the device that is not there."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[Any, str], Kernel] = {}
        self.arguments: set[Any] = set()
        self.captures: list[Capture] = []
        self.capture: Capture | None = None
        self.phase = "start"
        self.launches = 0
        self.problems: list[str] = []
        self.fallbacks: dict[str, int] = {}
        self.found: Callable[[Kernel], None] = lambda kernel: None
        """Is told of every new kernel."""
        self.noted: Callable[[str], None] | None = None
        """Is told what torch would launch."""
        self._bases: dict[int, tuple[int, StorageWeakRef]] = {}
        self._next = 1 << 40

    def problem(self, text: str) -> None:
        """Note it once."""
        if text not in self.problems:
            self.problems.append(text)

    def address(self, tensor: torch.Tensor) -> int:
        """Where it would lie: memory begins at multiples of 512, as torch takes it."""
        if tensor.device.type != "meta":
            return int(torch._C.TensorBase.data_ptr(tensor))
        storage = tensor.untyped_storage()
        found = self._bases.get(storage._cdata)
        if found is None or found[1].expired():
            found = self._bases[storage._cdata] = (self._next, StorageWeakRef(storage))
            self._next += (storage.nbytes() + 1023) // 512 * 512
        return found[0] + int(tensor.storage_offset()) * tensor.element_size()

    def launch(self, function: Any, arguments: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> None:
        """In place of JITFunction.run."""
        options |= {"debug": False, "instrumentation_mode": ""}
        _, keys, _, backend, binder = function.device_caches[0]
        bound, specialised, made = binder(*arguments, **options)
        key = compute_cache_key(keys, specialised, made)
        name = f"{function.fn.__module__.rsplit('.', 1)[-1]}.{function.fn.__name__}"
        grid = tuple(grid(bound) if callable(grid) else grid)
        self.launches += 1
        if not all(0 < count <= most for count, most in zip(grid, ((1 << 31) - 1, 65535, 65535), strict=False)):
            self.problem(f"{name}: a grid of {grid}")
        for tensor in _tensors(bound.values()):
            if tensor.device.type != "meta":
                self.problem(f"{name}: a tensor on the host")
            if self.capture is not None:
                self.reads(tensor, name)
        if self.capture is not None:
            self.capture.launches += 1
        if (function, key) not in self.kernels:
            made, signature, constants, attributes = function._pack_args(backend, options, bound, specialised, made)
            takes = tuple(signature.items()), tuple(sorted(constants))
            new = takes not in self.arguments or any(str(kind).startswith("tensordesc") for kind in signature.values())
            self.arguments.add(takes)
            kernel = Kernel(name, function, key, made, signature, constants, attributes, self.phase, grid, new)
            self.kernels[function, key] = kernel
            self.found(kernel)

    def reads(self, tensor: torch.Tensor, who: str) -> None:
        """A recording reads it."""
        assert self.capture is not None
        storage = tensor.untyped_storage()
        made = self.capture.made.get(storage._cdata)
        if made is None or made.expired():
            self.capture.used.setdefault(storage._cdata, (StorageWeakRef(storage), who))

    def check_memory(self) -> None:
        """Recordings that are still there read what still exists, and nothing that another one computes."""
        gc.collect()
        held = [capture for capture in self.captures if capture.graph() is not None]
        for i, capture in enumerate(held):
            for place, (storage, who) in capture.used.items():
                if storage.expired():
                    self.problem(f"{who}: a recording ({capture.name}) reads memory that was given back since")
                for other in held[:i]:
                    if place in other.made and not other.made[place].expired() and not storage.expired():
                        self.problem(f"{who}: a recording ({capture.name}) reads what {other.name} makes")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(getattr(value, "base", None), torch.Tensor):  # a descriptor
            yield value.base
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _is_there(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _to_meta(value: Any) -> Any:
    cuda = value.type == "cuda" if isinstance(value, torch.device) else str(value).startswith("cuda")
    return _META if cuda and isinstance(value, (torch.device, str)) else value


class _Functions(TorchFunctionMode):
    """cuda means meta; asking a tensor for a number outside a recording gives `number`, if that is set. Tensors without
    numbers are equal: weights say by it that numbers of theirs can be held in fewer bits."""

    def __init__(self, number: float | None) -> None:
        super().__init__()
        self.number = number

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _IS_CUDA:
            return args[0].device.type == "meta"
        if func is torch.Tensor.item and args[0].device.type == "meta" and self.number is not None:
            return self.number
        if func is torch.equal and args[0].device.type == "meta":
            return True
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _to_meta(kwargs["device"])}
        if func in (torch.Tensor.to, torch.Tensor.new_zeros, torch.Tensor.new_empty):
            args = tuple(_to_meta(a) for a in args)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """What torch itself would launch."""

    def __init__(self, standin: Standin) -> None:
        super().__init__()
        self.standin = standin

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        capture = self.standin.capture
        if self.standin.noted is not None and not func.is_view:
            shapes = [f"{t.dtype}{list(t.shape)}" for t in tree_leaves(out) if _is_there(t)]
            if shapes:
                self.standin.noted(f"{func}{shapes}")
        if capture is not None:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            places = {t.device.type for t in made} | {t.device.type for t in given if t.ndim}
            if len(places) > 1:
                self.standin.problem(f"{func}: between host and device within a recording")
            known = {t.untyped_storage()._cdata for t in given}
            for t in made:
                if t.untyped_storage()._cdata not in known:
                    capture.made[t.untyped_storage()._cdata] = StorageWeakRef(t.untyped_storage())
            for t in given:
                self.standin.reads(t, str(func))
        return out


class _Driver:
    def __init__(self, device: Gpu) -> None:
        self.target = GPUTarget("cuda", 10 * device.capability[0] + device.capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class _Compiler(types.ModuleType):
    """In place of torch's compiler, which takes seconds to import, until more is asked of it than to stay out."""

    def disable(self, function: Any = None, *args: Any, **kwargs: Any) -> Any:
        """It is out anyway."""
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _leave_out_compiler() -> None:
    """Operations on tensors without numbers import it to tell it that they are not to be compiled."""
    name = "torch._dynamo"
    if name not in sys.modules:
        sys.modules[name] = torch._dynamo = _Compiler(name)


class _Nothing:
    """A stream, an event: order is not looked at."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0.0


def _graphs(standin: Standin) -> type:
    class Graph:
        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            assert standin.capture is None
            standin.capture = Capture(f"{standin.phase} {len(standin.captures)}", weakref.ref(self))

        def capture_end(self) -> None:
            assert standin.capture is not None
            standin.captures.append(standin.capture)
            standin.capture = None

        def replay(self) -> None: ...

    return Graph


class _Read:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.count = tensor.shape[0]

    def wait(self) -> _Read:
        return self

    def tolist(self) -> list[int]:
        return [TOKEN] * self.count


@contextlib.contextmanager
def installed(
    *, device: Gpu, readers: Sequence[tuple[Any, str]], number: float | None = None, checks: bool = True
) -> Iterator[Standin]:
    """For the rest of this process torch.cuda and Triton mean the stand-in; within, new tensors do, too.

    readers: (module, name) of classes that bring numbers to the host. checks: look at what torch would launch; without
    it kernels are found sooner, and of problems less is seen."""
    standin, cuda = Standin(), torch.cuda

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        standin.launch(function, args, grid, options)

    properties = types.SimpleNamespace(
        shared_memory_per_block_optin=device.shared_memory, multi_processor_count=device.processors,
        major=device.capability[0], minor=device.capability[1],
        name=device.name, L2_cache_size=device.cache, total_memory=device.memory,
    )  # fmt: skip
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": device.capability,
        "get_device_name": device.name, "get_device_properties": properties,
        "mem_get_info": (device.free, device.memory), "graph_pool_handle": 1,
        "max_memory_allocated": 3 << 30, "memory_allocated": 1 << 30, "max_memory_reserved": 3 << 30,
        "set_device": None, "reset_peak_memory_stats": None, "synchronize": None, "empty_cache": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
    patches: list[tuple[Any, str, Any]] = [
        (cuda, "Stream", _Nothing), (cuda, "Event", _Nothing), (cuda, "current_stream", _Nothing),
        (cuda, "stream", lambda stream: contextlib.nullcontext()), (cuda, "CUDAGraph", _graphs(standin)),
        (torch.Tensor, "pin_memory", lambda self, *args: self), (JITFunction, "run", run),
        (torch.Tensor, "data_ptr", lambda self: standin.address(self)),
        *((owner, name, _Read) for owner, name in readers),
    ]  # fmt: skip
    for owner, name, made in patches:
        setattr(owner, name, made)
    driver.set_active(_Driver(device))
    _leave_out_compiler()
    with _Functions(number), _Operations(standin) if checks else contextlib.nullcontext():
        yield standin
