"""What one row of the table of families may say. Owns: the switches, their names and what they mean when absent.

Plain records; a switch is a constant, or the name of the config key that holds it. Rules are small functions of the
config (`models/rules.py`). Must not know: families, tensors, how a model is put together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tokenmill.models import positions, rules
from tokenmill.models.positions import RopeRule
from tokenmill.models.rules import Dense, LayerRule, Number

if TYPE_CHECKING:
    from tokenmill.compute.forward import Act, GateAct, RouteSpec
    from tokenmill.layers.build import Build
    from tokenmill.layers.experts import ExpertWeights

    LoadExperts = Callable[[Build, RouteSpec, int, int, tuple[str, str, str]], ExpertWeights]

Switch = bool | str
"""True, False, or the config key that decides."""

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_EVERYWHERE = ("max_position_embeddings", "n_positions", "seq_length", "tie_word_embeddings", "quantization_config")


@dataclass(frozen=True)
class Fields:
    """The keys of one architecture: `needed` ones have no default; `only` lists the values that are built; `ignored`
    ones do nothing."""

    model_type: str
    needed: tuple[str, ...] = SIZES
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    layers: str | None = None
    """The only kind that `layer_types` may name, if a family has layers of one kind."""

    def knows(self, name: str) -> bool:
        """Is this key read, or known to have no effect here?"""
        return name in self.needed or name in self.defaults or name in self.ignored or name in _EVERYWHERE


@dataclass(frozen=True)
class Norms:
    """rms, layer (weight and bias), scale (a layer norm without bias), bare (without either) or bare_rms.

    before: a name for each block, or one for both blocks of a parallel layer. after: norms of a block's result, before
    it is added.
    """

    kind: Literal["rms", "layer", "scale", "bare", "bare_rms"] = "rms"
    eps: str | float = "rms_norm_eps"
    offset: float = 0.0
    before: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, ...] = ()
    after_if: Switch = True
    last: str = "norm"
    one_if_parallel: bool = False
    """A parallel layer has only the first norm, and both blocks read it."""
    rms_if: str = ""
    """If this config key is given, norms are rms instead, and it is their epsilon."""


@dataclass(frozen=True)
class HeadNorms:
    """Norms of queries and keys: one for each head (head), one for all heads together (row), or each head's own."""

    over: Literal["head", "row", "own"] = "head"
    names: tuple[str, str] = ("q_norm", "k_norm")
    kind: Literal["rms", "layer", "scale", "bare_rms"] = "rms"
    """See Norms; bare_rms has no weights and exists only in layers that rotate."""
    present: Switch = True
    rotated: bool = False
    """The norms come after the rotation."""


@dataclass(frozen=True)
class Attend:
    """Attention: names, biases, rotation, and other operations on queries, keys and scores."""

    at: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """A single name: a fused matrix, with its rows in the order that `fused` gives."""
    out: str = "o_proj"
    bias: Switch = False
    out_bias: Switch | None = None
    """None: the same as `bias`."""
    norms: HeadNorms | None = None
    rope: RopeRule | None = positions.whole_rope
    pairs: Switch = False
    """Neighbours (0, 1), (2, 3)... rotate together; otherwise entries of one half with those of the other."""
    backwards: bool = False
    """Pairs rotate in the opposite direction."""
    layer: LayerRule = rules.everywhere
    """The window of each layer, and whether it rotates."""
    scores: Scores | None = None
    extra: Extra | None = None


@dataclass(frozen=True)
class Scores:
    """What is done to attention's scores."""

    scale: Number | None = None
    """The scale; None: one over the root of the head size."""
    softcap: str = ""
    alibi: Switch = False
    sinks: str = ""
    """The tensor with one more score for each head, which takes its share of the softmax and adds no value."""
    local_sinks: bool = False
    """Only layers with a window have them."""


@dataclass(frozen=True)
class Extra:
    """What only few families do between the product and attention, or after attention."""

    fused: Callable[[Any], Any] | None = None
    """The row order of a fused matrix: heads -> rows of [q | k | v]."""
    clip: str = ""
    """The config key of the value at which queries, keys and values are clipped."""
    temper: Callable[[Any], positions.Temper | None] | None = None
    """Queries are multiplied by a number for each position."""
    within: str = ""
    """A norm between attention and the output matrix."""
    gate: Gate | None = None
    heads: Callable[[Any, Any, rules.Kind, int], Any] | None = None
    """Heads that differ from layer to layer: (config, those of all layers, kind of layer, layer) -> its heads."""
    values: str = ""
    """The config key of the factor of values."""


@dataclass(frozen=True)
class Gate:
    """The product whose sigmoid (or softplus) multiplies the output of attention, under the first of these names that
    is there."""

    names: tuple[str, ...]
    by_head: bool | Callable[[Any], bool] = False
    """It has one number for each head, not for each column; or what says so of a config."""
    present: Switch = True
    act: GateAct = "sigmoid"


