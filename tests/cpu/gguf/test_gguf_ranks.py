"""GGUF files over ranks: the bytes of one, and only a rank's part of every matrix of blocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.gguf.gguf_models_helpers import CONFIGS, MIXED, prompt
from tests.cpu.gguf.writing import Writer
from tests.cpu.models.parity import ours
from torch import Tensor

from tokenmill.checkpoint.gguf_model import GgufModel
from tokenmill.kernels import make_kernels
from tokenmill.models.registry import build_model

shared = pytest.importorskip("tokenmill.parallel.shared_memory", reason="the native kernels were not built")


@pytest.mark.parametrize(("name", "kind"), [("qwen3", "Q8_0"), ("qwen3moe", "Q4_K"), ("mixtral", MIXED)])
def test_ranks_give_the_bytes_of_one(name: str, kind: Any, tmp_path: Path) -> None:
    from tests.cpu.models.parity import make

    _, config, tensors = make(CONFIGS[name], tmp_path)
    path = tmp_path / "m.gguf"
    Writer(path, config, {key: value.float() for key, value in tensors.items()}, kind).write()
    memory = shared.Memory(2)
    blocks: dict[int, int] = {}

    def answers(rank: int, **more: Any) -> Tensor:
        kernels = make_kernels("cpu")
        kept = kernels.pack

        def pack(stored: Any) -> Any:
            blocks[rank] = blocks.get(rank, 0) + sum(part.nbytes for _, part in stored.parts)
            return kept(stored)

        kernels.pack = pack  # type: ignore[method-assign]
        source = GgufModel(path)
        with torch.no_grad():
            model = build_model(
                source.config, source.open_checkpoint(), dtype=torch.bfloat16, device="cpu", kernels=kernels, **more
            )
            tokens = prompt()[:40]
            return ours(model, {"a": tokens}, [[("a", 30)], [("a", 10)]], kernels, dtype=torch.bfloat16)["a"]

    alone = answers(-1)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda rank: answers(rank, group=shared.SharedGroup(memory.file, rank, 2)), range(2)):
            assert torch.equal(found, alone)
    memory.close()
    assert 0 < blocks[0] < 0.75 * blocks[-1] and blocks[1] < 0.75 * blocks[-1]
