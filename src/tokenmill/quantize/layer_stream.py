"""A model's layers, one after the other. Owns: building each layer alone, what calibration shows it, and folding
scales.

A layer gets as input what the rounded layers before it give, as it will when the model runs. Must not know: files,
forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.whole_tensors import AroundCheckpoint, Overlaid
from tokenmill.compute.forward import Kernels, Weight
from tokenmill.compute.model import CausalLM, Checkpoint
from tokenmill.core.errors import ModelError, UndividedError
from tokenmill.kernels import make_kernels
from tokenmill.layers.build import Build
from tokenmill.models.config import ModelConfig
from tokenmill.models.registry import build_stage
from tokenmill.parallel.stages import Place
from tokenmill.quant.convert import checked
from tokenmill.quant.dense import DenseWeight
from tokenmill.quantize import folds
from tokenmill.quantize.forward import Note, forward_in_parts, part_size, room
from tokenmill.quantize.inputs import Inputs
from tokenmill.quantize.watched_weights import InputRecord, WatchingBuild, WatchingKernels

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SAME = 1e-3
"""The largest relative difference of a layer's outputs after scales have moved."""


class Nearby(AroundCheckpoint):
    """A Checkpoint whose tensors come to a device as they are stored. There they are widened, and codes unpacked."""

    def __init__(self, inner: Checkpoint, device: torch.device) -> None:
        super().__init__(inner)
        self.device = device

    def taken(self, name: str, found: Tensor, dtype: torch.dtype | None) -> Tensor:
        """It moves."""
        return found.to(self.device)


@dataclass(frozen=True, slots=True)
class PlainBuild(Build):
    """A Build that widens weights to their dense numbers, without any kernel's packed form."""

    def weight(self, name: str, shape: tuple[int, int], **how: Any) -> Weight:
        """As in Build, but in the compute dtype."""
        found = Build.weight(self, name, shape, **how)
        return found if isinstance(found, DenseWeight) else DenseWeight(found.dense(), getattr(found, "bias", None))


@dataclass(slots=True)
class Layer:
    """One layer: its weights in float32 by name, the inputs that they had, and the tensors that were changed."""

    index: int
    weights: dict[str, Tensor]
    inputs: dict[str, Inputs]
    folds: list[folds.Fold]
    changed: dict[str, Tensor] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)


class Stream:
    """Goes through the layers in order. It holds the hidden states before the next layer. paired: it also holds those
    of the unrounded model (`meant`), and calibration tells how inputs differ from that model's."""

    def __init__(
        self, config: dict[str, Any], ckpt: Checkpoint, device: str, tokens: Tensor, *, paired: bool = False
    ) -> None:
        self.config, self.ckpt, self.device = config, ckpt, torch.device(device)
        self.kernels: Kernels = make_kernels(device)
        self.x = tokens
        self.meant = tokens if paired else None
        self.count = layer_count(config)
        self.reads: dict[int, list[tuple[str, int]]] = {}
        """For each layer that was run: the kind of its K/V, and how far back it reads."""
        c = ModelConfig(config)
        heads = c.get("num_attention_heads", int, c.get("n_head", int, 1, low=0), low=0) or 1
        self.head = c.get("head_dim", int, 0, low=0) or c.get("hidden_size", int, heads) // heads

    def calibrate(self, index: int, chosen: set[str]) -> Layer:
        """Run the calibration sequences through layer `index`, and return the layer with its inputs. chosen: the
        weights that will be rounded."""
        seen = InputRecord(wanted=frozenset(chosen))
        model = self._build(index, self.ckpt, seen=seen)
        mine = [name for name in seen.built if name in chosen]
        weights = {name: widened(self.ckpt.tensor(name), name, self.device) for name in mine}
        self._watch_all(index, model, seen)
        missed = [name for name in mine if name not in seen.inputs]
        found = folds.find_folds(seen.fed, set(mine) - set(missed), self.ckpt.has)
        return Layer(index, weights, dict(seen.inputs), found, missed=missed)

    def _watch_all(self, index: int, model: CausalLM, seen: InputRecord) -> None:
        """Run all sequences through a watched layer, the unrounded model's beside ours."""
        kernels: Any = WatchingKernels(self.kernels, seen)
        size, apart = part_size(self.x.shape[1]), self.meant is not None and self.meant is not self.x
        fine: list[Tensor] = []
        after: Tensor | None = None
        for start in range(0, len(self.x), size):
            part = self.x[start : start + size]
            if self.meant is not None and apart:
                seen.awaited = part.shape[0] * part.shape[1]
                plain = forward_in_parts(model, self.meant[start : start + size], kernels, self.device)
                seen.awaited = 0
            states = forward_in_parts(model, part, kernels, self.device)
            seen.meant.clear()  # experts that this part has not reached
            fine.append(torch.isfinite(states).all())
            if self.meant is not None:
                after = room(states, len(self.x), self.device) if after is None else after
                after[start : start + len(states)] = plain if apart else states
        _check_finite(fine, index)
        self.meant = after

    def pass_by(self, index: int) -> None:
        """Take the unrounded model's states past a layer that is rounded already."""
        if self.meant is not None:
            seen = InputRecord()
            kernels: Any = WatchingKernels(self.kernels, seen)
            self.meant = forward_in_parts(self._build(index, self.ckpt, seen=seen), self.meant, kernels, self.device)

    def watch(self, index: int, seen: InputRecord, note: Note | None = None) -> set[str]:
        """Run layer `index`, and advance past it. `seen` records the inputs of its weights, `note` gets its pages.
        Returns the kinds of its K/V."""
        model = self._build(index, self.ckpt, seen=seen)
        self.x = forward_in_parts(model, self.x, self.kernels, self.device, note=note)
        _check_finite([torch.isfinite(self.x).all()], index)
        return {spec.kind for spec in model.spec.kv_specs}

    def advance(self, index: int, tensors: Mapping[str, Tensor], hidden: set[str], how: dict[str, Any] | None) -> None:
        """Advance past layer `index`, computed with these tensors in place of those hidden. how:
        quantization_config."""
        if index + 1 < self.count:
            self.x = self.states_after(index, tensors, hidden, how)

    def states_after(
        self, index: int, tensors: Mapping[str, Tensor], hidden: Iterable[str] = (), how: dict[str, Any] | None = None
    ) -> Tensor:
        """The hidden states after layer `index`. After the last layer they are normed."""
        config = self.config if how is None else {**self.config, "quantization_config": how}
        model = self._build(index, Overlaid(self.ckpt, tensors, hidden), config=config)
        self.reads[index] = [(spec.kind, spec.window) for spec in model.spec.kv_specs]
        made = forward_in_parts(model, self.x, self.kernels, self.device)
        _check_finite([torch.isfinite(made).all()], index)
        return made

    def keeps(self, layer: Layer, tensors: Mapping[str, Tensor]) -> bool:
        """Does the layer compute the same function with these tensors in place of its own?"""
        x = self.x[:2]
        one, other = (
            forward_in_parts(self._build(layer.index, ckpt), x, self.kernels, self.device)
            for ckpt in (self.ckpt, Overlaid(self.ckpt, tensors))
        )
        change = one.float() - (x.to(one.device).float() if x.is_floating_point() else 0.0)
        return bool((other - one).norm() <= _SAME * change.norm())

    def _build(
        self, index: int, ckpt: Any, *, seen: InputRecord | None = None, config: dict[str, Any] | None = None
    ) -> Any:
        options: dict[str, Any] = {
            "checkpoint": Nearby(ckpt, self.device),
            "dtype": torch.float32,
            "device": self.device,
            "max_positions": max(16, self.x.shape[1]),
            "kernels": self.kernels,
            "place": Place(only=(index, index + 1)),
        }
        build = PlainBuild(**options) if seen is None else WatchingBuild(**options, seen=seen)
        try:
            return build_stage(config or self.config, build)
        except UndividedError as error:
            raise ModelError(
                f"{error} So no text can be run through it layer by layer: only methods without calibration take it."
            ) from error


