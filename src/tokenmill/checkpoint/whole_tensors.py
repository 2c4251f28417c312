"""What checkpoints share whose whole tensors cost little, as they are maps of files, or are made as a whole. Owns:
cutting parts out of them. Must not know: file formats.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.core.errors import ModelError


class WholeTensors(ABC):
    """A checkpoint whose parts are views of whole tensors. where: the file or folder that errors name, if there is
    one."""

    where: Path | None = None

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor."""

    def part(
        self,
        name: str,
        dim: int,
        start: int,
        stop: int,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """start:stop of one dimension. Of a mapped file only that part is read, when it is used."""
        whole = self.tensor(name, shape, dtype)
        if not 0 <= dim < whole.ndim or not 0 <= start <= stop <= whole.shape[dim]:
            where = "" if self.where is None else f"{self.where}: "
            raise ModelError(
                f"{where}tensor {name!r} of shape {list(whole.shape)} has no part {start}:{stop} in dimension {dim}"
            )
        return whole.narrow(dim, start, stop - start)
