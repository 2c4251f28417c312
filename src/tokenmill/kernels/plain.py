"""Products of matrices as they are stored, in plain torch. Owns: which function multiplies which kind.

A backend's packed form of a kind must give the same result as the function here. A kind that is not here is multiplied
by its dense numbers. Must not know: weights as objects, layers, files.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.fp8 import fp8_linear
from tokenmill.kernels.grid import affine_linear, grid_linear


def _grid(x: Tensor, m: StoredMatrix) -> Tensor:
    apart = m.find("apart")
    return grid_linear(x, m.part("codes"), m.part("scales"), m.bias, 0.0 if apart is None else float(apart))


def _affine(x: Tensor, m: StoredMatrix) -> Tensor:
    return affine_linear(x, m.part("codes"), m.part("scales"), m.find("offsets"), m.bias)


def _fp8(x: Tensor, m: StoredMatrix) -> Tensor:
    return fp8_linear(x, m.part("codes"), m.part("scales"), m.bias)


PRODUCTS: dict[str, Callable[[Tensor, StoredMatrix], Tensor]] = {
    "int8": _grid,
    "int4": _grid,
    "affine": _affine,
    "fp8": _fp8,
    "fp8-blocks": _fp8,
}
"""kind -> (x [T, K], matrix) -> x @ matrix.T + bias [T, N] in x's dtype."""
