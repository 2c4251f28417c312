"""Where adapters apply in one model. Owns: the site of every adapted product, found by the stored matrices that it is
made of, and the sites' tensors.

Sites are noted while a model is built (`Build.adapters`), then get memory: one slot's share of every product, for
adapters of the largest allowed rank. Mixtures, embeddings, the head and rare parts (gains, shifts) get memory with the
first adapter that changes them. Must not know: files, which adapters there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.adapters import AdapterSite, Forms, SiteStack
from tokenmill.lora.names import Names
from tokenmill.lora.weight import LoraWeight, Source

Plain = Callable[[int, int], Tensor | None]
Held = Callable[[Tensor], Tensor | None]
_CHOOSING = frozenset({"gate", "router", "shared_expert_gate", "wg"})
"""What matrices are called that choose among experts."""


@dataclass(frozen=True)
class SitePart:
    """One part of a site: the product, its number in it, and the stored matrix."""

    site: AdapterSite
    part: int
    source: Source
    weight: LoraWeight | None
    """None: a table of embeddings."""
    bias: Tensor | None = None
    """The product's."""
    plain: Plain | None = None
    """Rows [start, stop) of a table of embeddings, if they are as stored."""
    held: Held | None = None
    """Rows of it by id, in whatever form, if they are here."""


def mixing(path: str) -> bool:
    """Is it a matrix of a mixture: an expert's, or one that chooses?"""
    return ".experts." in path or not _CHOOSING.isdisjoint(path.split(".")[-2:])


def _usual(path: str) -> bool:
    """Is it a matrix of a layer that most adapters change? Others get memory with the first one that does."""
    return any(part.isdigit() for part in path.split(".")) and not mixing(path)


def _share_of(path: str, shape: tuple[int, int], share: tuple[int, int, int]) -> Source:
    """Of a stored matrix, the part that a rank has; shape: the part's."""
    dim, part, parts = share
    start, stop = part * shape[dim], (part + 1) * shape[dim]
    if dim == 0:
        return Source(path, (shape[0] * parts, shape[1]), torch.arange(start, stop))
    return Source(path, (shape[0], shape[1] * parts)).between(start, stop, part == 0)


