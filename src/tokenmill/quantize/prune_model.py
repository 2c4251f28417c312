"""A model folder in, one with fewer channels, heads and layers out. Owns: the order of work and the proof at its end.

Layers that change their input least are removed first (ShortGPT's block influence). The others are pruned one after the
other: each gets as input what the pruned ones before it give, and attention is pruned before the MLP behind it. The
result is then run beside the source with zeros in place of what was removed. This finds a config.json that cannot
describe what is left, whatever the family. Memory holds one layer. Must not know: command lines, engines, training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.checkpoint.new_folder import check_free, new_folder
from tokenmill.checkpoint.whole_tensors import Overlaid
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, UserError
from tokenmill.models.text_part import outer_of
from tokenmill.quant.convert import Shards, Tell, check_kept, copy_rest, write_json
from tokenmill.quantize import prunable
from tokenmill.quantize.layer_stream import Stream, layer_count
from tokenmill.quantize.prune_columns import METHODS, prune_columns

REPORT = "pruning_report.json"
_SAME = 1e-3
_MULTIPLES = (128, 64)
_NEAR = 0.02
"""The number of channels may be off by this part of all channels, to be a number that kernels like."""
_PROVEN = 2
"""How many sequences the proof runs."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What to remove: a part of each layer's channels, a part of its groups of heads, and a number of layers. multiple:
    the number of remaining channels is a multiple of it; None: a multiple of 128 if that is close enough to what was
    asked for, else of 64."""

    channels: float = 0.0
    heads: float = 0.0
    layers: int = 0
    multiple: int | None = None
    method: str = "obs"


@dataclass(slots=True)
class Left:
    """What remains: layers by their old numbers, channels, heads; the influence of each layer on its input (None: not
    measured, or the layer always stays), and the loss of each pruned matrix's outputs."""

    layers: list[int]
    channels: int | None = None
    multiple: int = 0
    heads: prunable.HeadCounts | None = None
    influence: list[float | None] = field(default_factory=list)
    lost: dict[str, float] = field(default_factory=dict)


def prune_model(
    source: Path, target: Path, cut: Cut, tokens: Tensor, device: str = "cpu",
    tell: Tell = lambda name, done, total: None,
) -> Left:  # fmt: skip
    """Write the pruned `source` to the new folder `target`, completely or not at all. tokens [N, L] are for
    calibration."""
    _check(cut)
    config = _readable(source)
    check_free(target)
    ckpt = open_checkpoint(source)
    try:
        left, goal = _plan(config, ckpt, cut)
        check_kept(ckpt, frozenset())
        if cut.layers:
            left.influence = influences(Stream(config, ckpt, device, tokens))
            left.layers = without_least(left.influence, cut.layers)
        with new_folder(target) as partial:
            run = _Run(Stream(config, ckpt, device, tokens), ckpt, cut, left, goal, Shards(partial), tell)
            run.all()
            made = prunable.config_without(config, left.layers, run.stream.count, left.channels, left.heads)
            write_json(partial / "config.json", made)
            _prove(config, made, run, partial, device, tokens)
            write_json(partial / REPORT, _report(cut, left))
            copy_rest(source, partial)
    finally:
        ckpt.close()
    return left


def _check(cut: Cut) -> None:
    if not (cut.channels or cut.heads or cut.layers):
        raise UserError("Say what to remove: --channels 0.25, --heads 0.25 or --layers 2.")
    for name, share in (("channels", cut.channels), ("heads", cut.heads)):
        if not 0.0 <= share < 1.0:
            raise UserError(f"--{name} {share:g}: use a part between 0 and 1.")
    if cut.layers < 0:
        raise UserError(f"--layers {cut.layers}: use a positive number.")
    if cut.multiple is not None and cut.multiple < 1:
        raise UserError(f"--multiple {cut.multiple}: use a positive number.")
    if cut.method not in METHODS:
        raise UserError(f"--importance {cut.method}: use {', '.join(METHODS)}.")


