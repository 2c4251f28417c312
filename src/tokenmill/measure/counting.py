"""What one step of a model costs, counted by running the model's own layers on tensors without data.

Owns: kernels that note each operation, and the sheet of all of them. No architecture has a formula here: a model is
built on the `meta` device and run for a token or two, and every call leaves its number of operations and bytes. An
operation that cannot be counted is refused, not guessed. Must not know: devices, speeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from tokenmill.compute.forward import (
    Act,
    Around,
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    ForwardContext,
    GateAct,
    KVSpec,
    ModelSpec,
    NormSpec,
    Recurrence,
    RouteSpec,
    ScanSpec,
    SpaceSpec,
    StepRows,
    StoredMatrix,
    Weight,
    Xielu,
)
from tokenmill.compute.model import CausalLM, Checkpoint
from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.measure.live_memory import Live, held_bytes
from tokenmill.models.registry import build_model
from tokenmill.parallel.group import AtOnce
from tokenmill.quant.gguf_weight import TABLES
from tokenmill.quant.shape_checkpoint import AS_STORED, META, Packed, ShapeCheckpoint

PROBE_TOKENS = 2
"""Tokens of the counting run. All counts are multiples of it."""
_GROUP = 32
"""Columns per scale, if no number is given."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """One layer's routed experts. `flops` and `bytes` are those of one expert for one token, read once per step."""

    experts: int
    top_k: int
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Attended:
    """One layer's attention: this rank's query heads, and the K/V that the layer keeps per position."""

    heads: int
    kv: KVSpec
    window: int
    sizes: tuple[int, int] | None = None
    """Of keys and values that long prompts attend to, where these are not the stored ones."""

    def flops(self, *, prompts: bool) -> float:
        """Operations of one query on one visible position; prompts: its sequence has several."""
        sizes = self.sizes if prompts else None
        return 2.0 * self.heads * sum(sizes or (self.kv.key_dim, self.kv.value_dim))


