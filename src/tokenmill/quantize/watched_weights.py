"""Wrapping a layer's weights so that they record their inputs. Owns: that wrapping. Must not know: methods, files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from tokenmill.compute.forward import Around, ForwardContext, Kernels, NormSpec, Weight
from tokenmill.layers.build import Build
from tokenmill.quant.base import WeightBase
from tokenmill.quantize.folds import NormTensors
from tokenmill.quantize.inputs import Inputs


@dataclass(slots=True)
class InputRecord:
    """The inputs of weights, by the weights' names. fed: the weights that each norm fed. wanted: the weights whose
    inputs are added up, with what `make` returns. built: all weights in order. meant: the unrounded model's inputs, of
    weights that every one of its tokens reaches; they are gathered, and not added up, while `awaited` (tokens) is not
    0."""

    inputs: dict[str, Any] = field(default_factory=dict)
    fed: dict[NormTensors, set[str]] = field(default_factory=dict)
    norms: dict[int, tuple[NormSpec, NormTensors]] = field(default_factory=dict)
    built: list[str] = field(default_factory=list)
    wanted: frozenset[str] = frozenset()
    make: Callable[[int, torch.device], Any] = Inputs
    meant: dict[str, Tensor] = field(default_factory=dict)
    awaited: int = 0

    def note(self, names: tuple[str, ...], x: Tensor, norm: NormSpec | None) -> None:
        """Add the input x [T, columns] of the weights `names`, which this norm may have made."""
        found = self.norms.get(id(norm)) if norm is not None else None
        if found is not None:
            self.fed.setdefault(found[1], set()).update(names)
        wanted = [name for name in names if name in self.wanted]
        if not wanted:
            return
        if self.awaited:
            if len(x) == self.awaited:
                self.meant[wanted[0]] = x.detach().clone()
            return
        sums, meant = self.inputs.get(wanted[0]), self.meant.pop(wanted[0], None)
        if sums is None:
            sums = self.make(x.shape[1], x.device)
            self.inputs.update(dict.fromkeys(wanted, sums))
        if meant is None or meant.shape != x.shape:
            sums.add(x)
        else:
            sums.add(x, meant)


_ABSORBED = {"kv_a_layernorm.weight": "kv_b_proj.weight"}
"""Norms, and the weights that multiply what they give, but which models merge into other matrices."""


class WatchingKernels:
    """Kernels that record the inputs of absorbed weights."""

    def __init__(self, inner: Kernels, seen: InputRecord) -> None:
        self.inner, self.seen = inner, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def norm(self, x: Tensor, spec: NormSpec, *more: Any, **how: Any) -> Tensor:
        """As the inner kernels."""
        y = self.inner.norm(x, spec, *more, **how)
        found = self.seen.norms.get(id(spec))
        stem, _, last = found[1].weight.rpartition(".self_attn.") if found is not None else ("", "", "")
        if last in _ABSORBED:
            self.seen.note((f"{stem}.self_attn.{_ABSORBED[last]}",), y, spec)
        return y


class WatchedWeight(WeightBase):
    """A weight with the names of its parts. Its products record their input."""

    def __init__(self, inner: Any, names: tuple[str, ...], seen: InputRecord) -> None:
        self.inner, self.names, self.seen = inner, names, seen
        self.shape = inner.shape

    def settle(self, kernels: Kernels) -> Weight:
        """Settle the inner weight. Backends never take this weight apart or stack it."""
        self.inner = self.inner.settle(kernels)
        return self

    def matmul(self, x: Tensor, ctx: ForwardContext, **around: Unpack[Around]) -> Tensor:
        """As the inner weight."""
        if (norm := around.pop("norm", None)) is not None:
            x = ctx.kernels.norm(x, norm)
        self.seen.note(self.names, x, norm)
        y: Tensor = self.inner.matmul(x, ctx, **around)
        return y

    def join(self, others: list[Self]) -> Self | None:
        """One weight with all the names."""
        inner = self.inner.join([other.inner for other in others])
        names = tuple(name for part in (self, *others) for name in part.names)
        return None if inner is None else type(self)(inner, names, self.seen)

    def take(self, index: Tensor) -> Self:
        """Rows in the order of index."""
        return type(self)(self.inner.take(index), self.names, self.seen)

    def split(self, dim: int, part: int, parts: int) -> Self:
        """As the inner weight."""
        return self if parts == 1 else type(self)(self.inner.split(dim, part, parts), self.names, self.seen)

    def rows(self, ids: Tensor) -> Tensor:
        """As the inner weight."""
        found: Tensor = self.inner.rows(ids)
        return found

    def dense(self) -> Tensor:
        """As the inner weight."""
        found: Tensor = self.inner.dense()
        return found

    def bytes(self) -> int:
        """As the inner weight."""
        return int(self.inner.bytes())


@dataclass(frozen=True, slots=True)
class WatchingBuild(Build):
    """A Build that watches weights, and knows norms by name."""

    seen: InputRecord = field(default_factory=InputRecord)

    def weight(self, name: str, shape: tuple[int, int], **how: Any) -> Weight:
        """As in Build, but watched."""
        found = Build.weight(self, name, shape, **how)
        full = self.path(name) + ".weight"
        self.seen.built.append(full)
        return WatchedWeight(found, (full,), self.seen)

    def norm(self, name: str, size: int, eps: float, **how: Any) -> NormSpec:
        """As in Build, but its name is noted."""
        spec = Build.norm(self, name, size, eps, **how)
        full = self.path(name)
        known = NormTensors(
            f"{full}.weight", f"{full}.bias" if how.get("bias") else None, float(how.get("offset", 0.0))
        )
        self.seen.norms[id(spec)] = (spec, known)
        return spec
