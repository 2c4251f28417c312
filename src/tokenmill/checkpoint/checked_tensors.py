"""Tensors that are checked while they are loaded. Owns: finding those that hold NaN or infinity.

So a damaged file is reported by its tensor's name instead of showing up as broken answers. The check is one pass per
tensor, in the order of reading. Its results are read once at the end, so that loading does not wait for a GPU.
Must not know: models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.whole_tensors import AroundCheckpoint
from tokenmill.compute.model import Checkpoint
from tokenmill.core.errors import ModelError


class CheckedCheckpoint(AroundCheckpoint):
    """A Checkpoint around another one."""

    def __init__(self, inner: Checkpoint, *, thorough: bool = False) -> None:
        """thorough: damage is refused; numbers of one byte and quantised blocks are looked at, too, which takes
        time."""
        super().__init__(inner)
        self.thorough = thorough
        self.sums: dict[str, Tensor] = {}

    def taken(self, name: str, found: Tensor, dtype: torch.dtype | None) -> Tensor:
        """It is checked."""
        return self._noted(name, found)

    def __getattr__(self, name: str) -> Any:
        """Methods that only some checkpoints have (blocks)."""
        found = getattr(self.inner, name)
        return partial(self._blocks, found) if name == "blocks" and self.thorough else found

    def _blocks(self, ask: Callable[..., Any], name: str, *args: Any) -> Any:
        """Quantised blocks. Their numbers are checked."""
        found = ask(name, *args)
        if found is not None:
            self._noted(name, self.inner.tensor(name))
        return found

    def damaged(self) -> list[str]:
        """Names of the tensors read so far that hold NaN or infinity."""
        if not self.sums:
            return []
        fine = torch.stack([total.cpu() for total in self.sums.values()]).isfinite().tolist()
        return [name for name, good in zip(self.sums, fine, strict=True) if not good]

    def damage(self, where: str) -> str:
        """What is said of such tensors ("": there are none); a thorough check refuses them."""
        damaged = self.damaged()
        if not damaged:
            return ""
        more = f" (and {len(damaged) - 3} more)" if len(damaged) > 3 else ""
        said = f"the file is damaged: {', '.join(damaged[:3])}{more} holds NaN or infinity"
        if self.thorough:
            raise ModelError(f"{where}: {said} (--check-weights).")
        return said

    def _noted(self, name: str, found: Tensor) -> Tensor:
        if found.is_floating_point() and (found.element_size() > 1 or self.thorough) and not found.is_meta:
            found_as = found if found.element_size() > 1 else found.float()
            total = _total(found_as)
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        return found


def _total(found: Tensor) -> Tensor:
    """A number that is finite only if all of these are. On a CPU it is made of the least and the greatest: a sum in
    float32 would first copy the tensor into float32."""
    if found.device.type != "cpu" or not found.numel():
        return found.sum(dtype=torch.float32)
    least, most = torch.aminmax(found)
    return least.float() * 0.0 + most.float() * 0.0