@dataclass(slots=True)
class Tally:
    """Costs noted so far: `flops`, `moved` (activations) and `reduced` per token, `weight_bytes` per step."""

    flops: float = 0.0
    weight_bytes: int = 0
    moved: float = 0.0
    reduced: float = 0.0
    reductions: int = 0
    calls: int = 0
    mixtures: list[Mixture] = field(default_factory=list)
    attended: list[Attended] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A model's costs on one rank: `body` per token, `head` per sampled line, and what is held in memory."""

    spec: ModelSpec
    body: Tally
    head: Tally
    held_bytes: int
    activation_bytes: int
    """The most temporary bytes at once in a step of `step_tokens` tokens, including the logits of `step_rows` lines."""
    step_tokens: int
    ranks: int
    notes: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of every matrix that a step can multiply by, including all experts."""
        mixed = sum(m.experts * m.bytes for m in self.body.mixtures)
        return int(self.body.weight_bytes + self.head.weight_bytes + mixed)


class CountingKernels(ReferenceKernels):
    """Every operation returns an empty result of the right shape, and notes its cost in `tally`."""

    def __init__(self, kind: str = "gpu") -> None:
        super().__init__()
        self.tally = Tally()
        self.kind = kind
        self._unfolded: tuple[int, int] | None = None

    def count(self, op: str, *, fallback: bool = False) -> None:
        """Refuse operations that are not overridden here, because they cannot be counted."""
        raise ModelError(f"This model uses the operation '{op}', whose cost is not known; it cannot be planned.")

    def embed(self, table: Tensor, ids: Tensor, scale: float = 1.0) -> Tensor:
        """[T, hidden]: each row is read and written."""
        out = table.new_empty(len(ids), table.shape[1])
        return self._note(out, moved=2 * out.nbytes)

    def norm(
        self, x: Tensor, spec: NormSpec, gate: Tensor | None = None, size: int = 0, *, first: bool = False
    ) -> Tensor:
        """The same shape."""
        self.tally.weight_bytes += spec.weight.nbytes
        return self._note(torch.empty_like(x), moved=(2 if gate is None else 3) * x.nbytes)

    def product(self, x: Tensor, weight: Any, bias: Tensor | None = None, **around: Unpack[Around]) -> Tensor:
        """[T, N], or [T, N / 2] after a gate; [T, H, N] for one matrix per head."""
        norm, act, residual = around.get("norm"), around.get("act"), around.get("residual")
        if isinstance(weight, StoredMatrix) and not (norm is None and act is None and residual is None):
            y = self.product(x if norm is None else self.norm(x, norm), weight)
            return self._around(y, act, residual)
        if norm is not None:
            self.tally.weight_bytes += norm.weight.nbytes
        *heads, rows, _ = weight.shape
        y = x.new_empty(len(x), *heads, rows)
        self.tally.flops += 2.0 * math.prod(weight.shape)
        self.tally.weight_bytes += weight.nbytes + (0 if bias is None else bias.nbytes)
        self._note(y, moved=x.nbytes + y.nbytes)
        if act is not None:
            wide, y = y, _activated(y, act)
            self.tally.moved += (y.nbytes - wide.nbytes) / PROBE_TOKENS
        self.tally.moved += 0 if residual is None else residual.nbytes / PROBE_TOKENS
        return y

    def quantise(self, weight: Tensor, bits: int, group: int = 0) -> tuple[Tensor, Tensor]:
        """Integers and scales without data."""
        rows, columns = weight.shape
        q = torch.empty(rows, columns, dtype=torch.int8, device=META)
        return q, torch.empty(rows, -(-columns // (group or _GROUP)), dtype=torch.float16, device=META)

    def pack(self, matrix: StoredMatrix) -> Packed | None:
        """A form with this many bits per number, and the scales. float16 and blocks keep their form on a CPU; on a GPU
        blocks of tables become 4 bits; others become integers."""
        size, (rows, columns) = 0 if matrix.bias is None else matrix.bias.nbytes, matrix.shape
        if matrix.kind == "dense" and matrix.part("numbers").dtype == torch.float16 and self.kind == "cpu":
            return Packed(matrix.shape, size + matrix.nbytes)
        if matrix.kind.startswith("int"):
            return self._integers(matrix, size)
        if matrix.kind == "table" and len(matrix.part("table")) <= 16:
            return Packed(matrix.shape, size - (-rows * columns // 2) + 2 * matrix.part("scales").numel())
        if matrix.kind == "blocks" and self.kind == "cpu" and all(name in AS_STORED for name, _ in matrix.parts):
            return Packed(matrix.shape, size + matrix.nbytes)
        if matrix.kind == "blocks" and self.kind == "gpu" and all(name in TABLES for name, _ in matrix.parts):
            return Packed(matrix.shape, size + rows * columns * 9 // 16)
        return None

    def _integers(self, matrix: StoredMatrix, size: int) -> Packed | None:
        """Integers in the file's bits on a CPU, in 4 or 8 on a GPU, which has no form of zero points with fractions.
        size: of the bias."""
        bits, groups, codes = int(matrix.kind[3:].removesuffix("-zeros")), matrix.part("scales"), matrix.part("codes")
        zeros = matrix.part("zeros") if matrix.kind.endswith("-zeros") else None
        if bits not in ((4, 8) if self.kind == "gpu" else (2, 3, 4, 5, 6, 8)):
            return None
        if self.kind == "gpu" and zeros is not None and zeros.is_floating_point():
            return None
        held = groups.nbytes + (0 if zeros is None else 2 * zeros.numel())
        return Packed(matrix.shape, size + held - (-codes.numel() * bits // 8))

    def activate(self, x: Tensor, act: Act | GateAct | Xielu, gate: Tensor | None = None) -> Tensor:
        """The same shape, or half of it after a gate."""
        if gate is not None:
            return self._note(x.new_empty(x.shape), moved=3 * x.numel() * x.element_size())
        out = _activated(x, act)
        return self._note(out, moved=x.nbytes + out.nbytes)

    def add(
        self, x: Tensor, y: Tensor, scale: float | Tensor = 1.0, *, within: NormSpec | None = None,
        times: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The same shape."""
        y = y if within is None else self.norm(y, within)
        return self._note(torch.empty_like(x), moved=3 * x.nbytes)

    def prepare_qkv(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """[T, H, Dk]; keys and values go to their slots (counted with attention)."""
        out = qkv.new_empty(len(qkv), spec.heads, spec.kv.key_dim)
        self.tally.weight_bytes += sum(
            norm.weight.nbytes for norm in (spec.touches.q_norm, spec.touches.k_norm) if norm is not None
        )
        return self._note(out, moved=qkv.nbytes + out.nbytes)

    def attend_latent(
        self, q: Tensor, vector: Sequence[Tensor], parts: Sequence[Tensor], spec: AttentionSpec, ctx: ForwardContext,
        keys: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """A GPU's long prompts attend to keys and values of heads. What makes these is not counted."""
        self._unfolded = (q.shape[2], parts[1].shape[1]) if self.kind == "gpu" and keys is None else None
        return None

    def choose_keys(self, x: Tensor, gains: Tensor, spec: AttentionSpec, top: int, ctx: ForwardContext) -> Tensor:
        """[T, top]. It reads all keys."""
        q = self.prepare_qkv(x, spec, ctx)
        self.tally.attended.append(Attended(spec.heads, spec.kv, 0))
        return self._note(x.new_empty(len(x), top, dtype=torch.int64), moved=q.nbytes + gains.nbytes + 8 * len(x) * top)

    def attention(self, q: Tensor, spec: AttentionSpec, ctx: ForwardContext, keys: Tensor | None = None) -> Tensor:
        """[T, H * Dv]. What attention reads depends on lengths, so only the layer is noted. Chosen keys are as many as
        those of a window."""
        most = abs(spec.window) or spec.kv.window if keys is None else keys.shape[1]
        self.tally.attended.append(Attended(spec.heads, spec.kv, most, self._unfolded))
        self._unfolded = None
        out = q.new_empty(len(q), spec.heads * spec.kv.value_dim)
        return self._note(out, moved=q.nbytes + out.nbytes)

    def recur_(self, inputs: Sequence[Tensor], spec: Recurrence, state: Tensor, ctx: ForwardContext) -> Tensor:
        """The shapes of the specification. Reads and writes of states are counted by row, not here. In a delta rule
        every number of the state is decayed, read, written and read again."""
        x, moved = inputs[0], 0
        width = x.shape[1:]
        match spec:
            case ConvSpec():
                self.tally.flops += 2.0 * spec.weight.numel()
            case DeltaSpec():
                self.tally.flops += 7.0 * spec.value_heads * spec.key_dim * spec.value_dim
                width = torch.Size((spec.value_heads, spec.value_dim))
            case SpaceSpec():
                self.tally.flops += 5.0 * spec.heads * spec.head_dim * spec.keys
                width = torch.Size((spec.heads * spec.head_dim,))
            case ScanSpec():
                self.tally.flops += 6.0 * state.shape[1] * state.shape[2]
                self.tally.weight_bytes += spec.rate.nbytes
                moved = x.numel() * x.element_size()
        out = x.new_empty(len(x), *width)
        return self._note(out, moved=x.numel() * x.element_size() + moved + out.nbytes)

    def route(self, logits: Tensor, spec: RouteSpec) -> tuple[Tensor, Tensor]:
        """[T, k] ids and gates."""
        ids = torch.empty(len(logits), spec.top_k, dtype=torch.int64, device=META)
        return self._note(ids, moved=logits.nbytes), torch.empty(len(logits), spec.top_k, device=META)

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
        """[T, hidden], or the inner half alone, [T * k, inner], which ranks exchange on a CPU: then a second call
        computes the other. Which experts a step reads depends on its tokens, so only the mixture is noted."""
        ups, downs = weights
        inner, moved = x, float(x.nbytes)
        if act is not None:
            held = sum(w.bytes() for w in (*ups, *downs)) / len(ups)
            flops = 2.0 * (ups[0].shape[0] * ups[0].shape[1] + downs[0].shape[0] * downs[0].shape[1])
            self.tally.mixtures.append(Mixture(len(ups), ids.shape[1], flops, held))
            wide = x.new_empty(len(x) * ids.shape[1], ups[0].shape[0])
            inner = _activated(wide, act)
            moved += wide.nbytes + inner.nbytes
            if gates is None:
                return self._note(inner, moved=moved)
        out = inner.new_empty(len(ids), downs[0].shape[0])
        return self._note(out, moved=moved + out.nbytes)

    def _note(self, out: Tensor, *, moved: float) -> Tensor:
        self.tally.moved += moved / PROBE_TOKENS
        self.tally.calls += 1
        return out


class CountingGroup(AtOnce):
    """One of `size` ranks, which are exact on a CPU. Sums and gathers note the bytes that each rank sends."""

    rank = 0

    def __init__(self, size: int, kernels: CountingKernels) -> None:
        self.size, self.kernels = size, kernels
        self.exact = size > 1 and kernels.kind == "cpu"

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The same shape."""
        self._note(x)
        return torch.empty_like(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """`size` times as wide."""
        self._note(x)
        return torch.cat([x] * self.size, dim=dim)

    def agree(self, values: list[int]) -> list[int]:
        """The value itself, because all ranks are this one."""
        return values

    def _note(self, x: Tensor) -> None:
        if self.size > 1:
            self.kernels.tally.reduced += x.nbytes / PROBE_TOKENS
            self.kernels.tally.reductions += 1


def build_on_shapes(
    config: Mapping[str, Any],
    kernels: CountingKernels,
    checkpoint: Checkpoint | None,
    *,
    dtype: torch.dtype,
    ranks: int = 1,
    **more: Any,
) -> CausalLM:
    """The model of this config.json on one of `ranks` ranks, without data. checkpoint: open weight files, whose shapes
    and formats then count. more: of build_model."""
    group = CountingGroup(ranks, kernels)
    shapes = ShapeCheckpoint(checkpoint)
    return build_model(dict(config), shapes, dtype=dtype, device=META, kernels=kernels, group=group, **more)


def count_model(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    checkpoint: Checkpoint | None = None,
    ranks: int = 1,
    step: tuple[int, int] = (2048, 256),
    kind: str = "gpu",
    state_dtype: str = "float32",
    **more: Any,
) -> Sheet:
    """Build the model of this config.json without data, and find what a token costs on one of `ranks` ranks.

    `checkpoint`, `more` (quantization, max_positions): of build_on_shapes. `step`: tokens and sampled lines of the
    largest step, for its temporary memory. `kind`: cpu or gpu, which hold some formats differently."""
    kernels = CountingKernels(kind)
    kernels.state_dtype = state_dtype
    with torch.no_grad():
        try:
            model = build_on_shapes(config, kernels, checkpoint, dtype=dtype, ranks=ranks, **more)
        except (NotImplementedError, RuntimeError) as error:  # the reader of this form looks at numbers
            raise ModelError(f"This checkpoint's weights cannot be counted without reading them: {error}") from error
        body, head = _count_step(model, kernels, PROBE_TOKENS, PROBE_TOKENS)
        peak = _peak(model, kernels, *step)
    notes: Any = model.spec.extras.get("notes", ())
    return Sheet(model.spec, body, head, held_bytes(model), peak, step[0], ranks, tuple(notes))


def _count_step(model: CausalLM, kernels: CountingKernels, tokens: int, lines: int) -> tuple[Tally, Tally]:
    """Run one step without data. Returns the costs of the layers and of the head."""
    kernels.tally = body = Tally()
    whole = torch.empty(tokens, dtype=torch.int64, device=META)
    states = [
        tuple(torch.empty(1, *shape, dtype=getattr(torch, dtype), device=META) for dtype, shape in spec.parts)
        for spec in model.spec.states
    ]
    ctx = ForwardContext(kernels, whole, whole, whole, 1, [], [], StepRows(whole, whole, states))
    hidden = model.forward(whole, ctx)
    kernels.tally = head = Tally()
    model.logits(hidden[:lines], ctx)
    return body, head


def _peak(model: CausalLM, kernels: CountingKernels, tokens: int, lines: int) -> int:
    """The most temporary bytes in a step of this size, as the kernels allocate results."""
    with Live() as live:
        _count_step(model, kernels, tokens, min(lines, tokens))
    return live.most


def _activated(x: Tensor, act: str | Xielu) -> Tensor:
    gated = isinstance(act, str) and (act.endswith("_mul") or act == "oai_swiglu")
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2 if gated else x.shape[-1])
