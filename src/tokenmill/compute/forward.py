"""What computes a forward pass: kernels, weights, and the context of a step. Owns: how these refer to one another.

It is one module because each part names the others: a context carries kernels, kernels read the context, weights
multiply with both, and a mixture is made of weights. `runner/batch.py` makes a ForwardContext every step. Names from
`compute/descriptors.py` are re-exported, so a layer imports all that it computes with from here. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypedDict, TypeVar, Unpack

from tokenmill.compute.adapters import AdapterSite, Delta, SiteStack
from tokenmill.compute.descriptors import (
    DRAWN,
    Act,
    AttentionSpec,
    ConvSpec,
    Cuts,
    DeltaSpec,
    Draws,
    GateAct,
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
    Touches,
    Xielu,
)
from tokenmill.compute.lines import RoundsLines
from tokenmill.compute.matrix import Packed, StoredMatrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "Again", "Act", "Around", "AttentionSpec", "ConvSpec", "DeltaSpec", "DRAWN", "Cuts", "Draws", "ForwardContext",
    "FusedMixture", "GateAct", "GroupPlan", "KVFormat", "KVSpec", "KVView", "Kernels", "Mixture", "ModelSpec",
    "NormSpec", "Packed", "Paths", "Recurrence", "RopeSpec", "RouteSpec", "ScanSpec", "SpaceSpec", "StateSpec",
    "StepRows", "StoredMatrix", "Touches", "Weight", "Xielu",
]  # fmt: skip

T = TypeVar("T")
SpanTensors = tuple["Tensor", "Tensor", "Tensor", "Tensor", "Tensor", list[tuple["Tensor", "Tensor", "Tensor"]]]
"""What Kernels.gather_spans returns."""
Recurrence = ConvSpec | DeltaSpec | SpaceSpec | ScanSpec


@dataclass(slots=True)
class ForwardContext:
    """Everything a step's forward pass needs besides the token ids; made fresh each step, read-only for layers.

    T tokens of S sequences lie one sequence after the other. query_start [S + 1] (int32) are the sequences' borders,
    kv_len [S] (int32) how many positions each may read (its own new tokens included), positions [T] (int64). `spans`
    has (query_start, query count, kv_len) as host integers if the device is the host, else it is None.
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
        """The context for these tokens (an index or a slice): some operations find operands by a token's row."""
        rows = self.rows
        if rows is None or rows.adapters is None:
            return self
        return replace(self, rows=replace(rows, tokens=rows.tokens[tokens], adapters=rows.adapters[tokens]))

    def borders(self) -> Tensor:
        """[S + 1]: where the tokens of each of `rows.sequences` begin, as recurrent layers see them."""
        assert self.rows is not None, "recurrent layers find their states by row"
        return self.query_start if self.rows.borders is None else self.rows.borders


@dataclass(slots=True)
class Mixture:
    """One mixture of experts: the router's matrix, a gate_up and a down for each expert, and what belongs to these.

    `shared`: (up, down) of experts that every token visits, with the same activation. shared_gate [1, hidden]: the
    sigmoid of its product scales them. fixed: adapters change none of this. wide: logits in float32. first: the number
    of the first expert in the lists; the router may know more experts, which other ranks hold. slots_for: given if
    experts have no fixed place: `first` is then a slot, and this gives the slots [T, k] of chosen experts [T, k].
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
    """What adapters do to the experts' two products: before the activation, and before gates. They read the inputs
    before these are rounded for the product. Filled when a backend has taken the experts."""


class FusedMixture(Protocol):
    """A mixture of experts as a backend runs it. takes: it also holds the shared experts and their gate. Otherwise it
    adds shared experts that have no gate, and layers add the others."""

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
        """residual + experts(norm(x)) + shared experts; x [T, hidden] -> [T, hidden]. ahead: the weight of the next
        product, which may be prefetched meanwhile."""
        ...

    def chosen(self, x: Tensor, ids: Tensor, gates: Tensor, ctx: ForwardContext) -> Tensor:
        """The routed experts alone, if layers choose them: ids [T, k]; ids that are not in the lists add nothing."""
        ...


class Around(TypedDict, total=False):
    """What surrounds a product. delta: what adapters do to it before its activation."""

    norm: NormSpec | None
    act: Act | None
    residual: Tensor | None
    delta: Delta | None


class Weight(Protocol):
    """A matrix [out, in] in some format: loads, concatenates, splits and multiplies itself."""

    shape: tuple[int, int]

    def matmul(self, x: Tensor, ctx: ForwardContext, **around: Unpack[Around]) -> Tensor:
        """residual + act(norm(x) @ W.T + bias)."""
        ...

    def open(self, x: Tensor, ctx: ForwardContext, delta: Delta | None = None) -> Tensor | None:
        """x @ W.T + bias (and delta) in parts of the sum, as `Kernels.open_product` makes it; None: better whole."""
        ...

    def concat(self, others: list[Any]) -> Weight:
        """[self; others] along out; formats may differ (the result may multiply in parts)."""
        ...

    def take(self, index: Tensor) -> Self:
        """The rows (of out) named by index [n], in that order; used to take apart fused and interleaved checkpoints."""
        ...

    def split(self, dim: int, part: int, parts: int) -> Self:
        """Part `part` of `parts` equal ones, along out (0) or in (1); along in, only part 0 keeps the bias."""
        ...

    def settle(self, kernels: Kernels) -> Weight:
        """The weight in the form that the backend multiplies fastest; it is not concatenated or split afterwards."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Dense rows [n, in], for embeddings."""
        ...

    def dense(self) -> Tensor:
        """The whole matrix in the compute dtype, for MLA absorption."""
        ...

    def pieces(self) -> tuple[Any, dict[str, Tensor | None]] | None:
        """For backends that stack many weights into one: what else describes the format ("dense": nothing), and its
        tensors by name (the numbers as "table"). None: it cannot be stacked."""
        ...

    def bytes(self) -> int:
        """Bytes held: what a product reads."""
        ...


