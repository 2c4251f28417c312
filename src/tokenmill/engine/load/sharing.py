"""Whether a model can be shared out as the options say, before a rank is started. Owns: a rank's place, and building
the layers of ranks without data.

Layers and formats themselves say what cannot be split: nothing here knows their sizes. Whatever else is wrong with a
model is left to the load. Must not know: processes, memory.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.compute.model import CausalLM, Checkpoint
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import NoExpertsError, NotSharedError
from tokenmill.engine.load.loading import check_ranks, device_of
from tokenmill.engine.load.model_source import ModelSource
from tokenmill.engine.options.balance_settings import read_balance
from tokenmill.engine.options.drafting import read_speculation, reads_words
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.models.registry import build_model, is_elsewhere
from tokenmill.parallel.group import SoloGroup
from tokenmill.parallel.stages import Place
from tokenmill.quant.shape_checkpoint import META, ShapeCheckpoint


class _Part(SoloGroup):
    """The first of `size` ranks, alone: it never computes."""

    def __init__(self, size: int, *, exact: bool) -> None:
        self.size, self.exact = size, exact


def place_of(config: EngineConfig, stage: int) -> Place:
    """The place of a stage's ranks among the stages."""
    said = config.parallel
    balance = read_balance(said)
    return Place(
        stage,
        said.pipeline_parallel_size,
        whole_experts=said.enable_expert_parallel,
        words=reads_words(read_speculation(config.speculate)),
        redundant=None if balance is None else balance.num_redundant_experts,
    )


def check_shared(config: EngineConfig, source: ModelSource, raw: dict[str, Any]) -> None:
    """Refuse more devices than there are, more ranks than there are parts, and parts that do not divide."""
    if config.parallel.ranks == 1:
        return
    devices = {device_of(config, rank) for rank in range(config.parallel.ranks)}
    check_ranks(config, raw)
    if is_elsewhere(raw, config.files.model_impl):
        return
    try:
        _build_parts(config, source, raw, on_cpu=devices == {"cpu"})
    except NotSharedError:
        raise
    except Exception:
        return  # of a model that cannot be built, or not without data, ranks tell more


def _build_parts(config: EngineConfig, source: ModelSource, raw: dict[str, Any], *, on_cpu: bool) -> None:
    """Build the first rank of each stage: what cannot be split is so for each of them."""
    size, stages = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    exact = on_cpu or config.execute.deterministic
    files: Checkpoint | None = None
    if config.model.load_format != "dummy":
        files = source.checkpoint(config.model.load_format, seed=0, device="cpu")
    try:
        built = [
            _build(config, raw, files, _Part(size, exact=exact), place_of(config, stage)) for stage in range(stages)
        ]
    finally:
        if files is not None:
            files.close()
    if config.parallel.enable_expert_parallel and not any(model.spec.extras.get("mixtures", 0) for model in built):
        raise NoExpertsError()


def _build(config: EngineConfig, raw: dict[str, Any], files: Checkpoint | None, group: _Part, place: Place) -> CausalLM:
    return build_model(
        dict(raw), ShapeCheckpoint(files), dtype=torch.bfloat16, device=META, kernels=ReferenceKernels(),
        max_positions=config.model.max_model_len, group=group, place=place,
    )  # fmt: skip