def _readable(source: Path) -> dict[str, Any]:
    config = read_config(source)
    if config.get("quantization_config"):
        raise ModelError(f"{source} is already quantised; start from the unquantised model.")
    if outer_of(config) is not None:
        raise ModelError(f"{source} also sees or hears: its text part cannot be pruned here yet.")
    return config


def _plan(config: dict[str, Any], ckpt: Checkpoint, cut: Cut) -> tuple[Left, dict[str, int]]:
    """Decide what remains, and refuse the impossible before any work. goal: channels and groups of heads in each
    layer."""
    count = layer_count(config)
    if cut.layers > count - 2:
        raise UserError(f"--layers {cut.layers}: {max(count - 2, 0)} of {count} can go; the first and last stay.")
    left, goal = Left(list(range(count))), {}
    if cut.channels:
        inner = prunable.every((_columns(ckpt, n, "") for n in range(count)), "channels")
        if config.get("intermediate_size") != inner:
            raise ModelError(f"config.json has no intermediate_size of {inner}: it cannot say what would be left.")
        keep, left.multiple = _channels(inner, cut)
        left.channels = goal["channels"] = keep
    if cut.heads:
        have = prunable.heads_of(config)
        columns = prunable.every((_columns(ckpt, n, prunable.OUT) for n in range(count)), "columns of o_proj")
        if have.queries % have.keys or columns != have.queries * have.dim:
            raise ModelError(f"o_proj has {columns} columns, not {have.queries} heads of {have.dim}.")
        keep = have.keys - max(1, round(have.keys * cut.heads))
        if keep < 1:
            groups = f"{have.keys} group{'s' if have.keys > 1 else ''} of heads"
            raise UserError(f"--heads {cut.heads:g}: a layer has {groups}, and one must stay.")
        goal["heads"] = keep
        left.heads = prunable.HeadCounts(keep * have.queries // have.keys, keep, have.dim)
    return left, goal


def _channels(inner: int, cut: Cut) -> tuple[int, int]:
    """How many of `inner` channels remain, and of what this is a multiple."""
    wanted = inner * (1.0 - cut.channels)
    for multiple in _MULTIPLES if cut.multiple is None else (cut.multiple,):
        keep = max(1, round(wanted / multiple)) * multiple
        if abs(keep - wanted) <= _NEAR * inner:
            break
    if keep >= inner:
        raise UserError(f"--channels {cut.channels:g} leaves all {inner} in multiples of {multiple}: ask for more, or "
                        "give a smaller --multiple.")  # fmt: skip
    return keep, multiple


def _columns(ckpt: Checkpoint, index: int, end: str) -> int:
    names = prunable.in_layer(ckpt, index)
    found = names.get(f"{end or prunable.mlp_end(names, index)}.weight")
    shape = None if found is None else ckpt.shape(found)
    if shape is None:
        raise ModelError(f"Layer {index} has no {end}: heads cannot be taken out.")
    return shape[1]


def influences(stream: Stream) -> list[float | None]:
    """1 - the mean cosine between a layer's input and output, for all layers except the first and the last."""
    found: list[float | None] = []
    for index in range(stream.count):
        before = stream.x
        stream.advance(index, {}, set(), None)
        middle = 0 < index < stream.count - 1
        cosine = (
            torch.cosine_similarity(before.to(stream.x.device).float(), stream.x.float(), dim=-1) if middle else None
        )
        found.append(None if cosine is None else 1.0 - float(cosine.mean(dtype=torch.float64)))
    return found


def without_least(influence: list[float | None], count: int) -> list[int]:
    """The layers that remain after the `count` with the least influence are removed."""
    known = [(value, n) for n, value in enumerate(influence) if value is not None]
    gone = {n for _, n in sorted(known)[:count]}
    return [n for n in range(len(influence)) if n not in gone]


@dataclass(slots=True)
class _Run:
    """One run over the layers that remain."""

    stream: Stream
    ckpt: Checkpoint
    cut: Cut
    left: Left
    goal: dict[str, int]
    shards: Shards
    tell: Tell

    def all(self) -> None:
        """Write every layer, then the tensors outside of layers."""
        for done, index in enumerate(self.left.layers, 1):
            parts: dict[str, prunable.KeptPart] = {}
            changed: dict[str, Tensor] = {}
            for what in sorted(self.goal, reverse=True):  # heads first, then channels
                self._prune_part(index, what, parts, changed)
            self._write(index, parts, changed)
            self.stream.ckpt = Overlaid(self.ckpt, changed)
            self.stream.x = self.stream.states_after(index, {})
            self.tell(f"layer {index}", done, len(self.left.layers))
        for name in self.ckpt.names():
            found = prunable.layer_of(name)
            if found is None or found[1] >= self.stream.count:
                made = prunable.renumbered(name, self.left.layers, self.stream.count)
                assert made is not None
                self.shards.add({made: self.ckpt.tensor(name)})
        self.shards.close()

    def _prune_part(
        self, index: int, what: str, parts: dict[str, prunable.KeptPart], changed: dict[str, Tensor]
    ) -> None:
        """Choose which of a layer's channels or heads remain. changed: gets the layer's last matrix with zeros in place
        of the others."""
        names = prunable.in_layer(self.ckpt, index)
        end = prunable.OUT if what == "heads" else prunable.mlp_end(names, index)
        full = names[f"{end}.weight"]
        self.stream.ckpt = Overlaid(self.ckpt, changed)
        layer = self.stream.calibrate(index, {full})
        if full not in layer.inputs:
            raise ModelError(f"{full} multiplied nothing during calibration, so it cannot be pruned.")
        width = prunable.heads_of(self.stream.config).width if what == "heads" else 1
        kind = self.ckpt.tensor(full).dtype
        weight, inputs = layer.weights[full], layer.inputs[full]
        found = prune_columns(weight, inputs, self.goal[what], width=width, method=self.cut.method)
        self.left.lost[full] = found.lost
        parts |= self._parts(names, end, found.kept.cpu())
        zeros = torch.zeros_like(layer.weights[full])
        zeros[:, found.kept] = found.weight
        changed[full] = zeros.to(kind).cpu()

    def _parts(self, names: Mapping[str, str], end: str, kept: Tensor) -> dict[str, prunable.KeptPart]:
        if end == prunable.OUT:
            return prunable.heads(self.ckpt, names, prunable.heads_of(self.stream.config), kept)
        return prunable.channels(self.ckpt, names, end, kept)

    def _write(self, index: int, parts: Mapping[str, prunable.KeptPart], changed: Mapping[str, Tensor]) -> None:
        tensors = {}
        for name in prunable.in_layer(self.ckpt, index).values():
            tensor = changed.get(name)
            tensor = self.ckpt.tensor(name) if tensor is None else tensor
            made = prunable.renumbered(name, self.left.layers, self.stream.count)
            assert made is not None
            tensors[made] = parts[name].of(tensor) if name in parts else tensor
        self.shards.add(tensors)


def _prove(config: dict[str, Any], made: dict[str, Any], run: _Run, folder: Path, device: str, tokens: Tensor) -> None:
    """Refuse a folder that does not compute what the source computes with zeros in place of the removed parts."""
    message = f"{config.get('model_type')}: its config.json cannot describe the pruned model"
    ckpt = open_checkpoint(folder)
    try:
        stream = Stream(made, ckpt, device, tokens[:_PROVEN])
        for new, old in enumerate(run.left.layers):
            try:
                stream.x = stream.states_after(new, {})
            except ModelError as error:  # it asks for tensors that another kind of layer has
                raise ModelError(f"{message}, in which layer {old} would be of another kind ({error})") from error
            if stream.reads[new] != run.stream.reads[old]:
                raise ModelError(f"{message} (layer {old} would read other positions).")
    finally:
        ckpt.close()
    wanted = run.stream.x[:_PROVEN].to(stream.x.device).float()
    if not (stream.x.float() - wanted).norm() <= _SAME * wanted.norm():
        raise ModelError(f"{message}.")


def _report(cut: Cut, left: Left) -> dict[str, Any]:
    return {"cut": asdict(cut), **asdict(left)}
