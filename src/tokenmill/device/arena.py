"""GPU memory that goes and comes back at the same addresses. Owns: reserved addresses, the pages behind them, and
tensors cut from them, using the virtual memory calls of NVIDIA's driver.

Recorded steps, tensor maps and views hold addresses. So the addresses stay while the pages are given to others.
Must not know: what lies in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenmill.core.errors import UserError

ALIGN = 512
"""Every tensor begins at a multiple of this many bytes."""
PIECE = 1 << 30
"""Pages are requested from the driver in pieces of at most this many bytes."""
HOST_PIECE = 1 << 28
"""Host copies consist of pieces of this size, because torch rounds pinned memory up to powers of two."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class Pages(Protocol):
    """Addresses and pages of one device."""

    device: torch.device
    granule: int
    """Sizes are multiples of it."""

    def reserve(self, size: int) -> int: ...
    def free(self, address: int, size: int) -> None: ...
    def map(self, address: int, size: int) -> None:
        """Map new pages at these addresses."""
        ...

    def unmap(self, address: int, size: int) -> None: ...
    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        """A tensor of the bytes at these addresses; it keeps the owner alive."""
        ...

    def wait(self) -> None:
        """Wait until the device has done all its work."""
        ...

    def trim(self) -> None:
        """Give memory that torch has freed back to the device."""
        ...