class Sites:
    """The adapted products of one model."""

    def __init__(
        self,
        slots: int,
        most_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        config: Mapping[str, Any] = MappingProxyType({}),
        *,
        partial: bool = False,
    ) -> None:
        """slots: how many adapters lie on the device at once; most_rank: of any of them; config: the model's;
        partial: other ranks have layers or experts that are not here."""
        self.partial = partial
        self.slots, self.most_rank, self.dtype, self.device, self.config = slots, most_rank, dtype, device, config
        self.places: dict[str, list[SitePart]] = {}
        self.embeddings: dict[str, SitePart] = {}
        self.sites: list[AdapterSite] = []
        self.tied: dict[str, str] = {}
        """Of a table of embeddings, the head that multiplies by it."""
        self.added: dict[str, Tensor] = {}
        """Biases that the model itself adds to a product, by the stored matrix."""
        self.divisors: dict[str, float] = {}
        """What biases of a product are divided by, because its layer multiplies behind it."""
        self.mixtures: set[int] = set()
        """How many experts the mixtures have, on all ranks together."""
        self._names: Names | None = None
        self._plain: set[int] | None = None

    # ------------------------------------------------------------ while the model is built

    def adapted(
        self,
        weight: object,
        path: str,
        rows: Tensor | None = None,
        share: tuple[int, int, int] | None = None,
        *,
        flipped: bool = False,
    ) -> LoraWeight:
        """The weight stored as `path`, which adapters may change; rows: its rows are these of what is stored; share: it
        is (dimension, part, parts) of that; flipped: it is stored as [in, out]."""
        shape = weight.shape  # type: ignore[attr-defined]
        source = Source(path, shape if rows is None else (int(rows.max()) + 1, shape[1]), rows)
        if share is not None and share[2] > 1:
            source = _share_of(path, shape, share)
        return LoraWeight(weight, [replace(source, flipped=flipped)], self)

    def embedding(self, path: str, shape: tuple[int, int], plain: Plain, held: Held) -> AdapterSite:
        """A table of embeddings [vocabulary, width]: `down` is read by token id."""
        site = AdapterSite(shape[0], (0, shape[1]))
        self.sites.append(site)
        self.embeddings[path] = SitePart(site, 0, Source(path, shape), None, plain=plain, held=held)
        return site

    def taken(self, weight: LoraWeight, form: Callable[[Tensor], Forms]) -> AdapterSite:
        """A product whose matrix a layer keeps in this form."""
        site = weight.site
        assert site is not None, "it has settled"
        site.why_not, site.form = "", form
        return site

    def ties(self, path: str, head: str) -> None:
        """The head `head` multiplies by this table of embeddings."""
        self.tied[path] = head

    def mixes(self, count: int) -> None:
        """A mixture has so many experts."""
        self.mixtures.add(count)

    def divides(self, path: str, factor: float) -> None:
        """Biases that adapters bring for the product stored as `path` are divided by this."""
        self.divisors[path] = factor

    def adds(self, path: str, bias: Tensor) -> None:
        """The model itself adds this bias to the product stored as `path` (a tied head's)."""
        self.added[path] = bias

    def settle(self, weight: LoraWeight, bias: Tensor | None) -> AdapterSite:
        """A product in its final form."""
        borders = [0]
        for source in weight.sources:
            borders.append(borders[-1] + source.height)
        site = AdapterSite(weight.shape[1], tuple(borders))
        self.sites.append(site)
        for part, source in enumerate(weight.sources):
            self.places.setdefault(source.path, []).append(SitePart(site, part, source, weight, bias))
        return site

    def stack(self, weights: Sequence[Any]) -> SiteStack:
        """One product of every expert, whose matrices a backend has made one: these weights let go of theirs."""
        made = SiteStack([weight.site for weight in weights])
        for weight in weights:
            assert weight.site.borders == made.borders, "experts are alike"
            weight.site.stack, weight.base = made, None
        return made

    # ------------------------------------------------------------ afterwards

    def allocate(self) -> int:
        """Memory for what most adapters change: -> bytes."""
        for path, places in self.places.items():
            if _usual(path):
                for place in places:
                    self.ensure(place.site)
        return self.bytes()

    def ensure(self, site: AdapterSite) -> bool:
        """Memory for one product's low-rank adapters; True: it had none."""
        if site.down is not None or site.why_not or site.form is not None:
            return False
        every, count = [site] if site.stack is None else site.stack.sites, self.slots + 1
        shape, lanes = (len(every), count), -(-site.parts * self.most_rank // 16) * 16
        down = torch.zeros(*shape, site.inputs, lanes, dtype=self.dtype, device=self.device)
        up = torch.zeros(*shape, self.most_rank, site.columns, dtype=self.dtype, device=self.device)
        ranks = torch.zeros(*shape, dtype=torch.int32, device=self.device)
        for i, each in enumerate(every):
            each.down, each.up, each.ranks, each.host_ranks = down[i], up[i], ranks[i], [0] * count
        if site.stack is not None:
            site.stack.down, site.stack.up, site.stack.ranks = down, up, ranks
        return True

    def ensure_gains(self, site: AdapterSite) -> bool:
        """Memory for gains and shifts; True: there was none."""
        new = self.ensure(site)
        if site.gains is not None:
            return new
        site.gains = torch.ones(self.slots + 1, site.columns, device=self.device)
        site.shifts = torch.zeros(self.slots + 1, site.columns, device=self.device)
        return True

    def recordable(self, site: AdapterSite) -> bool:
        """Can a recorded step hold what adapters do here? Not at embeddings, routers, which compute in another type,
        and experts that are multiplied one by one, because the host looks who has tokens."""
        if self._plain is None:
            places = (p for path, each in self.places.items() if not mixing(path) for p in each)
            self._plain = {id(place.site) for place in places}
        return site.stack is not None or id(site) in self._plain

    def bytes(self) -> int:
        """Bytes of all slots."""
        every = [t for site in self.sites for t in (site.down, site.up, site.gains, site.shifts) if t is not None]
        return sum(t.nbytes for t in every)

    def find(self, module: str) -> list[SitePart]:
        """The products that a module's matrix is part of; []: this model has no such module."""
        path = self.names.find(module)
        if path is None:
            return []
        return [self.embeddings[path]] if path in self.embeddings else self.places[path]

    def numbers(self, prefix: str) -> list[int]:
        """Which experts of the mixture `prefix` are here."""
        return self.names.numbers(prefix)

    def source(self, module: str) -> Source | None:
        """The stored matrix of this module."""
        return next((place.source for place in self.find(module)), None)

    @property
    def names(self) -> Names:
        """Every stored matrix that adapters may name."""
        if self._names is None:
            self._names = Names([*self.places, *self.embeddings])
        return self._names

    def modules(self) -> Iterable[str]:
        """Their names."""
        return self.names.exact
