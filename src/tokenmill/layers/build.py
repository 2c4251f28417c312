"""What constructors of layers receive. Owns: pulling tensors by their checkpoint path, and the book of what was used.

A missing tensor names its full path, a wrong shape names both shapes, and tensors nobody asked for are listed.
Knows nothing of families: the names come from the models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.whole_tensors import AroundCheckpoint
from tokenmill.compute.adapters import AdapterSite, AdapterSites, Forms
from tokenmill.compute.forward import Kernels, KVSpec, NormSpec, RopeSpec, StateSpec, Weight
from tokenmill.compute.model import Checkpoint, Group
from tokenmill.core.errors import ModelError
from tokenmill.parallel.group import SoloGroup
from tokenmill.parallel.stages import Place, weigh
from tokenmill.quant.at_load import settle_all
from tokenmill.quant.dense import check_real
from tokenmill.quant.detect import (
    Share,
    WeightRequest,
    check_numbers,
    check_plainly_stored,
    from_dense,
    has_form,
    is_zeros_beside,
    load_stacked,
    load_weight,
    numbers,
)
from tokenmill.quant.fp8 import stacked as is_stacked
from tokenmill.quant.schemes import head_scheme

_IGNORABLE = re.compile(
    r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|(^|\.)(attn|attention)\.bias|\.(output|prob)_scale)$"
)
"""Tensors that are not read: buffers of old checkpoints that are computed here, and scales of activations, which are
rounded by scales of their own."""
_KV_SCALES = re.compile(r"\.((kv|[kvq])_(scale|zero_point)|(kv?|v|qkv)_proj\.output_scale)$")
"""Scales for K/V in 8 bits that the file's maker measured, the last ones as older files have them. Ours are computed
from what is stored, token by token."""
_KV_WISHES = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of quantization_config that ask for K/V in 8 bits."""


def _ignorable(name: str) -> bool:
    """Is this a tensor that no model reads?"""
    return bool(_IGNORABLE.search(name) or _KV_SCALES.search(name))