def widened(stored: Tensor, name: str, device: torch.device) -> Tensor:
    """A stored weight in float32 on a device, if it can be rounded."""
    return checked(stored.to(device), name).float()


def _check_finite(fine: list[Tensor], index: int) -> None:
    """Refuse states behind layer `index` that say nothing about its inputs. fine: are those of a part finite?"""
    if not bool(torch.stack(fine).all()):
        raise ModelError(f"Layer {index} computes infinite numbers or NaN on the text: the model is damaged.")


def layer_count(config: Mapping[str, Any]) -> int:
    """The number of layers in a model."""
    for name in _LAYERS:
        if isinstance(config.get(name), int):
            return ModelConfig(config).need(name, int)
    if isinstance(kinds := config.get("layers_block_type"), list):
        return len(kinds)
    raise ModelError(f"config.json names no number of layers ({', '.join(_LAYERS)}).")


Fit = Callable[[folds.Fold, Layer, Callable[[Tensor], Tensor | None]], Tensor | None]
"""The function with which a method finds the scales of a fold."""


def fold(stream: Stream, layer: Layer, fit: Fit) -> int:
    """Move scales into the layer's weights, one fold after the other. A fold that would change the layer's function is
    skipped. Returns how many have moved."""
    moved = 0
    for one in layer.folds:

        def fitting(s: Tensor, one: folds.Fold = one) -> Tensor | None:
            if one.norm is not None:
                return _of_norm(stream, layer, one.norm, s)[0]
            return folds.shared(s, layer.weights[one.producer].shape[0], stream.head)

        s = fit(one, layer, fitting)
        if s is None:
            continue
        tensors = _tensors(stream, layer, one, s)
        if not stream.keeps(layer, {**layer.weights, **layer.changed, **tensors}):
            continue
        for name, tensor in tensors.items():
            (layer.weights if name in layer.weights else layer.changed)[name] = tensor
        scaled: dict[int, Inputs] = {}
        for name in one.consumers:
            old = layer.inputs[name]
            layer.inputs[name] = scaled.setdefault(id(old), old.scaled(s))
        moved += 1
    return moved


def _tensors(stream: Stream, layer: Layer, one: folds.Fold, s: Tensor) -> dict[str, Tensor]:
    """The tensors that change when the scales s [columns] move."""
    made = {name: layer.weights[name] * s for name in one.consumers}
    if one.norm is None:
        producer = layer.weights[one.producer]
        each = folds.of_rows(s, producer.shape[0], stream.head)
        return {**made, one.producer: producer / each[:, None]}
    made |= _of_norm(stream, layer, one.norm, s)[1]
    return made


def _of_norm(stream: Stream, layer: Layer, norm: folds.NormTensors, s: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The scales as the norm's own type can hold them, and the norm's new tensors."""

    def stored(name: str) -> Tensor:
        return layer.changed.get(name, stream.ckpt.tensor(name))

    old = stored(norm.weight)
    full = old.float().to(s.device) + norm.offset
    made = (full / s - norm.offset).to(old.dtype)
    kept = made.float() + norm.offset
    exact = torch.where((kept != 0) & (full != 0), full / kept, s)
    tensors = {norm.weight: made}
    if norm.bias is not None:
        bias = stored(norm.bias)
        tensors[norm.bias] = (bias.float().to(s.device) / exact).to(bias.dtype)
    return exact, tensors
