"""What computes a forward pass: kernels, weights, and the context of a step. Owns: how these refer to one another.

It is one module because each part names the others: a context carries kernels, kernels read the context, weights
multiply with both, and a mixture is made of weights. `runner/batch.py` makes a ForwardContext every step. Names from
`compute/descriptors.py` are re-exported, so a layer imports all that it computes with from here. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from tokenmill.compute.adapters import AdapterSite, Delta, SiteStack
from tokenmill.compute.descriptors import (
    DRAWN,
    Act,
    AttentionSpec,
    ConvSpec,
    Cuts,
    DeltaSpec,
    Draws,
    GroupPlan,
    KVFormat,
    KVSpec,
    KVView,
    ModelSpec,
    NormSpec,
    Paths,
    RopeSpec,
    RouteSpec,
    ScanSpec,
    SpaceSpec,
    StateSpec,
    StepRows,
)
from tokenmill.compute.matrix import StoredMatrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "Again",
    "Act",
    "AttentionSpec",
    "ConvSpec",
    "DeltaSpec",
    "DRAWN",
    "Cuts",
    "Draws",
    "ForwardContext",
    "FusedMixture",
    "GroupPlan",
    "KVFormat",
    "KVSpec",
    "KVView",
    "Kernels",
    "Mixture",
    "ModelSpec",
    "NormSpec",
    "Packed",
    "Paths",
    "Recurrence",
    "RopeSpec",
    "RouteSpec",
    "ScanSpec",
    "SpaceSpec",
    "StateSpec",
    "StepRows",
    "StoredMatrix",
    "Weight",
]

T = TypeVar("T")
SpanTensors = tuple["Tensor", "Tensor", "Tensor", "Tensor", "Tensor", list[tuple["Tensor", "Tensor", "Tensor"]]]
"""What Kernels.gather_spans gives."""
Recurrence = ConvSpec | DeltaSpec | SpaceSpec | ScanSpec


@dataclass(slots=True)
class ForwardContext:
    """Everything a step's forward pass needs besides the token ids; made fresh each step, read-only for layers.

    T tokens of S sequences lie one sequence after the other: query_start [S + 1] (int32) are their borders,
    kv_len [S] (int32) how many positions each may read (its own new tokens included), positions [T] (int64).
    `spans` mirrors (query_start, query count, kv_len) as host integers where the device is the host, else None.
    `embeds` (rows [n] of this batch, values [n, hidden]) replace those rows' embeddings before the first layer.
    `taps`: the model fills taps[i] with layer i's output [T, hidden] for every i that is a key, and taps[-1] with the
    final hidden states.
    """

    kernels: Kernels
    positions: Tensor
    query_start: Tensor
    kv_len: Tensor
    max_query: int
    kv: list[KVView]
    groups: list[GroupPlan]
    rows: StepRows | None = None
    spans: list[tuple[int, int, int]] | None = None
    taps: dict[int, Tensor] | None = None
    embeds: tuple[Tensor, Tensor] | None = None
    block_size: int = 16

    def of(self, tokens: Any) -> ForwardContext:
        """The context for these tokens alone (an index or a slice), where operands are found by each token's row."""
        rows = self.rows
        if rows is None or rows.adapters is None:
            return self
        return replace(self, rows=replace(rows, tokens=rows.tokens[tokens]))

    def borders(self) -> Tensor:
        """[S + 1]: where the tokens of each of `rows.sequences` begin, as recurrent layers see them."""
        assert self.rows is not None, "recurrent layers find their states by row"
        return self.query_start if self.rows.borders is None else self.rows.borders


@dataclass(slots=True)
class Mixture:
    """One mixture of experts: the router's matrix, one gate_up and one down per expert, and what lies beside them.

    `shared`: (up, down) of experts that every token visits, with the same activation; shared_gate [1, hidden]: their
    share is the sigmoid of its product. fixed: none of this is changed by adapters. wide: logits in float32.
    first: the number of the first expert in the lists; the router may know more, which are other ranks'. slots_for:
    experts have no fixed place, and `first` is a slot: it gives the slots [T, k] of chosen experts [T, k].
    """

    router: Weight
    route: RouteSpec
    ups: list[Weight]
    downs: list[Weight]
    act: Act
    shared: tuple[Weight, Weight] | None = None
    shared_gate: Weight | None = None
    fixed: bool = True
    wide: bool = False
    first: int = 0
    slots_for: Callable[[Tensor, ForwardContext], Tensor] | None = None
    operands: tuple[SiteStack, SiteStack] | None = None
    """What adapters do to the experts' two products: before the activation, and before gates; they read what is
    multiplied before it is rounded for that. Filled when a backend has taken the experts."""