class Again(Protocol):
    """Computes what was recorded again, in the same tensors. spilled: bytes of these that did not fit into the room."""

    spilled: int

    def __call__(self) -> None: ...


class Kernels(RoundsLines, Protocol):
    """Coarse operations; each engine has its own. `kernels/reference.py` is the specification; backends override it.

    Shapes: T tokens, H query heads, D head dim. All outputs are new tensors unless the name ends in `_`.
    On a CPU every result of a row has the same bytes, whatever other rows are in the call.
    """

    state_dtype: str
    """The type in which recurrent layers' matrices are kept between steps."""

    rounds_at_once: int
    """How many numbers of neighbouring matrices are rounded together at load; 0: a matrix by itself."""

    waits: int
    """How often operations have waited for the device so far; steps that wait cannot be recorded."""

    def counters(self) -> dict[str, dict[str, int]]:
        """{op: {"calls": n, "fallbacks": m}} since the start."""
        ...

    chooses: bool
    """`greedy` and `choose` read logits as the head left them; `choose` takes cuts, and `least_kept` finds them."""

    records: bool
    """Can `record` succeed?"""

    trees: bool
    """Does attention follow `GroupPlan.paths`?"""

    def forget_weights(self) -> None:
        """Weights were changed in place: forget everything made from the old numbers."""
        ...

    def record(self, compute: Callable[[], T], room: Tensor | None = None) -> tuple[T, Again | None]:
        """What `compute` returns, and what computes it again in the same tensors; None: it cannot be recorded. room
        [bytes]: where these tensors may lie; recordings that share it must not overlap in time."""
        ...

    def embed(self, table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        """table [V, hidden], ids [T] -> [T, hidden] * scale."""
        ...

    def norm(
        self, x: Tensor, spec: NormSpec, gate: Tensor | None = None, size: int = 0, *, first: bool = False
    ) -> Tensor:
        """The norm of x [..., D]. With a gate (x and gate [T, D]): act(gate) norm(x), or norm(act(gate) x) if the gate
        comes `first` (act: spec.gate), by the root mean square of every `size` columns; spec.weight [size] or [D]."""
        ...

    def pack(self, matrix: StoredMatrix) -> Packed | None:
        """The form in which `product` is fastest; None: the backend has none for this kind, so multiply the matrix as
        it is."""
        ...

    def product(
        self, x: Tensor, weight: Tensor | StoredMatrix | Packed, bias: Tensor | None = None, **around: Unpack[Around]
    ) -> Tensor:
        """residual + act(norm(x) @ weight.T + bias) [T, N] in x's dtype, sums in float32; x [T, K].

        weight: a tensor [N, K], a matrix as it is stored, or what `pack` made of one (both of these include the bias).
        x [T, H, K] and a tensor [H, N, K] multiply head by head, [T, H, N], with no other operation. delta: see
        `add_delta`, applied before the activation. On a CPU integer weights multiply activations that are also rounded
        to int8 (groups of 32, scale max|x| / 127); a group's sum is exact, and groups add up ascending in float32."""
        ...

    def open_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, delta: Delta | None) -> Tensor | None:
        """x @ weight.T + bias (+ delta) in parts [n, T, N] in float32, which readers add up; None: better whole."""
        ...

    def quantise(self, weight: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
        """weight [N, K] -> q [N, K] int8 and scales [N, ceil(K / group)] float16, rounded to nearest (8 or 4 bits).
        group: how many columns share a scale; 0: the number that the backend multiplies fastest."""
        ...

    def adapt(self, x: Tensor, site: AdapterSite, slots: Tensor) -> Tensor | None:
        """down @ x of each token's adapter, for x [T, in] -> [T, lanes] float32; None: the product or `add_delta` will
        compute it. slots [T]: each token's adapter. Lanes behind its own are undefined. x [T] int64: rows of `down`."""
        ...

    def add_delta(self, y: Tensor, delta: Delta) -> Tensor:
        """y [T, N] * gain + shift + up @ low, as compute/adapters.py says; rows without an adapter stay as they are."""
        ...

    def activate(self, x: Tensor, act: Act | GateAct | Xielu, gate: Tensor | None = None) -> Tensor:
        """act(x) [T, D], or [T, D / 2] of an x with a gate. gate [T, D / n]: act(gate) x, each number for n columns."""
        ...

    def add(
        self, x: Tensor, y: Tensor, scale: float | Tensor = 1.0, *, within: NormSpec | None = None,
        times: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(x + scale * within(y)) * times; y may be what `open_product` made; times [1]. scale [T, S] in float32: x
        [T, S * D] is S streams of y's width, and y is added to each with its own factor, rounded once."""
        ...

    def add_norm(
        self, x: Tensor, y: Tensor, norm: NormSpec, scale: float = 1.0, *, within: NormSpec | None = None,
        times: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The result of `add`, and its norm; x, y [T, D]. Every step is rounded to x's type."""
        ...

    def attend(self, x: Tensor, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None = None) -> Tensor:
        """Attention to the paged K/V as stored, causal by position -> [T, H * Dv]; keys: see `choose_keys`.
        x [T, H*Dk + Hkv*Dk + Hkv*Dv] (less if spec.touches.values says so), or latent [T, H*Dk + Dk] (absorbed queries,
        latent | rope key): first they are normed and rotated, k and v stored in their slots; it may be overwritten.
        x [T, H, Dk]: finished queries, to what is stored."""
        ...

    def attend_latent(
        self, q: Tensor, vector: Sequence[Tensor], parts: Sequence[Tensor], spec: AttentionSpec, ctx: ForwardContext,
        keys: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """The same for a latent layer: q [T, H, D + R], and vectors in two pieces, [T, L] (which the spec's k_norm
        norms first) and [T, R]. parts: what carries queries to vectors [H, L, D], and values back [H, DV, L].
        -> [T, H, DV]; None: the layer carries both itself, and calls `attend`."""
        ...

    def choose_keys(
        self, x: Tensor, gains: Tensor, spec: AttentionSpec, top: int, ctx: ForwardContext
    ) -> Tensor | None:
        """The only keys that each token sees, by an index with pages of its own (None: all; no token has more).
        x [T, H*D + D]: its queries and key, prepared and stored as latent attention's. A key's score is the sum over
        heads h of gains[t, h] * relu(scale * q[t, h] . key), in float32. -> positions [T, K] int64 of the `top` best up
        to the token's own, ascending, -1 behind the last; of equals the first."""
        ...

    def recur_(self, inputs: Sequence[Tensor], spec: Recurrence, state: Tensor, ctx: ForwardContext) -> Tensor:
        """What a recurrent layer computes from its inputs and the states of the step's rows (see kernels/states.py).
        Rows at position 0 begin with zeros. States are float32, but those of convolutions, which have x's type:

            ConvSpec   x [T, C], and two gates if it has them [T, C]     state [R + 1, K - 1, C]       -> [T, C]
            DeltaSpec  mixed [T, (q | k | v)], (beta | pace), or apart   state [R + 1, Hv, Dk, Dv]     -> [T, Hv, Dv]
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

        Without gates it computes only the first half: act(...) in row t * k + j -> [T * k, inner]. Without an
        activation only the second half: x [T * k, inner] is the first. An id outside 0..len - 1 (an expert of another
        rank) adds nothing. With `first`, the number of the first expert in the lists, and without gates: both halves,
        not added up (`add_experts` does that), in row t * k + j [T * k, hidden] in float32; zeros if another rank has
        the expert."""
        ...

    def add_experts(self, parts: Tensor, gates: Tensor, dtype: torch.dtype) -> Tensor:
        """Add up parts [T * k, hidden], each times its gate [T, k], as `experts` does -> [T, hidden]: what experts left
        on all ranks, or streams of hidden states. Parts may be of any type."""
        ...

    def pack_mixture(self, mixture: Mixture) -> FusedMixture | None:
        """The whole layer as the backend runs it fastest; empties the mixture's lists. None: call `route` and
        `experts`."""
        ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits [n, V] -> lowest id of the largest logit [n] int64; the same, or ~id where that is not finite; it [n].

        NaN anywhere in a line counts as its largest logit."""
        ...

    def choose(
        self, logits: Tensor, words: Tensor | None, masks: Tensor | None, draws: Draws | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`greedy` among the tokens that masks allow, with the noise of `draws` for drawn lines; None: it cannot do
        this.

        words [n] int32: 1 + the number of a line's mask, or 0 for none, plus DRAWN (None: no masks, all lines are
        drawn). masks [m, W] int32, the lowest bit first, 1 = allowed. -> ids, marked ids (~id also if no allowed token
        is finite), and the largest logits, those of forbidden tokens included."""
        ...

    def least_kept(self, s: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor | None:
        """The least score [n] at which tokens are kept, of scaled logits s [n, V] whose largest is 0: the k [n] int64
        likeliest tokens, then as many of these as together reach probability p [n] float32. None: it cannot do this.

        `choose` uses the same scores for draws with cuts; only a backend that has both operations says `chooses`."""
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
        """Gather a step with one token for each of row_ids [S]: the row's next token, or the one `offsets` [S] behind
        it. tokens [R, L], computed [R] and tables [R, W] (entry j begins at j * block_size) -> token ids [S], positions
        [S], kv_len [S] int32, and for each table (tables [S, W], counted entries [S], slots [S])."""
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
        """Gather a step in which row_ids [S] compute counts [S] tokens each. size: the total and the largest count.
        tables: (table [R, W] whose entry j begins at j * block_size, held [R], how many entries to take). -> token ids
        [T], their rows [T], positions [T], query_start [S + 1], kv_len [S] (both int32), and for each table (tables [S,
        width], held entries [S], slots [T])."""
        ...

    def advance_(self, row_ids: Tensor, ids: Tensor, tokens: Tensor, length: Tensor, computed: Tensor) -> None:
        """Append one token to each of these rows: tokens[row, length[row]] = id; length and computed grow by one."""
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
        """Verify drafts. grants [3, S] int64: rows, the first line of each, and how many drafts it tried (at most
        `most`), which lie behind its known tokens. A row has one line more than drafts; marked [n]: each line's sample,
        ~id if it is bad. Samples stand up to and including the first that differs from its draft; a bad one stands only
        as the row's first. Samples that stand become known tokens, and computed = the new length - 1. -> None, how many
        stand [S].

        parents [S, N] int64: drafts are nodes of trees. It has the parent of the j-th draft: 1 + an earlier draft's
        number, or 0 for the newest known token. Line 1 + j is the j-th draft's. The last row of grants [4, S] says how
        many drafts may stand one behind the other (at most `most`). A draft is right if it is the sample behind its
        parent; of equal drafts the first is. -> path [S, 1 + most]: the line, counted from the row's first, of each
        sample that may stand, and how many do stand [S]."""
        ...

    def look_up_(
        self, row_ids: Tensor, count: int, sizes: tuple[int, int], reach: int, tokens: Tensor, length: Tensor
    ) -> None:
        """Leave `count` guesses behind the known tokens (at most `reach`) of each of row_ids [S]: the tokens that
        followed the latest earlier occurrence of the row's last tokens. sizes: the least and the most tokens to match,
        the longest match first. If the row ends before `count` tokens, they repeat from their beginning; without an
        occurrence the last token is taken. tokens [R, L] int32, length [R]."""
        ...

    def copy_rows_(self, pairs: Sequence[tuple[Tensor, Tensor]], froms: Tensor, tos: Tensor) -> None:
        """Copy row froms[i] of the first tensor of each pair to row tos[i] of the second, for froms and tos [n] int64.
        Rows of a pair are equal in bytes. No copy reads what another one writes, and a copy of a row to itself does
        nothing. pairs: the same object each time."""
        ...

    def move_kv_(self, kv: list[KVView], src: Tensor, dst: Tensor) -> None:
        """Copy the contents of slots src [S, W] to slots dst [S, W] in each of these layers' pages. Lines share no
        slots. In a line no copy reads what an earlier one has written, and a copy of a slot to itself does nothing."""
        ...
