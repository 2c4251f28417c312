"""Descriptions that layers give to Kernels, and facts about a model. Owns: the descriptors.

Plain records; tensors appear only as annotations, so this file needs no torch. Most of them (NormSpec, RopeSpec,
AttentionSpec, KVSpec) are made once when a model is built. Must not know: kernels, weights, steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Act = Literal["silu", "gelu", "gelu_tanh", "relu", "silu_mul", "gelu_mul", "gelu_tanh_mul", "relu2", "oai_swiglu",
              "clipped_silu_mul"]  # fmt: skip
"""`*_mul` and `oai_swiglu` take [gate | up] concatenated on the last dimension and halve it. "clipped_silu_mul": the
gate is at most 10 before its SiLU, and up is at most 10 away from 0."""
GateAct = Literal["silu", "sigmoid", "softplus", "relu", "relu2", "gelu_tanh", "none"]
"""What a gate may be turned into before it multiplies; "none": it stays as it is."""


@dataclass(slots=True)
class Xielu:
    """An activation with learned numbers (above, below, beta, eps) [4] in float32: for x > 0 above x^2 + beta x, else
    below (exp(min(x, eps)) - 1 - x) + beta x."""

    numbers: Tensor


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer keeps for each token. Layers with equal specs form a KV group (one block table per sequence).

    kind: "full" every position; "window" only the last `window` positions are ever read; "latent" one shared
    vector per token (MLA): `key_dim` wide, values are its first `value_dim` entries, nothing stored twice.
    """

    kind: Literal["full", "window", "latent"]
    heads: int
    key_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one recurrent layer keeps for each row, whatever the row's length: parts of (torch's name of the dtype,
    shape)."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of one row's state."""
        return sum(math.prod(shape) * _STATE_BYTES[dtype] for dtype, shape in self.parts)


_STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "float8_e4m3fn": 8, "int4": 4}
_HALVES = 2
"""How many groups a head has in int4, unless `group` says otherwise."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a cache stores numbers: plainly; in 8 bits with one bfloat16 scale for each `group` of numbers of a token's
    head; or in 4 bits with a scale and a least value for each group.

    dtype is torch's name of the stored type, or int4. group 0: a whole head (of K, of V) shares a scale; in int4 each
    half does. values: the type of values, if it differs from that of keys.
    """

    dtype: str
    group: int = 0
    values: str = ""

    @property
    def of_values(self) -> KVFormat:
        """The format of values, as if keys had it, too."""
        return KVFormat(self.values or self.dtype, self.group)

    @property
    def element_bytes(self) -> float:
        """The bytes of one stored number, averaged over keys and values."""
        return (_BITS[self.dtype] + _BITS[self.values or self.dtype]) / 16

    @property
    def scaled(self) -> bool:
        """Are there scales?"""
        return _BITS[self.dtype] <= 8

    @property
    def packed(self) -> bool:
        """Do two numbers share a byte?"""
        return self.dtype == "int4"

    def groups(self, dim: int) -> int:
        """How many groups, each with a scale, a head of `dim` numbers has."""
        return dim // self.group if self.group else _HALVES if self.packed else 1

    def scales(self, dim: int) -> int:
        """How many bfloat16 numbers are stored with a head of `dim` numbers: scales, and in int4 as many least
        values."""
        return 0 if not self.scaled else self.groups(dim) * (2 if self.packed else 1)

    def head_bytes(self, dim: int) -> int:
        """Bytes of one head of one token, scales included."""
        return dim * _BITS[self.dtype] // 8 + 2 * self.scales(dim)

    def bytes_per_token(self, spec: KVSpec) -> int:
        """Bytes that one layer stores per token."""
        if spec.kind == "latent":
            return self.head_bytes(spec.key_dim)
        return spec.heads * (self.head_bytes(spec.key_dim) + self.of_values.head_bytes(spec.value_dim))


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's pages: key [blocks, heads, block_size, key_dim], value alike (latent: a view into key).

    With a scaled KVFormat also key_scale [blocks, heads, block_size, scales] and value_scale, bfloat16 (latent: the
    same tensor): number i of a head is key[..., i] * key_scale[..., i // (key_dim / scales)].

    In int4 key is uint8 [..., key_dim / 2]: byte j holds number j below number j + key_dim / 2. key_scale holds scales,
    then least values: number i is q * scale + least.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


@dataclass(slots=True)
class NormSpec:
    """y = (x - mean if layer) / sqrt(var + eps) * (weight + offset) + bias, computed in float32. weight [D]; of heads
    also [heads, D], each head's own. gate: what a gate is turned into before it multiplies."""

    weight: Tensor
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: Tensor | None = None
    offset: float = 0.0
    gate: Literal["silu", "sigmoid"] = "silu"


@dataclass(slots=True)
class RopeSpec:
    """Rotary embedding: cos and sin [max_positions, dim / 2] in float32 (scaling already applied).

    The first `dim` entries of each head rotate (after `start` entries). interleaved: pairs (0,1),(2,3),...; else
    halves.
    """

    cos: Tensor
    sin: Tensor
    dim: int
    interleaved: bool = False
    start: int = 0


@dataclass(slots=True)
class Touches:
    """What is done to the heads of new queries, keys and values besides their rotation: norms of each head (or of all
    together), before the rotation or (late) behind it; behind norms that come first, every number is clipped at +-clip;
    last, queries are multiplied by temper[position] (float32), and values by `factor`.

    values: "own": they lie behind the keys. "keys": there are none; they are the keys as the product made them, before
    norm and rotation. "stored": there are queries alone, which read what another layer has stored."""

    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    v_norm: NormSpec | None = None
    late: bool = False
    temper: Tensor | None = None
    values: Literal["own", "keys", "stored"] = "own"
    clip: float = 0.0
    factor: float = 1.0


@dataclass(slots=True)
class AttentionSpec:
    """One attention layer. `layer` indexes ForwardContext.kv, `group` indexes ForwardContext.groups.

    Query head i uses key and value head i
    (heads / kv_heads). A window w > 0: a query at position p sees (p - w, p]. Below 0: positions are cut into chunks of
    -w, and a query sees the positions of its own chunk.
    """

    layer: int
    group: int
    heads: int
    kv: KVSpec
    scale: float
    rope: RopeSpec | None = None
    touches: Touches = field(default_factory=Touches)
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    window: int = 0


@dataclass(slots=True)
class DeltaSpec:
    """One layer with a gated delta rule. Every key head serves value_heads / key_heads value heads: neighbours, or
    (tiled) heads that lie key_heads apart. rate [Hv] and shift in float32 say how fast each value head forgets: all of
    its matrix alike (shift [Hv]), or each of its lines, of which a key has one number (shift [Hv * Dk]). most_beta says
    which part of an old value a new one replaces at the most. floor: the least logarithm of a line's decay, if there is
    one (below 0).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    rate: Tensor
    shift: Tensor
    tiled: bool = False
    most_beta: float = 1.0
    floor: float = 0.0

    @property
    def by_key(self) -> bool:
        """Does each line of a matrix have a decay of its own?"""
        return len(self.shift) != self.value_heads


@dataclass(slots=True)
class SpaceSpec:
    """One state-space layer (Mamba-2). Every group of b and c serves heads / groups heads; rate, shift and skip [H] are
    float32. A token's pace is kept between low and high; factor: of what it is made of; gain: of
    the result."""

    heads: int
    head_dim: int
    groups: int
    keys: int
    rate: Tensor
    shift: Tensor
    skip: Tensor
    low: float = 0.0
    high: float = math.inf
    factor: float = 1.0
    gain: float = 1.0


@dataclass(slots=True)
class ConvSpec:
    """A short convolution of each channel: weight [K, C] and bias [C] in float32. silu: apply it to the sum."""

    weight: Tensor
    bias: Tensor | None = None
    silu: bool = True


@dataclass(slots=True)
class ScanSpec:
    """One state-space layer in which every number decays at a rate of its own (Mamba-1): rate [N, C], skip [C] in
    float32. norms: of b and c, by the root mean square."""

    rate: Tensor
    skip: Tensor
    norms: tuple[NormSpec, NormSpec] | None = None


@dataclass(slots=True)
class StepRows:
    """The row of each sequence [S] and of each token [T] of a step (int64). Operations find what belongs to a row (an
    adapter, a recurrent state) by it, in recorded steps, too. The spare row fills up recorded steps. `states[i]`: the
    parts of recurrent layer i's states by row [R + 1 ...]; layers overwrite them. adapters [T] int32: the
    slot of each token's row (compute/adapters.py); None: no row of this step has an adapter.

    Only for recurrent layers: `left` [T] int64 says where the state behind each token is left (-1: nowhere; the last
    token of a sequence always has a place); None: only the state behind each row's last token, with the row. `borders`
    [S + 1] int32: where the tokens of `sequences` begin; None: they are the sequences of the context."""

    sequences: Tensor
    tokens: Tensor
    states: Sequence[tuple[Tensor, ...]] = ()
    adapters: Tensor | None = None
    left: Tensor | None = None
    borders: Tensor | None = None


@dataclass(slots=True)
class GroupPlan:
    """One KV group's block tables for the sequences of this step, in batch order.

    tables [S, max_entries] block ids; first [S, max_entries] first position of each entry, or None when entry j
    starts at j * block_size everywhere (the contiguous case); entries [S] counts; slots [T] block * size + offset.
    `first` ascends within each row's counted entries; positions that no entry covers are not attended to. `shared` is a
    hint: all tables begin with the same entries, so a backend may read those once for all sequences. `reach` is a hint,
    too: an upper bound of the positions read by sequences with several new tokens (0: unknown). `paths`: given if some
    sequences are nodes of trees; None: every key lies at the position that it stands at.
    """

    tables: Tensor
    first: Tensor | None
    entries: Tensor
    slots: Tensor
    shared: bool = False
    reach: int = 0
    paths: Paths | None = None


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the newest tokens lie of sequences that are nodes of trees. The token that stands at position roots[s] + k
    lies at position roots[s] + places[s, k] in every KV group; earlier tokens lie where they stand. roots [S] int64,
    places [S, W] int32.

    Each such sequence is one node. It sees its ancestors, each at the position of its depth, so keys are rotated and
    added up as they will be once the path is a chain. For any other sequence roots[s] is its kv_len."""

    roots: Tensor
    places: Tensor

    def of(self, sequences: Tensor) -> Paths:
        """The paths of some of the sequences."""
        return Paths(self.roots[sequences], self.places[sequences])


@dataclass(slots=True)
class RouteSpec:
    """How tokens choose experts: `top_k` of `experts`, scored by softmax or sigmoid.

    order "softmax_topk", "sigmoid_topk": all are scored, and the best scores are chosen. "topk_softmax",
    "topk_sigmoid": the best logits are chosen, and only these are scored (scores may round to equal numbers where
    logits do not). groups > 1: only experts of the best `top_groups` groups compete (group score: max, or sum of its
    two best if `group_sum2`). `bias` is added for choosing only. `normalise`: gates are divided by
    max(their sum, `floor`) + `eps`, but for "topk_softmax", whose sum is 1. They are multiplied by `scale` last: a
    number, or (not in a FusedMixture that chooses) one for each expert, [experts] in float32.

    order "sparsemixer": the best logits are chosen one after the other, and a gate is its expert's softmax among those
    that are left and near it: (best - logit) / max(|logit|, best) is at most 2 * `jitter`. There are no groups, and
    nothing is normalised.
    """

    experts: int
    top_k: int
    order: Literal["softmax_topk", "topk_softmax", "sigmoid_topk", "topk_sigmoid", "sparsemixer"] = "softmax_topk"
    normalise: bool = True
    scale: float | Tensor = 1.0
    groups: int = 1
    top_groups: int = 1
    group_sum2: bool = False
    bias: Tensor | None = None
    eps: float = 1e-20
    floor: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine must know about a built model: vocabulary, context, and the KV spec of each of its layers."""

    vocab_size: int
    max_positions: int
    kv_specs: tuple[KVSpec, ...]
    hidden_size: int
    flops_per_token: float = 0.0
    states: tuple[StateSpec, ...] = ()
    ends: tuple[bool, bool] = (True, True)
    """(begins at token ids, ends at logits); a stage of a pipeline may lack either."""
    extras: dict[str, object] = field(default_factory=dict)


DRAWN = 1 << 30
"""The flag in a line's word (Kernels.choose) that says: this line is drawn at random."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """By row, the filters that drop unlikely tokens of drawn lines (defined in sampling/filters.py), in this order:
    log_min_p [R] float32, top_k [R] int64, top_p [R] float32; None if no line asks for that filter."""

    log_min_p: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None


@dataclass(frozen=True, slots=True)
class Draws:
    """What drawing from lines of logits needs: row_ids [n] and positions [n] (of the last known tokens) int64; by row
    streams and num_prompt [R] int64, inverse_temperature [R] float32. sampling/noise.py has the formula."""

    row_ids: Tensor
    positions: Tensor
    streams: Tensor
    num_prompt: Tensor
    inverse_temperature: Tensor
    cuts: Cuts | None = None
