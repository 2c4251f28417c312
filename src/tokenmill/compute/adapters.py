"""How adapters (LoRA) look to layers, kernels and runners. Owns: the descriptors of an adapted product, and the seams.

Slots are numbered places on a device that each hold one adapter; slot 0 means none. A row knows its slot. So a step's
tokens find their adapters by row, and one recording serves every mixture of adapters. Tensors appear as annotations
only. Must not know: files, names, how adapters are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False, weakref_slot=True)
class AdapterSite:
    """One product [out, in] that adapters may change, and what each slot's adapter does to it:

        y * gain + shift + up @ (down @ x)        gain 1 and shift 0 where there are no tensors

    The product's columns are cut into parts at `borders` (q, k and v; gate and up). Each part has an adapter of its
    own: in a slot of rank r, lane p * r + j of `down` belongs to part
    p. down [slots, in, lanes], up [slots, most rank, out] in
    the compute dtype, ranks [slots] int32 (0: the adapter leaves this product alone); gains and shifts [slots, out]
    float32. `whole`: by slot, weights that replace the product's own.

    form: a layer keeps the matrix in a form of its own. Adapters are worked into whole matrices then, and `whole` holds
    them in that form.
    """

    inputs: int
    borders: tuple[int, ...]
    down: Tensor | None = None
    up: Tensor | None = None
    ranks: Tensor | None = None
    host_ranks: list[int] = field(default_factory=list)
    gains: Tensor | None = None
    shifts: Tensor | None = None
    whole: dict[int, Any] = field(default_factory=dict)
    why_not: str = ""
    """Why adapters cannot change this product; empty if they can."""
    form: Callable[[Tensor], Forms] | None = None
    stack: SiteStack | None = None
    """Set for an expert's product: its tensors lie between those of the other experts."""

    @property
    def columns(self) -> int:
        """Of the product."""
        return self.borders[-1]

    @property
    def parts(self) -> int:
        """How many adapters of one slot lie side by side at this site."""
        return len(self.borders) - 1

    @property
    def used(self) -> bool:
        """Has any adapter changed this product so far?"""
        return self.down is not None


@dataclass(slots=True, eq=False)
class Forms:
    """A matrix as a layer keeps it: in parts."""

    parts: tuple[Tensor, ...]

    def bytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.parts)

    def settle(self, kernels: Any) -> Forms:
        """It is in its final form."""
        return self


@dataclass(slots=True, eq=False)
class SiteStack:
    """One product of every expert of a mixture, for backends that multiply by all experts at once. The sites' tensors
    lie one behind the other. down [E, slots, in, lanes], up [E, slots, most rank, out], ranks [E, slots]."""

    sites: list[AdapterSite]
    down: Tensor | None = None
    up: Tensor | None = None
    ranks: Tensor | None = None

    @property
    def parts(self) -> int:
        """The same for each site."""
        return self.sites[0].parts

    @property
    def borders(self) -> tuple[int, ...]:
        """The same for each site."""
        return self.sites[0].borders


@dataclass(slots=True, eq=False)
class Delta:
    """What a step's adapters do to one product. `low` [T, lanes] float32 is down @ x, which `up` multiplies after the
    sum; None: the product computes it as well.

    inputs: x, normed. slots [T] int32: each token's. scale: factor of up @ low, which only embeddings set.
    """

    site: AdapterSite
    inputs: Tensor
    low: Tensor | None
    slots: Tensor
    scale: float = 1.0


class AdapterSites(Protocol):
    """Finds the products of a model under construction that adapters may change: layers pass every weight through
    it."""

    def adapted(
        self,
        weight: Any,
        path: str,
        rows: Tensor | None = None,
        share: tuple[int, int, int] | None = None,
        *,
        flipped: bool = False,
    ) -> Any:
        """The weight stored as `path`, made changeable by adapters. rows: which rows of the stored matrix it has.
        share: which share of that, as (dimension, part, parts). flipped: it is stored as [in, out]."""
        ...

    def taken(self, weight: Any, form: Callable[[Tensor], Forms]) -> AdapterSite:
        """The site of a settled weight whose matrix a layer keeps in this form."""
        ...

    def ties(self, path: str, head: str) -> None:
        """The head `head` multiplies by the table of embeddings `path`."""
        ...

    def mixes(self, count: int) -> None:
        """A mixture has so many experts, of which some may lie on other ranks."""
        ...

    def divides(self, path: str, factor: float) -> None:
        """The layer multiplies behind the product stored as `path` by what the model multiplies before it: a bias that
        an adapter brings is divided by that."""
        ...

    def adds(self, path: str, bias: Tensor) -> None:
        """The model itself adds this bias to the product of the weight stored as `path`."""
        ...

    def embedding(
        self,
        path: str,
        shape: tuple[int, int],
        plain: Callable[[int, int], Tensor | None],
        held: Callable[[Tensor], Tensor | None],
    ) -> AdapterSite | None:
        """A table of embeddings [vocabulary, width]. plain: rows [start, stop) of it, if they are as stored. held: rows
        by id, whatever their form, if they are here."""
        ...

    def stack(self, weights: Sequence[Any]) -> SiteStack:
        """The sites of these settled weights (one product of every expert), for a backend that holds all matrices as
        one. The weights no longer hold their own."""
        ...


class AdapterStore(Protocol):
    """A device's adapters: each has a number, is kept in host memory and is loaded into a slot."""

    def command(self, message: dict[str, Any]) -> dict[str, Any]:
        """Handle a message to read an adapter, report the state or drop an adapter: see lora/store.py."""
        ...

    def load(self, loads: Sequence[tuple[int, int]]) -> bool:
        """Load pairs of (slot, adapter); True: existing recordings lack a change and must be made again."""
        ...

    def eager(self, slots: Iterable[int]) -> bool:
        """Does an adapter in these slots change anything that recordings cannot contain?"""
        ...


class NoAdapters:
    """The store of an engine without adapters."""

    def command(self, message: dict[str, Any]) -> dict[str, Any]:
        """Nothing is known."""
        return {}

    def load(self, loads: Sequence[tuple[int, int]]) -> bool:
        """Nothing to load."""
        return False

    def eager(self, slots: Iterable[int]) -> bool:
        """Nothing is changed."""
        return False
