"""The model that teaches. Owns: loading it as an engine does, and its states for lines of tokens.

Whatever format its weights have, its states come from the kernels that will serve it. Must not know: what is learnt.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.compute.forward import ForwardContext
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ParameterError
from tokenmill.core.step import RowSampling, RowStart, StepPlan, TableEdit
from tokenmill.device.memory import pick_device
from tokenmill.distill.cutting import CutShape, last_norm, layer_tensors, picked
from tokenmill.distill.texts import Lines
from tokenmill.engine.load.loading import compute_dtype, find_model, read_config
from tokenmill.engine.load.memory import kv_format
from tokenmill.engine.load.model_source import ModelSource
from tokenmill.kernels import make_kernels
from tokenmill.kvcache.pool import KVPool, make_layout
from tokenmill.models.decoder import Decoder
from tokenmill.models.registry import build_model, context_of
from tokenmill.quantize.calibration_text import check_ids
from tokenmill.runner.batch import make_batch
from tokenmill.runner.rows import Rows

TOKENS = 1024
"""Of a model on a CPU at one time: tensors above 32 MB are taken from the system anew whenever they are made."""
PROMPTS = 0.1
"""What a token of a prompt counts for beside one of the answer."""


@dataclass(slots=True)
class States:
    """Of B lines of T tokens: tokens [B, T], final hidden states [B, T, hidden], tapped layers side by side [B, T, *],
    and logits [B, T, V] where they were asked for. own [B, T]: which tokens the teacher itself has said."""

    tokens: Tensor
    hidden: Tensor
    taps: Tensor | None
    logits: Tensor | None
    own: Tensor

    def counts(self, ahead: int) -> tuple[Tensor, Tensor]:
        """Of guesses at the tokens from place `ahead` on: how much each counts, and which are judged."""
        own = self.own[:, ahead:]
        return torch.where(own, 1.0, PROMPTS), own


class Teacher:
    """A loaded model with room for `most_lines` lines of `length` tokens: at most `batch`."""

    def __init__(self, config: EngineConfig, batch: int, length: int, taps: int = 0) -> None:
        """taps: 3: the outputs of three layers are wanted, too."""
        self.config = config
        self.most_lines = batch = (
            min(batch, max(1, TOKENS // length)) if pick_device(config.execute.device) == "cpu" else batch
        )
        self.source: ModelSource = find_model(config)
        self.raw: dict[str, Any] = read_config(config, self.source)
        self.device = pick_device(config.execute.device)
        self.dtype = compute_dtype(config.model.dtype, self.raw, self.device, [])
        self.kernels = make_kernels(self.device)
        checkpoint = self.source.checkpoint(config.model.load_format, seed=config.model.seed, device=self.device)
        try:
            model = build_model(
                self.raw,
                checkpoint,
                dtype=self.dtype,
                device=self.device,
                kernels=self.kernels,
                quantization=config.model.quantization,
                max_positions=length,
            )
        finally:
            checkpoint.close()
        if not isinstance(model, Decoder) or model.spec.states:
            raise ParameterError(f"{self.raw.get('model_type')}: drafters of such models are not built.", param="model")
        self.model = model
        self.taps = tap_layers(len(model.layers)) if taps else ()
        model.taps = tuple(dict.fromkeys(self.taps))
        layout = make_layout(model.spec.kv_specs, 16, kv_format(config.cache, self.dtype))
        held = -(-length // layout.block_size)
        blocks = [0] * len(layout.page_bytes)
        for spec in layout.groups:
            blocks[spec.pool] += batch * held
        self.pool = KVPool(layout, blocks, self.device)
        scratch = [blocks[spec.pool] for spec in layout.groups]
        self.rows = Rows(batch, length, layout, model.spec.vocab_size, self.device, scratch)
        self.held = held

    def checked(self, lines: tuple[Lines, Lines]) -> tuple[Lines, Lines]:
        """The lines, if the model has all of their tokens."""
        for part in lines:
            check_ids(int(part.tokens.max()), self.model.spec.vocab_size, str(self.source.path))
        return lines

    def mark(self) -> str:
        """Tells models apart, wherever they lie: their settings and some of their numbers."""
        seen = hashlib.sha256(json.dumps(self.raw, sort_keys=True, default=str).encode())
        for part in (self.model.embedding, self.model.head):
            if part is not None:
                rows = part.weight.shape[0]
                ids = torch.arange(0, rows, max(1, rows // 64), device=self.device)
                seen.update(part.weight.rows(ids).float().cpu().numpy().tobytes())
        return seen.hexdigest()

    @property
    def embedding(self) -> Tensor:
        """[V, hidden] in float32."""
        assert self.model.embedding is not None
        return self.model.embedding.weight.dense().float() * self.model.embedding.scale

    @property
    def head(self) -> Tensor:
        """The matrix that logits come from [V, hidden] in float32."""
        if self.model.head is None or self.model.after is not None:
            raise ParameterError("A head with a projection before it cannot be shared by drafters.", param="model")
        return self.model.head.weight.dense().float()

    def logits(self, hidden: Tensor, words: Tensor) -> Tensor:
        """Of final hidden states, as the model makes them. words: its `head`."""
        assert self.model.head is not None
        said, bias = hidden @ words.t(), getattr(self.model.head.weight, "bias", None)
        return self.model.scaled(said if bias is None else said + bias.float(), self.model.bias)

    def layers(self, shape: CutShape, count: int) -> tuple[list[dict[str, Tensor]], Tensor] | None:
        """The tensors of so many of its layers, and its last norm; None: they cannot be cut out."""
        config = self.config
        checkpoint = self.source.checkpoint(config.model.load_format, seed=config.model.seed, device="cpu")
        try:
            found = [layer_tensors(checkpoint, n, shape) for n in picked(len(self.model.layers), count)]
            whole = [each for each in found if each is not None]
            return (whole, last_norm(checkpoint)) if len(whole) == len(found) else None
        finally:
            checkpoint.close()

    def plan(self, tokens: Tensor) -> StepPlan:
        """Every line from its start."""
        plan = StepPlan(id=0)
        count, length = tokens.shape
        need = [0] * len(self.pool.layout.page_bytes)
        for row, line in enumerate(tokens.tolist()):
            plan.starts.append(RowStart(row=row, tokens=line, num_prompt=length, computed=0, sampling=RowSampling()))
            for group, spec in enumerate(self.pool.layout.groups):
                first, size = need[spec.pool], self.pool.layout.block_size
                need[spec.pool] += self.held
                blocks = list(range(first, first + self.held))
                plan.edits.append(TableEdit(row, group, 0, 0, blocks, [size * i for i in range(self.held)]))
        plan.rows, plan.counts, plan.samples = list(range(count)), [length] * count, [True] * count
        return plan

    @torch.no_grad()
    def states(self, tokens: Tensor, own: Tensor, *, logits: bool = False) -> States:
        """Of lines [B, T], of which it has said `own` [B, T]; the tensors can be learnt from."""
        plan = self.plan(tokens)
        self.rows.apply(plan)
        batch = make_batch(plan, self.rows, self.pool, self.kernels)
        hidden = self.model.forward(batch.tokens, batch.ctx)
        shape = tokens.shape
        taps = self._taps(batch.ctx)
        said = self.model.logits(hidden, batch.ctx).float() if logits else None
        return States(
            tokens.to(self.device),
            hidden.float().unflatten(0, shape).clone(),
            None if taps is None else taps.unflatten(0, shape),
            None if said is None else said.unflatten(0, shape).clone(),
            own.to(self.device),
        )

    def _taps(self, ctx: ForwardContext) -> Tensor | None:
        if not self.taps:
            return None
        assert ctx.taps is not None
        return torch.cat([ctx.taps[tap].float() for tap in self.taps], -1)


def check_length(source: ModelSource, length: int, flag: str) -> None:
    """Refuse lines that are longer than anything the model was made for: what it says of them teaches nothing. flag:
    what named the length."""
    context = context_of(source.config())
    if length > context:
        raise ParameterError(f"{flag} {length}: the context of {source.path} is {context} tokens; name no more.")


def tap_layers(count: int) -> tuple[int, ...]:
    """A low, a middle and a high layer of so many, as EAGLE-3 takes them, or what comes nearest in small models."""
    return tuple(min(max(one - 1, 0), count - 1) for one in (2, count // 2, max(count - 3, 1)))
