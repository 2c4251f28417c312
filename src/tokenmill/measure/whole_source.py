"""Is a model folder the model that its config.json says? Owns: building it without data. Must not know: what is made
of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenmill.checkpoint.folder import open_checkpoint
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError, UserError
from tokenmill.engine.load.model_source import FolderSource, find_source
from tokenmill.layers.build import Build
from tokenmill.measure.counting import CountingKernels
from tokenmill.models.family_of import is_ours, settled
from tokenmill.models.registry import build_stage, check_keys
from tokenmill.models.text_part import outer_of
from tokenmill.parallel.group import SoloGroup
from tokenmill.quant.shape_checkpoint import META, ShapeCheckpoint

_POSITIONS = 16


def whole_source(name: str) -> FolderSource:
    """The folder of an unquantised model of which another one can be made. (One that says it is quantised is refused by
    who makes that.)"""
    found = find_source(name)
    if not isinstance(found, FolderSource):
        raise UserError(f"{found.path} is a GGUF file; start from the unquantised model's folder.")
    config = found.config()
    if not config.get("quantization_config"):
        checkpoint = open_checkpoint(found.path)
        try:
            check_whole(config, checkpoint)
        finally:
            checkpoint.close()
    return found


def check_whole(config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Refuse files that lack a tensor of the model, hold one of another shape, or one that nothing reads: what is made
    of them could not be loaded. A model that is not built here is not judged, because other engines may know it."""
    found = settled(config)
    if outer_of(found) is None and not is_ours(found):
        return
    try:
        check_keys(dict(config))
    except ModelError:
        return
    build = Build(
        checkpoint=ShapeCheckpoint(checkpoint),
        dtype=torch.float32,
        device=META,
        max_positions=_POSITIONS,
        group=SoloGroup(),
        kernels=CountingKernels(),
    )
    with torch.no_grad():
        try:
            build_stage(dict(config), build)
        except (NotImplementedError, RuntimeError):  # a family that looks at numbers while it is built
            return