def unread(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Those of these tensors that a model should have read, if it has not."""
    return sorted(name for name in names if not _ignorable(name) and not is_zeros_beside(checkpoint, name))


@dataclass(slots=True)
class Following:
    """The matrix that is multiplied after a layer. It is another layer's, and is named here so that it can be fetched
    early."""

    weight: Weight | None = None


@dataclass(slots=True)
class Carried:
    """What one part of a model leaves for others in a step. It is no weight."""

    tensor: Tensor | None = None


@dataclass(slots=True)
class Book:
    """What a model under construction has pulled and registered so far."""

    used: set[str] = field(default_factory=set)
    kv_specs: list[KVSpec] = field(default_factory=list)
    states: list[StateSpec] = field(default_factory=list)
    ropes: dict[object, RopeSpec] = field(default_factory=dict)
    flops: float = 0.0
    """The operations (two for each multiply-add) that one token costs in the matrices built so far."""
    weight_bytes: int = 0
    """The bytes of all matrices that a step multiplies by; a mixture counts with all its experts."""
    repeated: set[str] = field(default_factory=set)
    """The parts of the model that every rank computes whole."""
    changed: set[str] = field(default_factory=set)
    """Stored formats that are converted to another one, because there is no kernel for them."""
    mixtures: int = 0
    """How many mixtures of experts have been built so far."""
    placed: list[Any] = field(default_factory=list)
    """The mixtures whose experts may move between ranks (layers/experts.py: Chosen)."""
    waits: Following | None = None
    """Is told which matrix is multiplied next."""
    headless: bool = False
    """The checkpoint has no head: the embedding's matrix takes its place, and nobody asks for logits."""


@dataclass(frozen=True, slots=True)
class Build:
    """Gives a constructor its tensors; `at` extends the prefix of their names."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    max_positions: int
    group: Group = field(default_factory=SoloGroup)
    quantization: str | None = None
    how: Mapping[str, object] = field(default_factory=dict)
    """What config.json says about stored weights (`quant.detect.check_config`)."""
    prefix: str = ""
    book: Book = field(default_factory=Book)
    place: Place = field(default_factory=Place)
    """The pipeline stage, and other facts about how the model is spread over devices."""
    adapters: AdapterSites | None = None
    """Is told of every matrix that adapters may change."""

    def at(self, name: str) -> Build:
        """The same below `name`."""
        return replace(self, prefix=self.path(name))

    def under(self, name: str, probe: str) -> Build:
        """Below `name` if `probe` is found there, otherwise unchanged: base-model checkpoints lack the outer name."""
        return self.at(name) if self.at(name).has(probe) else self

    def limited(self, positions: int) -> Build:
        """The same with at most so many positions: a table of learned positions has an end."""
        return replace(self, max_positions=min(self.max_positions, positions))

    def exactly(self, dtype: torch.dtype) -> Build:
        """The same in another compute dtype (float32 routers)."""
        return replace(self, dtype=dtype)

    def alone(self, what: str) -> Build:
        """The same for parts that are not split over ranks: each rank computes them whole."""
        if self.group.size == 1:
            return self
        self.book.repeated.add(what)
        return self.whole()

    def whole(self) -> Build:
        """The same for parts so small that every rank has them whole."""
        return replace(self, group=SoloGroup())

    def path(self, name: str) -> str:
        """The full checkpoint path of `name`."""
        return f"{self.prefix}.{name}" if self.prefix and name else self.prefix or name

    def has(self, name: str) -> bool:
        """Does the checkpoint have exactly this tensor? NAME.weight: or the matrix of this name in another form."""
        full = self.path(name)
        return self.checkpoint.has(full) or (full.endswith(".weight") and has_form(self.checkpoint, full[:-7]))

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of exactly this shape, on the device, in the compute dtype unless `dtype` is given."""
        check_plainly_stored(self.checkpoint, self.path(name))
        checked = _Checked(self.checkpoint, self.book.used)
        found = checked.tensor(self.path(name), shape, dtype or self.dtype).to(self.device)
        if dtype is None:
            check_numbers(checked, self.path(name), self.how)
        return found

    def numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Several matrices in one tensor, for `wrap`: in the compute dtype; tensors stored in float16 stay so if that
        is float32."""
        return numbers(_Checked(self.checkpoint, self.book.used), self.path(name), shape, self.dtype, self.how).to(
            self.device
        )

    def weight(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        bias: bool = False,
        transposed: bool = False,
        exact: bool = False,
        head: bool = False,
        bare: bool = False,
        share: Share | None = None,
    ) -> Weight:
        """A matrix [out, in] in whatever format it is stored.

        exact: never quantised at load (embeddings, routers). head: in at least 8 bits, because its outliers matter.
        bare: adapters cannot change it. share: load this rank's part alone; unless quantised, only this part of the
        file is read.
        """
        request = WeightRequest(self.path(name), shape, bias, transposed, share)
        if not exact:
            self.book.flops += 2.0 * shape[0] * shape[1]
        checked = _Checked(self.checkpoint, self.book.used)
        scheme = None if exact else head_scheme(self.quantization) if head else self.quantization
        weight = load_weight(checked, request, self.dtype, self.device, scheme, self.how)
        return weight if bare else self.adapted(weight, name, share=share, flipped=transposed)

    def adapted(
        self,
        weight: Weight,
        name: str,
        rows: Tensor | None = None,
        share: Share | None = None,
        *,
        flipped: bool = False,
    ) -> Weight:
        """The weight stored as `name`, made changeable by adapters if there are any. rows: which rows of the stored
        matrix it has. share: which part of it. flipped: it is stored as [in, out]."""
        if self.adapters is None:
            return weight
        found: Weight = self.adapters.adapted(weight, self.path(name), rows, share, flipped=flipped)
        return found

    def taken(self, weight: Any, form: Callable[[Tensor], Forms]) -> AdapterSite | None:
        """The site of a settled weight whose matrix a layer keeps in this form; None: there are no adapters."""
        return None if self.adapters is None else self.adapters.taken(weight, form)

    def wrap(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        name: str = "",
        rows: Tensor | None = None,
        flipped: bool = False,
    ) -> Weight:
        """A matrix [out, in] that a model itself took out of a larger tensor (fused experts), known as `name`. rows:
        which rows of that it has. flipped: it is stored as [in, out]."""
        self.book.flops += 2.0 * weight.numel()
        made = from_dense(weight, bias, self.quantization, self.dtype if weight.dtype == torch.float16 else None)
        return self.adapted(made, name, rows, flipped=flipped) if name else made

    def stacks(self, name: str) -> bool:
        """Does one tensor of this name hold several experts in float8?"""
        return is_stacked(self.checkpoint, self.path(name))

    def stacked(self, name: str, shape: tuple[int, int, int], bias: Tensor | None = None) -> list[Weight]:
        """Experts [E, out, in] stored in one tensor of 4-bit floats, with biases [E, out], or of float8, without."""
        checked = _Checked(self.checkpoint, self.book.used)
        self.book.flops += 2.0 * shape[0] * shape[1] * shape[2]
        kind, scheme = (self.dtype, bias), self.quantization
        return load_stacked(checked, self.path(name), shape, kind, self.device, scheme, self.how)

    def order(self, index: Tensor) -> Tensor:
        """An order of rows, where the weights are. That of weights without data stays on the host."""
        return index if self.device.type == "meta" else index.to(self.device)

    def settled(self, weight: Weight) -> Weight:
        """A weight in its final form: every layer passes its weights through here."""
        return self._booked(weight.settle(self.kernels))

    def settled_all(self, weights: Sequence[Weight]) -> list[Weight]:
        """Weights that go one way, in their final form."""
        return [self._booked(weight) for weight in settle_all(weights, self.kernels)]

    def _booked(self, weight: Weight) -> Weight:
        self.book.weight_bytes += weight.bytes()
        for part in getattr(weight, "parts", [weight]):
            self.book.changed.update(getattr(part, "changed", ()))
        self.comes_next(weight)
        return weight

    def following(self) -> Following:
        """The matrix that follows those built so far. It is known one layer later, because layers are built in
        order."""
        self.book.waits = Following()
        return self.book.waits

    def comes_next(self, weight: Weight) -> None:
        """Note that this matrix is multiplied next."""
        if self.book.waits is not None:
            self.book.waits.weight, self.book.waits = weight, None

    def norm(
        self, name: str, size: int, eps: float, *, layer: bool = False, bias: bool = False, offset: float = 0.0
    ) -> NormSpec:
        """The descriptor of a norm with `name`.weight (and .bias)."""
        return NormSpec(
            weight=self.tensor(f"{name}.weight", (size,)),
            eps=eps,
            kind="layer" if layer else "rms",
            bias=self.tensor(f"{name}.bias", (size,)) if bias else None,
            offset=offset,
        )

    def add_kv(self, spec: KVSpec) -> tuple[int, int]:
        """Register an attention layer; returns its index in ForwardContext.kv and in .groups.

        Groups are the distinct specs, in order of first appearance."""
        self.book.kv_specs.append(spec)
        return len(self.book.kv_specs) - 1, list(dict.fromkeys(self.book.kv_specs)).index(spec)

    def add_state(self, spec: StateSpec) -> int:
        """Register a recurrent layer; returns its index in the states of StepRows."""
        self.book.states.append(spec)
        return len(self.book.states) - 1

    def layers(self, count: int, hidden: int, head: int) -> tuple[int, int]:
        """The range [first, last) of layers to build, of `count`. head: how many numbers the output head has."""
        if self.place.only is not None:
            return self.place.only
        if self.place.is_whole:
            return 0, count
        return self.place.layers(*weigh(self.checkpoint, count, hidden, float(head)))

    def leftovers(self) -> list[str]:
        """Tensors that nobody asked for. Empty tensors do not count, nor do zeros that nothing adds."""
        left = unread(self.checkpoint, (n for n in self.checkpoint.names() if n not in self.book.used))
        return [n for n in left if 0 not in (self.checkpoint.shape(n) or ())]

    def kv_scales(self) -> bool:
        """Does the checkpoint contain scales for K/V, or ask for some? They are not read."""
        left = (name for name in self.checkpoint.names() if name not in self.book.used)
        return any(self.how.get(key) for key in _KV_WISHES) or any(_KV_SCALES.search(name) for name in left)

    def check_leftovers(self) -> None:
        """Refuse a checkpoint with tensors that nobody asked for."""
        check_leftovers(self.leftovers())


def check_leftovers(left: list[str]) -> None:
    """Refuse a checkpoint with tensors that nobody asked for."""
    if left:
        shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        raise ModelError(f"The checkpoint has tensors that this architecture does not use: {shown}.")


def bare(weight: Any) -> Any:
    """A weight without its adapters."""
    return getattr(weight, "base", weight)


class _Checked(AroundCheckpoint):
    """A checkpoint that notes what is pulled, refuses missing or misshapen tensors, and converts to the dtype asked
    for."""

    def __init__(self, inner: Checkpoint, used: set[str]) -> None:
        super().__init__(inner)
        self.used = used

    def taken(self, name: str, found: Tensor, dtype: torch.dtype | None) -> Tensor:
        """It is converted."""
        if dtype is None:
            return found
        check_real(found, name, dtype)
        return found.to(dtype)

    def blocks(self, name: str, shape: tuple[int, ...] | None = None) -> Any | None:
        """The quantised blocks of a matrix, if the checkpoint has any."""
        ask = getattr(self.inner, "blocks", None)
        found = None if ask is None or not self.inner.has(name) else ask(name, shape)
        if found is not None:
            self.stored(name, shape)
        return found

    def stored(self, name: str, shape: tuple[int, ...] | None) -> str:
        """It is noted."""
        if not self.inner.has(name):
            raise ModelError(f"The checkpoint has no tensor '{name}'.")
        found = self.inner.shape(name)
        if shape is not None and found is not None and tuple(found) != tuple(shape):
            raise ModelError(f"Tensor '{name}' has shape {list(found)}, but the config asks for {list(shape)}.")
        self.used.add(name)
        return name
