"""An adapter for one model. Owns: turning matrices by module into the contents of each product's slot.

Rows and columns are arranged as in the products (joined, reordered, split over ranks). Scales, magnitudes and biases
are multiplied in, so that devices need only one formula (compute/adapters.py). Must not know: slots, requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Forms
from tokenmill.compute.forward import Weight
from tokenmill.core.errors import ModelError
from tokenmill.lora.peft import Adapter, LowRank, TokenRows, all_finite, stem
from tokenmill.lora.sites import SitePart, Sites
from tokenmill.lora.weight import Source
from tokenmill.quant.dense import DenseWeight

_ALIKE = 0.02
"""Of the largest number: what other types and their rounding may change."""
_SLICE = 1024
"""Rows of a base matrix that are made dense at a time."""


@dataclass(slots=True)
class Piece:
    """One part of one product: down [in, r] and up [r, out of the part] in the compute dtype, not yet laid out so."""

    part: int
    down: Tensor
    up: Tensor


@dataclass(slots=True)
class Fill:
    """The contents of one product's slot. Shifts and gains begin at a column of the product. pieces: kept until they
    are joined into down [in, lanes] and up [rank, out], which are laid out as in the slot."""

    site: AdapterSite
    pieces: list[Piece] = field(default_factory=list)
    down: Tensor | None = None
    up: Tensor | None = None
    gains: list[tuple[int, Tensor]] = field(default_factory=list)
    shifts: list[tuple[int, Tensor]] = field(default_factory=list)
    whole: Weight | Forms | None = None

    @property
    def rank(self) -> int:
        """Lanes of each part."""
        return 0 if self.up is None else self.up.shape[0]

    @property
    def bytes(self) -> int:
        """Bytes held."""
        low = 0 if self.down is None or self.up is None else self.down.nbytes + self.up.nbytes
        return low + (self.whole.bytes() if self.whole else 0)

    def join(self, *, pin: bool) -> None:
        """One tensor down and one up of all pieces, so that a slot is filled by two copies; pin: for a GPU to fetch
        them by itself."""
        if not self.pieces:
            return
        site, dtype = self.site, self.pieces[0].down.dtype
        rank = max(piece.down.shape[1] for piece in self.pieces)
        lanes = -(-site.parts * rank // 16) * 16
        down, up = torch.zeros(site.inputs, lanes, dtype=dtype), torch.zeros(rank, site.columns, dtype=dtype)
        for piece in self.pieces:
            own, start, stop = piece.down.shape[1], site.borders[piece.part], site.borders[piece.part + 1]
            down[:, piece.part * rank : piece.part * rank + own] = piece.down
            up[:own, start:stop] = piece.up
        self.down, self.up = (down.pin_memory(), up.pin_memory()) if pin else (down, up)
        self.pieces = []


class Fitter:
    """Makes the fills of one adapter."""

    def __init__(self, adapter: Adapter, sites: Sites) -> None:
        self.adapter, self.sites = adapter, sites
        self.fills: dict[int, Fill] = {}
        self.unknown: dict[str, str] = {}
        """Modules of which this rank holds no part, with the error if no rank does."""

    def fit(self) -> list[Fill]:
        """Every product that the adapter changes; raises ModelError for what does not belong to this model."""
        adapter = self.adapter
        for module, low in adapter.linear.items():
            for place in self._places(module):
                self._low(module, place, low)
        for module, low in adapter.tables.items():
            self._table(module, low)
        for module, low in adapter.stacked.items():
            counts = self.sites.mixtures if self.sites.partial else None
            for expert, part in shared_out(self.sites, adapter, module, low, counts):
                for place in self.sites.find(expert):
                    self._low(expert, place, part)
            if self.sites.partial and not self.sites.numbers(stem(module)):
                self.unknown[module] = f"{adapter.where}: {module[:160]} fits no stacked experts of this model."
        for module, tensors in adapter.whole.items():
            self._whole(module, dict(tensors))
        for module, found in adapter.tokens.items():
            self._tokens(module, found)
        return list(self.fills.values())

    def _fill(self, site: AdapterSite, module: str) -> Fill:
        if site.why_not:
            raise self._refuse(module, f"cannot be changed here: {site.why_not}")
        return self.fills.setdefault(id(site), Fill(site))

    def _places(self, module: str) -> list[SitePart]:
        """The products that contain a part of the module; []: it is noted as unknown."""
        places = self.sites.find(module)
        if not places:
            base = f" (it was made for {self.adapter.base[:120]})" if self.adapter.base else ""
            saved = module in self.adapter.whole and module not in self.adapter.linear
            why = "; what is saved of norms and convolutions can only be merged (tokenmill merge)" if saved else ""
            error = self._refuse(module, f"is not a matrix of this model that adapters can change{base}{why}")
            if not self.sites.partial:
                raise error
            self.unknown[module] = str(error)
        return places

    def _low(self, module: str, place: SitePart, low: LowRank) -> None:
        source = place.source
        if place.weight is None:
            raise self._refuse(module, "is a table of embeddings, and the file has lora_A and lora_B for it")
        if low.down.shape[1] != source.shape[1] or low.up.shape[0] != source.shape[0]:
            raise self._refuse(
                module,
                f"is {list(source.shape)} in this model, and the adapter is for "
                f"{[low.up.shape[0], low.down.shape[1]]}: it has another base",
            )
        self._check_rank(module, low.rank)
        if low.magnitude is not None or low.bias is not None:
            self._check_apart(module, place)
        fill, start = self._fill(place.site, module), place.site.borders[place.part]
        down, up = low.down, low.up.float() * low.scale
        magnitude, bias = low.magnitude, low.bias
        if source.rows is not None:
            up = up[source.rows]
            magnitude, bias = (None if t is None else t[source.rows] for t in (magnitude, bias))
        if place.site.form is not None:
            if bias is not None:
                raise self._refuse(module, "is taken into other matrices when the model is loaded: it can have no bias")
            wide = _rows(place, 0, len(up)) + up @ down.float()
            if magnitude is not None:
                wide = wide * (magnitude.float() / torch.linalg.vector_norm(wide, dim=1))[:, None]
            self._take_form(fill, module, wide)
            return
        if magnitude is not None:
            if source.columns is not None:
                raise self._refuse(module, "is split over ranks by columns, where DoRA is not supported")
            gain = magnitude.float() / _norms(place, down.float(), up)
            up = up * gain[:, None]
            fill.gains.append((start, gain))
            if place.bias is not None:
                fill.shifts.append((start, (1.0 - gain) * _host(place.bias[start : start + len(gain)])))
        if source.columns is not None:
            down = down[:, source.columns[0] : source.columns[1]]
        if bias is not None and source.first:
            fill.shifts.append((start, bias.float() * low.scale / self.sites.divisors.get(source.path, 1.0)))
        self._add(fill, module, place.part, down, up)

    def _add(self, fill: Fill, module: str, part: int, down: Tensor, up: Tensor) -> None:
        if any(piece.part == part for piece in fill.pieces):
            raise ModelError(f"{self.adapter.where}: two of its modules are the same matrix of this model.")
        dtype = self.sites.dtype
        piece = Piece(part, down.to(dtype).t(), up.to(dtype).t())
        if not (all_finite(piece.down) and all_finite(piece.up)):  # kernels multiply other rows' zeros by it
            raise self._refuse(module, f"times its scale is too large for {str(dtype).removeprefix('torch.')}")
        fill.pieces.append(piece)

    def _take_form(self, fill: Fill, module: str, wide: Tensor) -> None:
        """The whole matrix, as the layer keeps its own."""
        if fill.whole is not None:
            raise ModelError(f"{self.adapter.where}: two of its modules are the same matrix of this model.")
        wide = wide.to(self.sites.device, self.sites.dtype)
        if not all_finite(wide):
            raise self._refuse(module, f"with this adapter is too large for {str(wide.dtype).removeprefix('torch.')}")
        assert fill.site.form is not None
        fill.whole = fill.site.form(wide)

    def _table(self, module: str, low: LowRank) -> None:
        places = self._places(module)
        if not places:
            return
        place = places[0]
        shape = place.source.shape
        if place.weight is not None:
            raise self._refuse(module, "is not a table of embeddings, but the file has lora_embedding_A for it")
        if (low.down.shape[1], low.up.shape[0]) != shape:
            raise self._refuse(
                module, f"is {list(shape)} in this model, and the adapter is for {[low.down.shape[1], len(low.up)]}"
            )
        self._check_rank(module, low.rank)
        fill, down, up = self._fill(place.site, module), low.down.float(), low.up.float() * low.scale
        if low.magnitude is not None:
            gain = low.magnitude.float() / self._widths(module, place, down, up)
            up = up * gain[:, None]
            fill.gains.append((0, gain))
        self._add(fill, module, 0, down, up)

    def _widths(self, module: str, place: SitePart, down: Tensor, up: Tensor) -> Tensor:
        """Of a table with its adapter, the length of every column, which is DoRA's row."""
        squares = torch.zeros(len(up))
        for at in range(0, place.source.shape[0], _SLICE):
            some = down[:, at : at + _SLICE]
            rows = self._table_rows(module, place, torch.arange(at, at + some.shape[1]))
            squares += (rows + some.t() @ up.t()).square().sum(0)
        return squares.sqrt()

    def _table_rows(self, module: str, place: SitePart, ids: Tensor) -> Tensor:
        rows = None if place.held is None else place.held(ids.to(self.sites.device))
        if rows is None:
            raise self._refuse(
                module, "lies on several devices, where it can have neither DoRA nor other rows of tokens"
            )
        return _host(rows)

    def _tokens(self, module: str, found: TokenRows) -> None:
        """Other rows for some tokens, in embeddings and in a head that shares them: a rank for each token."""
        places, ids, count = self._places(module), torch.tensor(found.ids), len(found.ids)
        head = self.sites.tied.get(places[0].source.path) if places else None
        if head is not None and all(self.sites.names.find(other) != head for other in self.adapter.tokens):
            places = places + self.sites.places.get(head, [])
        self._check_rank(module, count)
        for place in places:
            height, width = place.source.shape
            if max(found.ids) >= height or found.rows.shape[1] != width:
                it = f"row {max(found.ids)} of {found.rows.shape[1]} numbers"
                raise self._refuse(module, f"is {list(place.source.shape)} in this model, and the adapter has {it}")
            one, change = torch.zeros(height, count), found.rows.float().clone()
            one[ids, torch.arange(count)] = 1.0
            fill = self._fill(place.site, module)
            if place.weight is None:
                change -= self._table_rows(module, place, ids)
                self._add(fill, module, place.part, one.t(), change.t())
                continue
            one = one if place.source.rows is None else one[place.source.rows]
            for at, number in one.nonzero().tolist():
                change[number] -= _rows(place, at, 1)[0]
            self._add(fill, module, place.part, change, one)

    def _check_rank(self, module: str, rank: int) -> None:
        if rank > self.sites.most_rank:
            raise self._refuse(
                module,
                f"has rank {rank}, and this engine takes adapters up to {self.sites.most_rank} (--max-lora-rank)",
            )

    def _check_apart(self, module: str, place: SitePart) -> None:
        if place.site.stack is not None:
            why = "is an expert's: on this device a mixture is one operation, in which adapters have low rank only"
            raise self._refuse(module, f"{why} (no DoRA, biases or modules_to_save)")

    def _whole(self, module: str, tensors: dict[str, Tensor]) -> None:
        weight, bias = tensors.get("weight"), tensors.get("bias")
        places = self._places(module)
        if places and weight is not None and places[0].source.flipped:
            weight = weight.t()
        if places and weight is not None and (module in self.adapter.linear or module in self.adapter.tables):
            if tuple(weight.shape) != places[0].source.shape:
                raise self._refuse(module, f"has {list(weight.shape)} numbers in the file: the vocabulary was changed")
            self._check_same(module, places[0], weight)
            weight = None  # saved beside its adapter, as it was
        for place in places:
            self._check_apart(module, place)
            if weight is not None:
                self._replace(module, place, weight, bias)
            elif bias is not None:
                self._shift(module, place, bias)

    def _check_same(self, module: str, place: SitePart, weight: Tensor) -> None:
        """Refuse an adapter of a table that the file holds with other numbers, for it was trained on those."""
        for at in range(0, len(weight), _SLICE) if place.plain is not None else ():
            assert place.plain is not None
            rows = place.plain(at, at + _SLICE)
            if rows is None or rows.is_meta:
                return
            own = rows.float().cpu()
            if (own - weight[at : at + _SLICE].float()).abs().max() > _ALIKE * own.abs().max():
                why = "has other numbers in the file than in this model, beside its adapter: merge it (tokenmill merge)"
                raise self._refuse(module, why)

    def _shift(self, module: str, place: SitePart, bias: Tensor) -> None:
        source, start = place.source, place.site.borders[place.part]
        if place.weight is None or bias.shape != (source.shape[0],):
            raise self._refuse(module, f"has no bias of shape {list(bias.shape)}")
        own = self._besides_added(source, bias.float())
        if place.bias is not None:
            own = own - _host(place.bias[start : start + len(own)])
        if source.first:
            self._fill(place.site, module).shifts.append((start, own))

    def _replace(self, module: str, place: SitePart, weight: Tensor, bias: Tensor | None) -> None:
        source = place.source
        if tuple(weight.shape) != source.shape or (bias is not None and bias.shape != (source.shape[0],)):
            raise self._refuse(module, f"is {list(source.shape)} in this model, and {list(weight.shape)} in the file")
        if place.site.parts > 1:
            raise self._refuse(module, "is multiplied together with others: it cannot be replaced (modules_to_save)")
        fill = self._fill(place.site, module)
        weight = weight if source.rows is None else weight[source.rows]
        if place.site.form is not None and bias is None:
            self._take_form(fill, module, weight.float())
            return
        bias = None if bias is None else self._besides_added(source, bias.float())
        if source.columns is not None:
            weight = weight[:, source.columns[0] : source.columns[1]]
            bias = bias if source.first else None
        if bias is None and place.bias is not None:
            bias = _host(place.bias)
        dtype, device = self.sites.dtype, self.sites.device
        own = None if bias is None else bias.to(device, dtype)
        fill.whole = DenseWeight(weight.to(device, dtype).contiguous(), own)

    def _besides_added(self, source: Source, bias: Tensor) -> Tensor:
        """The product's rows of a bias in the file, without what the model adds to the product itself."""
        added = self.sites.added.get(source.path)
        bias = (bias if added is None else bias - _host(added)) / self.sites.divisors.get(source.path, 1.0)
        return bias if source.rows is None else bias[source.rows]

    def _refuse(self, module: str, why: str) -> ModelError:
        return ModelError(f"{self.adapter.where}: {module[:160]} {why}.")


