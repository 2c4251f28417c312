"""Building layers of a loaded model again and copying them over the old ones. Owns: which tensors a model's parts hold,
pairing the tensors of two such parts, and building one piece from a checkpoint: a layer, or the whole model where
layers read each other's.

Must not know: requests, where new numbers come from, formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite
from tokenmill.compute.forward import Kernels, RopeSpec
from tokenmill.compute.model import CausalLM, Checkpoint, Group
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import UserError
from tokenmill.layers.build import Book, Build, Carried, Following, bare
from tokenmill.lora.sites import Sites
from tokenmill.lora.weight import Source
from tokenmill.models.decoder import Decoder
from tokenmill.models.registry import build_stage, text_alone
from tokenmill.parallel.group import SoloGroup
from tokenmill.parallel.stages import Place

_ENDS = ("embedding", "before", "head", "norm", "after", "bias")
_NOT_WEIGHTS = (RopeSpec, AdapterSite, Sites, Source, Following, Carried)
"""Types whose tensors are computed or belong to other objects."""

Piece = tuple[int, int]
"""Layers [first, last) that are built at once."""


@dataclass(frozen=True, slots=True)
class LayerMaker:
    """Builds layers in the same way as the load did. `raw`: the config. `make_sites`: makes new sites for adapters."""

    raw: dict[str, Any]
    config: EngineConfig
    dtype: torch.dtype
    device: str
    kernels: Kernels
    make_sites: Callable[[], Sites | None] = lambda: None
    group: Group = field(default_factory=SoloGroup)
    place: Place = field(default_factory=Place)

    def build(self, model: Decoder, checkpoint: Checkpoint, piece: Piece) -> tuple[Decoder, set[str]]:
        """A piece, with what lies before the first and behind the last layer, and the tensors that it was made of."""
        book = Book()
        b = Build(
            checkpoint=checkpoint,
            dtype=self.dtype,
            device=torch.device(self.device),
            max_positions=model.spec.max_positions,
            quantization=self.config.model.quantization,
            kernels=self.kernels,
            book=book,
            place=self.place if model.undivided else replace(self.place, only=piece),
            adapters=self.make_sites(),
            group=self.group,
        )
        made = build_stage(self.raw, b)
        assert isinstance(made, Decoder)
        return made, book.used


def pieces(model: Decoder) -> list[Piece]:
    """The layers that are here, as they can be built: the last one first, for it tells whether the embedding is the
    head's matrix."""
    first, end = model.first, model.first + len(model.layers)
    if model.undivided:
        return [(first, end)]
    return [(layer, layer + 1) for layer in (end - 1, *range(first, end - 1))]


def fill(model: Decoder, new: Decoder, piece: Piece) -> None:
    """Copy a newly built piece over the old one, after checking that every tensor fits."""
    tied = model.embedding is not None and model.head is not None and model.embedding.weight is bare(model.head.weight)
    first, end = (layer - model.first for layer in piece)
    ends = [name for name in _apart(model) if not (name == "embedding" and tied and end < len(model.layers))]
    both = [(getattr(model, name), getattr(new, name)) for name in ends if getattr(new, name) is not None]
    both += zip(model.layers[first:end], new.layers, strict=True)
    seen: set[int] = set()
    found = [pair for old, made in both for pair in pairs(old, made, seen)]
    for old, made in found:
        old.copy_(made)


@torch.inference_mode()
def refill(model: CausalLM, checkpoint: Checkpoint, maker: LayerMaker) -> None:
    """Read all weights from their checkpoint again, in place."""
    assert isinstance(model, Decoder)
    source = text_alone(maker.raw, checkpoint)
    for piece in pieces(model):
        fill(model, maker.build(model, source, piece)[0], piece)


def weights_of(model: CausalLM) -> list[Tensor]:
    """The tensors that `refill` would fill."""
    assert isinstance(model, Decoder)
    seen: set[int] = set()
    parts = [*(getattr(model, name) for name in _apart(model)), *model.layers]
    return [tensor for part in parts for tensor, _ in pairs(part, part, seen, same=True)]


def _apart(model: Decoder) -> tuple[str, ...]:
    """Names of the parts that are no layers."""
    return (*_ENDS, *model.beside)


def held(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor in one of our objects, whatever its purpose."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, torch.nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
    else:
        for one, _ in inside(thing, thing):
            yield from held(one, seen)


def pairs(old: Any, new: Any, seen: set[int], *, same: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of tensors of two objects with the same structure; each old tensor once. same: the two are one object."""
    if (old is new and not same) or id(old) in seen or isinstance(old, _NOT_WEIGHTS):
        return
    if type(old) is not type(new):
        raise _unlike(old, new)
    seen.add(id(old))
    if isinstance(old, Tensor):
        if old.shape != new.shape or old.dtype != new.dtype:
            raise _unlike(old, new)
        yield old, new
        return
    for one, other in inside(old, new):
        yield from pairs(one, other, seen, same=same)


def inside(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of the parts of two objects with the same structure."""
    if isinstance(old, (list, tuple)):
        yield from zip(old, new, strict=True)
    elif isinstance(old, dict):
        yield from ((old[key], new[key]) for key in old)
    elif isinstance(old, FunctionType):
        cells = zip(old.__closure__ or (), new.__closure__ or (), strict=True)
        yield from ((one.cell_contents, other.cell_contents) for one, other in cells)
    elif isinstance(old, MethodType):
        yield old.__self__, new.__self__
    elif isinstance(old, partial):
        yield from ((old.func, new.func), (old.args, new.args), (old.keywords, new.keywords))
    elif _is_ours(type(old).__module__):
        names = [*getattr(old, "__dict__", ())]
        names += [name for kind in type(old).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(old, name)]
        numbers = [name for name in names if not isinstance(getattr(old, name), (bool, int, float, str, type(None)))]
        yield from ((getattr(old, name), getattr(new, name, None)) for name in numbers)


def _is_ours(module: str) -> bool:
    """Not native things; nor groups, whose buffers other ranks know by address."""
    return module.startswith("tokenmill.") and not module.endswith("._native") and ".parallel." not in module


def _unlike(old: Any, new: Any) -> UserError:
    return UserError(
        f"a weight that is held as {_said(old)} cannot be filled from {_said(new)}: load the model again with the new "
        "weights."
    )


def _said(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')} of {list(thing.shape)}"
    return type(thing).__name__
