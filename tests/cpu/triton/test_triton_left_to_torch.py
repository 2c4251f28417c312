"""What a decode step leaves to torch between our kernels, by family. Nothing counts it as a fallback, and each of these
launches ends the overlap of those around it.

`make test` asks a few families, `make test-nightly` all of the table.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.models.family_cases import FAMILIES
from tests.cpu.models.parity import load
from tests.thinned import WHOLE
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tokenmill.kernels.triton.kernels import TritonKernels

FEW = ("llama", "deepseek_v3", "granite", "granitemoehybrid", "olmo2", "gemma3", "mixtral", "minicpm3")
MORE = {
    "axk2": 3, "gemma3n": 52, "hy_v4": 17, "longcat_flash": 6, "recurrent_gemma": 17, "zamba2": 1,
}  # fmt: skip
"""How many operations a layer leaves at the most; others leave none."""
ENDS = 4
"""Looking up embeddings, positions and factors before the first layer and behind the last one."""
NONE = {
    "to", "detach_", "copy_",  # the interpreter's own
    "view", "_unsafe_view", "reshape", "expand", "transpose", "t", "permute", "slice", "select", "unsqueeze", "squeeze",
    "alias", "detach", "empty", "empty_like", "new_empty", "empty_strided", "as_strided", "split", "split_with_sizes",
    "chunk", "unbind", "narrow", "flatten", "contiguous", "unfold", "lift_fresh",
}  # fmt: skip
"""Operations that launch nothing."""
MAY_COPY = {"contiguous", "flatten", "reshape"}
"""But for these, where something has to be copied."""


class Counting(TorchDispatchMode):
    """Counts torch's operations, but for those of interpreted kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, made = func._schema.name.split("::")[1], func(*args, **(kwargs or {}))
        if not self.inside and (name not in NONE or (name in MAY_COPY and made.data_ptr() != args[0].data_ptr())):
            self.found[name] += 1
        return made


def left_to_torch(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """Torch's operations in a step of two rows with a token each, and how many layers there are."""
    case, kernels, counting = FAMILIES[name][0], TritonKernels("cpu"), Counting()
    _, config, tensors = case.make(folder)
    model = load(config, tensors, kernels=kernels, max_positions=case.longest)
    batch = PagedBatch(model.spec.kv_specs, kernels, states=model.spec.states)
    launch = GridExecutor.__call__

    def launched(self: Any, *args: Any, **options: Any) -> Any:
        counting.inside += 1
        try:
            return launch(self, *args, **options)
        finally:
            counting.inside -= 1

    with torch.inference_mode():
        model.forward(torch.arange(1, 11), batch.step([("a", 5), ("b", 5)]))
        ctx = batch.step([("a", 1), ("b", 1)])
        monkeypatch.setattr(GridExecutor, "__call__", launched)
        with counting:
            model.forward(torch.tensor([3, 4]), ctx)
    assert not any(count["fallbacks"] for count in kernels.counters().values())
    return counting.found, len(model.layers)


@pytest.mark.parametrize("name", FAMILIES if WHOLE else FEW)
def test_no_family_leaves_more(name, tmp_path, monkeypatch):
    found, layers = left_to_torch(name, tmp_path, monkeypatch)
    assert sum(found.values()) <= ENDS + layers * MORE.get(name, 0), found
