"""The Triton backend. Owns: which kernel serves which shape, scratch memory, and when to fall back (counted).

Must not know: models, plans, engines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmill.core.forward import Act, AttentionSpec, ForwardContext, GroupPlan, NormSpec
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton import pointwise
from tokenmill.kernels.triton.choose import greedy
from tokenmill.kernels.triton.common import INTERPRETED, Scratch
from tokenmill.kernels.triton.decode import attend_one, decode_config
from tokenmill.kernels.triton.gemv import gemv
from tokenmill.kernels.triton.prefill import attend_many
from tokenmill.kernels.triton.prepare import can_prepare, prepare_qkv
from tokenmill.kernels.triton.shared import attend_shared, can_share, common_entries, shared_parts
from tokenmill.kernels.triton.thin import thin

GEMV_ROWS = 2
"""Up to here every program keeps all rows in registers."""
THIN_ROWS = 64
"""Up to here the weight is streamed by our own kernel; above, cuBLAS is at least as good."""
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 1 << 15


class TritonKernels(ReferenceKernels):
    """Kernels for one NVIDIA GPU and one stream.

    dependent: use programmatic dependent launch. split: keys per attention split whatever the batch (0: as many
    splits as fill the chip), so that a sequence's result does not depend on its company.
    """

    def __init__(self, *, dependent: bool = True, split: int = 0) -> None:
        super().__init__()
        self.pdl = dependent and not INTERPRETED and torch.cuda.get_device_capability()[0] >= 9
        self.split = split
        self.scratch = Scratch()
        self._common: tuple[GroupPlan, Tensor] | None = None

    # ------------------------------------------------------------ matmuls

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, K] @ weight [N, K].T + bias -> [T, N]."""
        return self.fused_linear(x, weight, bias)

    def fused_linear(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None = None,
        *,
        norm: NormSpec | None = None,
        act: Act | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + act(norm(x) @ weight.T + bias)."""
        rows = x.shape[0]
        if not 0 < rows <= THIN_ROWS or x.dtype != weight.dtype or x.dtype not in _FLOATS or weight.stride(1) != 1:
            return self._wide_linear(x, weight, bias, norm, act, residual)
        self.count("linear")
        if norm is not None and (norm.kind != "rms" or norm.bias is not None):
            x, norm = self.norm(x, norm), None
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None and not residual.is_contiguous():
            residual = residual.contiguous()
        if rows <= GEMV_ROWS:
            return gemv(x, weight, bias, norm, act, residual, pdl=self.pdl)
        return thin(x, weight, bias, norm, act, residual, scratch=self.scratch, pdl=self.pdl)

    def _wide_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: NormSpec | None,
        act: Act | None,
        residual: Tensor | None,
    ) -> Tensor:
        """The same through cuBLAS."""
        self.count("linear")
        if norm is not None:
            x = self.norm(x, norm)
        if act is None and bias is None and residual is not None:
            return torch.addmm(residual, x, weight.t())
        y = torch.nn.functional.linear(x, weight, bias)
        if act is not None:
            y = self.activate(y, act)
        return y if residual is None else y.add_(residual)

    # ------------------------------------------------------------ rows by themselves

    def norm(self, x: Tensor, spec: NormSpec) -> Tensor:
        """x [..., D] -> the same shape and dtype."""
        if x.shape[-1] > _WIDEST or x.numel() == 0:
            self.count("norm", fallback=True)
            return super().norm(x, spec)
        self.count("norm")
        return pointwise.norm(x, spec, pdl=self.pdl)

    def activate(self, x: Tensor, act: Act) -> Tensor:
        """x [T, D] -> [T, D], or [T, D / 2] for the gated kinds."""
        if x.ndim != 2 or x.numel() == 0:
            self.count("activate", fallback=True)
            return super().activate(x, act)
        self.count("activate")
        return pointwise.activate(x, act, pdl=self.pdl)

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [n, V] -> (ids [n] int64, largest logits [n] float32)."""
        self.count("greedy")
        return greedy(logits, self.scratch, pdl=self.pdl)

    # ------------------------------------------------------------ attention

    def prepare_qkv(self, qkv: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """qkv [T, all heads] -> q [T, H, Dk] normed and rotated; keys and values go to their slots."""
        if not can_prepare(spec) or qkv.shape[0] == 0:
            self.count("prepare_qkv", fallback=True)
            return super().prepare_qkv(qkv, spec, ctx)
        self.count("prepare_qkv")
        return prepare_qkv(qkv if qkv.stride(1) == 1 else qkv.contiguous(), spec, ctx, pdl=self.pdl)

    def attention(self, q: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> Tensor:
        """q [T, H, Dk] against the paged keys and values as stored -> [T, H * Dv]."""
        if spec.kv.kind == "latent" or q.shape[0] == 0 or max(spec.kv.key_dim, spec.kv.value_dim) > 256:
            self.count("attention", fallback=True)
            return super().attention(q, spec, ctx)
        self.count("attention")
        q = q.contiguous()
        out = torch.empty((q.shape[0], spec.heads * spec.kv.value_dim), dtype=q.dtype, device=q.device)
        seqs = ctx.kv_len.shape[0]
        if ctx.max_query == 1:
            self._attend_one(q, out, spec, ctx)
            return out
        # Some sequences may have one new token; each kernel leaves the other's alone.
        mixed = seqs > 1
        attend_many(q, out, spec, ctx, pdl=self.pdl, mixed=mixed)
        if mixed:
            attend_one(q, out, spec, ctx, self.scratch, pdl=self.pdl, mixed=True, fixed=self.split)
        return out

    def _attend_one(self, q: Tensor, out: Tensor, spec: AttentionSpec, ctx: ForwardContext) -> None:
        plan, seqs = ctx.groups[spec.group], ctx.kv_len.shape[0]
        if not plan.shared or not can_share(spec, plan) or self.split or seqs < 2:
            attend_one(q, out, spec, ctx, self.scratch, pdl=self.pdl, fixed=self.split)
            return
        before = shared_parts(seqs, spec)
        splits, *rest = decode_config(seqs * spec.kv.heads, plan.tables.shape[1] * ctx.block_size, spec)
        room = self.scratch.floats // (seqs * spec.heads * (spec.kv.value_dim + 2))
        splits = max(1, min(splits, room - before))
        if room < before + splits:
            attend_one(q, out, spec, ctx, self.scratch, pdl=self.pdl)
            return
        if self._common is None or self._common[0] is not plan:
            self._common = plan, common_entries(plan, ctx, pdl=self.pdl)
        common = self._common[1]
        attend_shared(q, spec, ctx, common, self.scratch, before=before, parts=before + splits, pdl=self.pdl)
        config = (splits, rest[0], rest[1], rest[2])
        attend_one(q, out, spec, ctx, self.scratch, pdl=self.pdl, before=before, shared=common, config=config)