@dataclass(frozen=True)
class Feed:
    """The feed-forward layer: three names (gate, up, down), two with a fused first one, or two plain ones."""

    at: str = "mlp"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    bias: Switch = False
    act: str = "hidden_act"
    """The config key of the activation."""
    fixed: str = ""
    """The activation, whatever the config says."""
    learned: bool = False
    """The activation may be xielu, whose two numbers are in the checkpoint."""
    inner: Callable[[Any], int] = rules.intermediate
    within: str = ""
    """A norm before the last matrix."""


@dataclass(frozen=True)
class Route:
    """How tokens choose experts; see RouteSpec."""

    order: Literal["softmax_topk", "topk_softmax", "sigmoid_topk", "topk_sigmoid", "sparsemixer"] = "softmax_topk"
    normalise: Switch = True
    scale: str = ""
    bias: str = ""
    """The tensor that is added to scores for choosing only, below the mixture, or (outside) beside it."""
    outside: bool = False
    grouped: bool = False
    by_best: bool = False
    """A group's score is its best one, not the sum of its two best."""
    wide: bool = False
    """The router's logits are float32, whatever the compute dtype."""
    inputs: bool = False
    """Gates multiply an expert's input."""
    score: str = ""
    """The config key that says which order instead: a softmax over the chosen ones, or their sigmoids."""
    eps: float = 1e-20
    floor: str = ""
    """The config key of the least number that gates are divided by, 1e-12 if absent; none: 0."""


@dataclass(frozen=True)
class Shared:
    """Experts that every token visits."""

    at: str
    inner: Callable[[Any], int]
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gate: str = ""
    """The product whose sigmoid scales the shared experts."""
    outside: bool = False
    """The tensors lie beside the mixture, not below it."""
    gated: bool = True
    mean: str = ""
    """The config key that says whether the result is the mean of routed and shared experts, or their sum."""


@dataclass(frozen=True)
class Mix:
    """A mixture of experts in place of the feed-forward layer; `dense` says which layers have none."""

    at: tuple[str, ...] = ("mlp",)
    """Where its tensors lie: the first of these that has the router."""
    router: str = "gate"
    experts: str = "experts"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    inner: str = "moe_intermediate_size"
    dense: Dense = rules.never
    route: Route = field(default_factory=Route)
    shared: Shared | None = None
    act: Act | None = None
    """The routed experts' activation, whatever the config says of the others."""
    load: LoadExperts | None = None
    """Loads this family's experts, if they are stored neither one by one nor as gate_up_proj and down_proj."""


@dataclass(frozen=True)
class Drafts:
    """Tensors for drafts of later tokens, which the model itself does not use: a pattern of their names, or the config
    key for the number of such layers behind the last one."""

    pattern: str = ""
    later: str = ""


@dataclass(frozen=True)
class Outside:
    """What lies around the layers."""

    body: str = "model"
    embed: str = "embed_tokens"
    layers: str = "layers"
    head: str = "lm_head"
    head_bias: Switch = False
    scale: Number | None = None
    """The factor of embeddings."""
    rounded: bool = False
    """That factor is rounded to the compute dtype."""
    logits: Number | None = None
    """The factor of logits."""
    softcap: str = ""
    """The config key of the bound that logits are soft-capped to."""
    norm: str = ""
    """A norm on the embeddings."""
    positions: rules.Positions | None = None
    """A table of positions that is added to the embeddings."""
    drafts: Drafts | None = None


@dataclass(frozen=True)
class Shape:
    """How a family's layers are made."""

    attend: Attend = field(default_factory=Attend)
    norms: Norms = field(default_factory=Norms)
    feed: Feed = field(default_factory=Feed)
    mix: Mix | None = None
    outside: Outside = field(default_factory=Outside)
    mixer: Callable[[Any, Any, int], Any] | None = None
    """The block in attention's place: (config, where the layer lies, layer) -> a block, or None for attention."""
    layer_norms: Callable[[Any, bool], Norms] | None = None
    """The norms of each layer, where layers with such a block have others: (where it lies, has it one) -> norms."""
    single: Callable[[Any, Any, Any, int], Any] | None = None
    """A layer is one block with one norm before it: (config, root, where the layer lies, layer) -> that block."""
    parallel: Switch = False
    """Both blocks read the same x."""
    residual: str = ""
    """The config key of the factor of a block's result, before it is added."""
    nested: Callable[[Any], dict[str, Any]] | None = None
    """Flattens objects within the config: returns their values under names of one level."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The family's own names of the usual size keys: own -> usual."""


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    fields: Fields
    shape: Shape = field(default_factory=Shape)
    note: str = ""
    """What a reader of docs/models.md should know."""