class FusedMixture(Protocol):
    """A mixture of experts as a backend runs it. takes: it holds the shared experts and their gate as well; else it
    adds those without a gate, and layers add others."""

    takes: bool

    def __call__(
        self,
        x: Tensor,
        ctx: ForwardContext,
        *,
        norm: NormSpec | None = None,
        residual: Tensor | None = None,
        ahead: Weight | None = None,
    ) -> Tensor:
        """residual + experts(norm(x)) + shared experts; x [T, hidden] -> [T, hidden]. ahead: the weight that multiplies
        next, which may be brought near meanwhile."""
        ...

    def chosen(self, x: Tensor, ids: Tensor, gates: Tensor, ctx: ForwardContext) -> Tensor:
        """The routed experts alone, where layers choose: ids [T, k] among those in the lists; others add nothing."""
        ...


class Weight(Protocol):
    """A matrix [out, in] in some format: loads, concatenates, splits and multiplies itself."""

    shape: tuple[int, int]

    def matmul(
        self,
        x: Tensor,
        ctx: ForwardContext,
        *,
        norm: NormSpec | None = None,
        act: Act | None = None,
        residual: Tensor | None = None,
        delta: Delta | None = None,
    ) -> Tensor:
        """residual + act(norm(x) @ W.T + bias). The base composes; formats fuse what they can. delta: what adapters do
        to the product before its activation."""
        ...

    def concat(self, others: list[Any]) -> Weight:
        """[self; others] along out; formats may differ (the result may multiply in parts)."""
        ...

    def take(self, index: Tensor) -> Self:
        """The rows (of out) named by index [n], in that order: fused and interleaved checkpoints come apart so."""
        ...

    def split(self, dim: int, part: int, parts: int) -> Self: ...
    def settle(self, kernels: Kernels) -> Weight:
        """No concatenating or splitting follows: -> the weight in the form that the backend multiplies fastest."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in], for embeddings."""
        ...

    def dense(self) -> Tensor:
        """The whole matrix in the compute dtype, for MLA absorption."""
        ...

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None:
        """What else must be known of the format ("dense": nothing) and its tensors by name, the numbers as "table",
        for backends that stack many weights into one; None: cannot be stacked."""
        ...

    def bytes(self) -> int: ...


class Packed(Protocol):
    """A matrix in a backend's own form, its bias within. One that the backend's `product` does not know has
    `product(x)` -> x @ matrix.T + bias."""

    def rows(self, ids: Tensor, dtype: Any) -> Tensor:
        """Dense rows [n, K] in torch's type `dtype`."""
        ...

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None:
        """See Weight.pieces."""
        ...

    def bytes(self) -> int:
        """Bytes held."""
        ...


class Again(Protocol):
    """Makes what was recorded once more, in the same tensors. spilled: bytes of them that did not fit into the room."""

    spilled: int

    def __call__(self) -> None: ...