def _norms(place: SitePart, down: Tensor, up: Tensor) -> Tensor:
    """The length of every row of the product's part with its adapter [n]."""
    found = []
    for at in range(0, len(up), _SLICE):
        some = up[at : at + _SLICE]
        found.append(torch.linalg.vector_norm(_rows(place, at, len(some)) + some @ down, dim=1))
    return torch.cat(found)


def _rows(place: SitePart, at: int, count: int) -> Tensor:
    """Dense rows of the product's part."""
    weight, start = place.weight, place.site.borders[place.part] + at
    assert weight is not None
    ids = torch.arange(start, start + count, device=weight.site_device())
    return _host(weight.base.rows(ids))


def _host(numbers: Tensor) -> Tensor:
    """In float32 on the host; ones in the place of a model's that has shapes alone."""
    return torch.ones(numbers.shape) if numbers.is_meta else numbers.float().cpu()


class Stored(Protocol):
    """Where the matrices of experts lie."""

    def numbers(self, prefix: str) -> list[int]: ...
    def source(self, module: str) -> Source | None: ...


def shared_out(
    stored: Stored, adapter: Adapter, module: str, low: LowRank, counts: Collection[int] | None = None
) -> Iterator[tuple[str, LowRank]]:
    """Experts that were trained as one parameter [experts, ...]: each one's share, under its own name. counts: how many
    a mixture may have, if some may lie elsewhere.

    Of `up` [out, r * experts] expert e has every experts-th column; of `down` [r * experts, in] its own r rows."""
    prefix = stem(module)
    own = stored.numbers(prefix)
    if not own and counts is not None:
        return
    for names in (("gate_up_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("up_proj",)):
        found = [stored.source(f"{prefix}.{own[0] if own else 0}.{name}") for name in names]
        sources = [each for each in found if each is not None]
        if len(sources) < len(names):
            continue
        shape = sum(each.shape[0] for each in sources), sources[0].shape[1]
        made = low.up.shape[0], low.down.shape[1]
        turned = sources[0].flipped and made == shape[::-1]
        if turned or made == shape:
            break
    else:
        raise ModelError(f"{adapter.where}: {module[:160]} fits no stacked experts of this model.")
    parameter = f"{prefix}.{'gate_up_proj' if len(names) > 1 else names[0]}"
    config = adapter.config
    assert config is not None, "stacked experts come in PEFT's folders alone"
    rank = config.rank_of(parameter)
    counts = [len(own)] if counts is None else sorted(counts)
    count, left = divmod(low.down.shape[0], rank)
    if left or count not in counts:
        wanted = f"{rank} for {' or '.join(map(str, counts))} experts"
        raise ModelError(f"{adapter.where}: {parameter} has {low.down.shape[0]} rows, not {wanted}.")
    scale = config.scale_of(parameter, rank)
    downs, ups = low.down.view(count, -1, low.down.shape[1]), low.up.view(low.up.shape[0], -1, count).permute(2, 0, 1)
    if turned:  # Llama 4: the stack is [experts, in, out], and PEFT takes it for [experts, out, in]
        downs, ups = ups.mT, downs.mT
    for expert in own:
        start = 0
        for name, source in zip(names, sources, strict=True):
            rows = source.shape[0]
            yield f"{prefix}.{expert}.{name}", LowRank(downs[expert], ups[expert, start : start + rows], scale)
            start += rows