class CudaPages:
    """See Pages."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self.cuda: Any = ctypes.CDLL("libcuda.so.1")
        self.properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, self.index))
        self.wait()
        granule = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(self.properties), 0)
        self.granule = granule.value

    def _call(self, name: str, *given: Any) -> None:
        code = getattr(self.cuda, name)(*given)
        if code == 2:
            raise UserError(f"cuda:{self.index} has no room for a model that wakes: something else took its memory.")
        if code:
            raise RuntimeError(f"{name} failed with CUDA error {code}")

    def reserve(self, size: int) -> int:
        found = ctypes.c_uint64()
        nowhere, flags = ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve", ctypes.byref(found), ctypes.c_size_t(size), ctypes.c_size_t(0), nowhere, flags
        )
        return found.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def map(self, address: int, size: int) -> None:
        handle, where, zero = ctypes.c_uint64(), ctypes.c_uint64(address), ctypes.c_uint64(0)
        length = ctypes.c_size_t(size)
        self._call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(self.properties), zero)
        try:
            self._call("cuMemMap", where, length, ctypes.c_size_t(0), handle, zero)
        finally:
            self._call("cuMemRelease", handle)  # the map keeps the pages
        access = _Access(_Location(_ON_DEVICE, self.index), _READ_WRITE)
        try:
            self._call("cuMemSetAccess", where, length, ctypes.byref(access), ctypes.c_size_t(1))
        except BaseException:  # nobody knows of these pages yet, and nothing else could be mapped there
            self.unmap(address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def tensor(self, address: int, size: int, owner: object) -> Tensor:
        return torch.as_tensor(_Bytes(address, size, owner), device=torch.device("cuda", self.index))

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)  # makes the device's context this thread's, too

    def trim(self) -> None:
        torch.cuda.empty_cache()


class _Bytes:
    """Bytes at an address, described as libraries exchange arrays (`__cuda_array_interface__`)."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Arena:
    """One range of addresses. Tensors are cut from its beginning on, and never freed one by one."""

    def __init__(self, pages: Pages, most: int) -> None:
        """most: bytes of addresses to reserve; addresses cost nothing."""
        self.pages = pages
        self.size = _up(most, pages.granule)
        self.address = pages.reserve(self.size)
        self.used = 0
        self.pieces: list[tuple[int, int]] = []
        """(address, size) of what is mapped."""
        self.awake = True
        self.host: list[Tensor] | None = None
        """A copy of its contents, while the copy is valid."""
        self._spare: list[Tensor] = []
        ending = weakref.finalize(self, _release, pages, self.address, self.size, self.pieces)
        ending.atexit = False  # the driver may be gone by then

    def take(self, size: int) -> Tensor:
        """Take this many bytes, with undefined contents."""
        assert self.awake, "nothing is taken while it sleeps"
        start = _up(self.used, ALIGN)
        if start + size > self.size:
            raise UserError("the model is larger than the device's memory.")
        self._grow(start + size)
        self.used = start + size
        return self.pages.tensor(self.address + start, size, self)

    def zeros(self, count: int, size: int, device: str) -> Tensor:
        """Zeroed bytes [count, size] (see kvcache/zeros.py)."""
        return self.take(max(1, count * size))[: count * size].zero_().view(count, size)

    @property
    def mapped(self) -> int:
        """Bytes of device memory that it holds."""
        return sum(size for _, size in self.pieces)

    def save(self) -> None:
        """Copy all used bytes to pinned host memory, unless there is a valid copy."""
        if self.host is not None or not self.used:
            return
        whole = self.pages.tensor(self.address, self.used, self)
        try:
            host = self._spare or [_pinned(part) for part in whole.split(HOST_PIECE)]
        except RuntimeError as error:
            raise UserError(
                f"the host has no {self.used >> 20} MiB of memory for a sleeping model's weights: level 2 needs none."
            ) from error
        for part, copy in zip(whole.split(HOST_PIECE), host, strict=True):
            copy.copy_(part, non_blocking=True)
        self.pages.wait()
        self.host, self._spare = host, []

    def changed(self) -> None:
        """The copy is no longer valid; its memory is kept for the next one."""
        if self.host is not None:
            self._spare, self.host = self.host, None

    def forget(self) -> None:
        """Give the copy's memory back."""
        self.host, self._spare = None, []

    @property
    def host_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(part.nbytes for part in self.host or self._spare)

    def drop(self) -> None:
        """Give the pages back. The tensors must not be used until `restore`."""
        if not self.awake:
            return
        self.pages.wait()
        for address, size in self.pieces:
            self.pages.unmap(address, size)
        self.pieces.clear()
        self.awake = False

    def restore(self) -> None:
        """Map new pages and fill them with the saved contents, or with zeros."""
        if self.awake:
            return
        self.pages.wait()
        try:
            self._grow(self.used)
        except BaseException:
            for address, size in self.pieces:
                self.pages.unmap(address, size)
            self.pieces.clear()
            raise
        self.awake = True
        if not self.used:
            return
        whole = self.pages.tensor(self.address, self.used, self)
        if self.host is None:
            whole.zero_()
        else:
            for part, copy in zip(whole.split(HOST_PIECE), self.host, strict=True):
                part.copy_(copy, non_blocking=True)
        self.pages.wait()

    def _grow(self, size: int) -> None:
        """Map pages for the first `size` bytes."""
        done = self.mapped
        while done < size:
            piece = min(_up(size - done, self.pages.granule), max(PIECE, self.pages.granule))
            self.pages.map(self.address + done, piece)
            self.pieces.append((self.address + done, piece))
            done += piece


def relocate(tensors: Iterable[Tensor], arena: Arena) -> int:
    """Move the storages of these tensors into the arena; the tensors themselves, which others hold, name their new
    place. Every view of a storage must be among them. -> bytes."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    moved = trimmed = 0
    for place, views in by_storage.items():
        old = views[0].untyped_storage()
        if not place or not old.nbytes():
            continue
        if moved - trimmed > PIECE:
            arena.pages.trim()
            trimmed = moved
        whole = torch.empty(0, dtype=torch.uint8, device=views[0].device).set_(old, 0, (old.nbytes(),), (1,))
        new = arena.take(old.nbytes())
        new.copy_(whole)
        for view in views:
            view.set_(new.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        moved += new.nbytes
    arena.pages.wait()
    return moved


def _release(pages: Pages, address: int, size: int, pieces: list[tuple[int, int]]) -> None:
    with contextlib.suppress(RuntimeError):  # the device's context may be gone
        pages.wait()
        for each, length in pieces:
            pages.unmap(each, length)
        pages.free(address, size)


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.uint8, pin_memory=like.is_cuda)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