class Kernels(Protocol):
    """Coarse operations; built per engine. `kernels/reference.py` is the specification, backends override.

    Shapes: T tokens, H query heads, D head dim. All outputs are new tensors unless the name ends in `_`.
    On CPU every result of a row is the same bytes whatever other rows are in the call.
    """

    waits: int
    """How often an operation has waited for the device so far: such steps cannot be recorded."""

    def counters(self) -> dict[str, dict[str, int]]:
        """{op: {"calls": n, "fallbacks": m}} since the start."""
        ...

    chooses: bool
    """`greedy` and `choose` read logits as the head's product left them, so that nothing need widen them; `choose`
    takes draws with cuts, and `least_kept` says where they are."""

    records: bool
    """Can `record` succeed?"""

    trees: bool
    """Does attention follow `GroupPlan.paths`?"""

    def forget_weights(self) -> None:
        """Weights have new numbers where they stand: forget what was made of the old ones."""
        ...

    def record(self, compute: Callable[[], T], room: Tensor | None = None) -> tuple[T, Again | None]:
        """What `compute` makes, and what makes it again in the same tensors; None: it cannot be recorded. room [bytes]:
        where these tensors may lie, for recordings that are done with before another one in it begins."""
        ...

    def embed(self, table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        """table [V, hidden], ids [T] -> [T, hidden] * scale."""
        ...

    def norm(
        self, x: Tensor, spec: NormSpec, gate: Tensor | None = None, size: int = 0, *, first: bool = False
    ) -> Tensor:
        """x [..., D] normed. With a gate (x and gate [T, D]): silu(gate) norm(x), or norm(silu(gate) x) if the gate
        comes `first`, by the root mean square of every `size` columns; spec.weight [size] or [D]."""
        ...

    def pack(self, matrix: StoredMatrix) -> Packed | None:
        """The form in which `product` is fastest; None: it has none for this kind, multiply the matrix as it is."""
        ...

    def product(
        self,
        x: Tensor,
        weight: Tensor | StoredMatrix | Packed,
        bias: Tensor | None = None,
        *,
        norm: NormSpec | None = None,
        act: Act | None = None,
        residual: Tensor | None = None,
        delta: Delta | None = None,
    ) -> Tensor:
        """residual + act(norm(x) @ weight.T + bias) [T, N] in x's dtype, sums in float32; x [T, K].

        weight: a tensor [N, K], a matrix as it is stored, or what `pack` made of one (the bias is within these two).
        x [T, H, K] and a tensor [H, N, K]: head by head, [T, H, N], and nothing around it. delta: see `add_delta`,
        which comes before the activation. On a CPU integers multiply activations that are rounded to int8 as well, in
        groups of 32 with scale max|x| / 127: sums within a group are exact, groups add up ascending in float32."""
        ...

    def quantise(self, weight: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
        """weight [N, K] -> q [N, K] int8 and scales [N, ceil(K / group)] float16, rounded to nearest (8 or 4 bits).
        group: columns that share a scale; 0: as many as the backend multiplies fastest."""
        ...

    def adapt(self, x: Tensor, site: AdapterSite, rows: Tensor, slots: Tensor) -> Tensor | None:
        """What each token's adapter makes of x [T, in]: down @ x -> [T, lanes] float32; None: the product or
        `add_delta` will do that, too. rows [T] name the tokens' rows and slots [R + 1] each row's adapter. What lies
        behind an adapter's own lanes is not defined. x [T] int64: ids of a table of embeddings, whose rows of `down`
        are taken."""
        ...

    def add_delta(self, y: Tensor, delta: Delta) -> Tensor:
        """y [T, N] * gain + shift + up @ low, as compute/adapters.py says; rows without an adapter stay as they are."""
        ...

    def activate(self, x: Tensor, act: Act | Literal["sigmoid"], gate: Tensor | None = None) -> Tensor:
        """act(x) [T, D], or [T, D / 2] for the kinds that hold a gate themselves; with a gate [T, D]: act(gate) x, act
        being silu or sigmoid."""
        ...

    def add(self, x: Tensor, y: Tensor, scale: float = 1.0, *, within: NormSpec | None = None) -> Tensor:
        """x + scale * within(y)."""
        ...

    def add_norm(
        self, x: Tensor, y: Tensor, norm: NormSpec, scale: float = 1.0, *, within: NormSpec | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, and what a norm makes of it; x, y [T, D]. Every step is rounded to x's type."""
        ...

    def attend(self, x: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """Against the paged K/V as stored, causal by position -> [T, H * Dv].

        x [T, H*Dk + Hkv*Dk + Hkv*Dv]: queries and keys are normed and rotated first, k and v go to their slots.
        Latent: x [T, H*Dk + Dk] (queries already absorbed; then latent | rope key); the rotated part of each query head
        and of the key is its last `rope.dim` entries (RopeSpec.start). x [T, H, Dk]: queries that are ready, against
        what another layer has stored."""
        ...

    def recur_(self, inputs: Sequence[Tensor], spec: Recurrence, state: Tensor, ctx: ForwardContext) -> Tensor:
        """What a recurrent layer makes of its inputs and the states of the step's rows (kernels/states.py has the
        formulas); rows at position 0 begin with zeros. The state is in float32, but that of convolutions in x's type:

            ConvSpec   x [T, C]                                          state [R + 1, K - 1, C]       -> [T, C]
            DeltaSpec  mixed [T, (q | k | v)], gates [T, (beta | rate)]  state [R + 1, Hv, Dk, Dv]     -> [T, Hv, Dv]
            SpaceSpec  mixed [T, (x | b | c)], rates [T, H]              state [R + 1, H, N, P]        -> [T, H * P]
            ScanSpec   x and rates [T, C], mixed [T, (b | c)]            state [R + 1, N, C]           -> [T, C]
        """
        ...

    def route(self, logits: Tensor, spec: RouteSpec) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> expert ids [T, k] (int64) and gates [T, k] (float32)."""
        ...

    def experts(
        self,
        x: Tensor,
        weights: tuple[list[Weight], list[Weight]],
        ids: Tensor,
        gates: Tensor | None,
        act: Act | None,
        ctx: ForwardContext,
        first: int | None = None,
    ) -> Tensor:
        """weights (gate_up, down), one of each per expert: sum over j = 0..k-1, in this order and in float32, of
        gates[t, j] * down[ids[t, j]](act(gate_up[ids[t, j]](x[t]))) -> [T, hidden] in x's dtype.

        Without gates only the first half: act(...) in row t * k + j -> [T * k, inner]. Without an activation only the
        second: x [T * k, inner] is that. An id outside 0..len - 1 (an expert of another rank) adds nothing.
        With `first`, the number of the first expert in the lists, and without gates: both halves, not added up
        (`add_experts`), in row t * k + j [T * k, hidden] in float32; zeros where the chosen one is elsewhere."""
        ...

    def add_experts(self, parts: Tensor, gates: Tensor, dtype: torch.dtype) -> Tensor:
        """Parts of `experts` [T * k, hidden] that are all there now, added up as it does -> [T, hidden]."""
        ...

    def pack_mixture(self, mixture: Mixture) -> FusedMixture | None:
        """The whole layer as the backend runs it fastest, its lists of experts emptied; None: `route`, `experts`."""
        ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits [n, V] -> lowest id of the largest logit [n] int64; the same, or ~id where that is not finite; it [n].

        NaN anywhere in a line counts as its largest logit."""
        ...

    def choose(
        self, logits: Tensor, words: Tensor | None, masks: Tensor | None, draws: Draws | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`greedy` among the tokens that masks allow, with the noise of `draws` where a line is drawn; None: it cannot.

        words [n] int32: 1 + a line's mask, or 0, plus DRAWN (None: no masks, all lines are drawn); masks [m, W] int32,
        the lowest bit first, 1 = allowed. -> ids, marked (~id as well if no allowed token is finite), and the largest
        logits, forbidden ones included."""
        ...

    def least_kept(self, s: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor | None:
        """The score [n] from which tokens of scaled logits s [n, V], the largest of which is 0, are kept: the k [n]
        int64 likeliest ones, then those of them that together reach probability p [n] float32. None: it cannot.

        What it gives is what `choose` uses for draws with cuts; only a backend that has both says `chooses`."""
        ...

    def gather_rows(
        self,
        row_ids: Tensor,
        tokens: Tensor,
        computed: Tensor,
        tables: list[Tensor],
        block_size: int,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """What a step needs of the rows' state for one token of each of row_ids [S], the next one or one `offsets` [S]
        later: tokens [R, L], computed [R] and tables [R, W] (entry j begins at j * block_size) -> token ids [S],
        positions [S], kv_len [S] int32, and per table (tables [S, W], counted entries [S], slots [S])."""
        ...

    def gather_spans(
        self,
        row_ids: Tensor,
        counts: Tensor,
        size: tuple[int, int],
        tokens: Tensor,
        computed: Tensor,
        tables: list[tuple[Tensor, Tensor, int]],
        block_size: int,
    ) -> SpanTensors:
        """What a step needs of the rows' state where row_ids [S] compute counts [S] tokens each, size: `total` and the
        longest; tables: (table [R, W] whose entry j begins at j * block_size, held [R], how many entries count).
        -> token ids [T], their rows [T], positions [T], query_start [S + 1], kv_len [S] (both int32), and per table
        (tables [S, width], held entries [S], slots [T])."""
        ...

    def advance_(self, row_ids: Tensor, ids: Tensor, tokens: Tensor, length: Tensor, computed: Tensor) -> None:
        """One token more in each of these rows: tokens[row, length[row]] = id; length and computed grow by one."""
        ...

    def accept_(
        self,
        grants: Tensor,
        most: int,
        parents: Tensor | None,
        marked: Tensor,
        tokens: Tensor,
        length: Tensor,
        computed: Tensor,
    ) -> tuple[Tensor | None, Tensor]:
        """grants [3, S] int64: rows, the first line of each, and how many drafts it tried (at most `most`), which lie
        behind its known tokens. A row has a line more than drafts; marked [n]: each line's sample, ~id if it is bad.
        Samples stand up to and including the first that is not its draft, and a bad one only if it is the row's
        first: they become known tokens. Then computed = length - 1, length being the new one. -> None, how many stand
        [S].

        parents [S, N] int64: drafts are nodes of trees. It says what the j-th draft goes on from, 1 + an earlier one's
        number, or 0: the newest known token. Line 1 + j is the j-th draft's; grants [4, S] say last how many drafts may
        stand one behind the other (at most `most`). A draft is right if it is the sample behind its parent; of equal
        ones the first. -> path [S, 1 + most]: the line, counted from the row's first, of each sample that may stand,
        and how many do stand [S]."""
        ...

    def look_up_(
        self, row_ids: Tensor, count: int, sizes: tuple[int, int], reach: int, tokens: Tensor, length: Tensor
    ) -> None:
        """Leave `count` guesses behind the known tokens, at most `reach`, of each of row_ids [S]: what followed the
        latest earlier occurrence of the row's last tokens. sizes: at least and at most so many of them, the longest
        match first. What follows is taken again from its beginning where the row ends; without an occurrence it is the
        last token. tokens [R, L] int32, length [R]."""
        ...

    def move_kv_(self, kv: list[KVView], src: Tensor, dst: Tensor) -> None:
        """Copy what lies in slots src [S, W] to slots dst [S, W] in each of these layers' pages. Lines share no slots;
        in a line no copy reads what one before it has written, and one whose slots are the same does nothing."""
        ...
