"""Feed-forward layers. Owns: up -> activation -> down, gated or plain. Knows nothing of families."""

from __future__ import annotations

from torch import Tensor

from tokenmill.core.forward import Act, ForwardContext, NormSpec
from tokenmill.layers.build import Build
from tokenmill.layers.linear import ColumnLinear, RowLinear, Rows


class MLP:
    """act(norm(x) @ up) @ down (+ residual)."""

    def __init__(self, up: ColumnLinear, down: RowLinear, act: Act) -> None:
        self.up = up
        self.down = down
        self.act: Act = act

    def __call__(
        self, x: Tensor, ctx: ForwardContext, *, norm: NormSpec | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self.down(self.up.weight.matmul(x, ctx, norm=norm, act=self.act), ctx, residual=residual)


def gated_mlp(b: Build, hidden: int, inner: int, act: Act, *, bias: bool = False) -> MLP:
    """gate_proj and up_proj as one weight, then down_proj."""
    part = Rows(inner, inner)
    up = ColumnLinear(b, hidden, {"gate_proj": part, "up_proj": part}, bias=bias)
    return MLP(up, RowLinear(b, inner, hidden, "down_proj", bias=bias), act)


def plain_mlp(
    b: Build, hidden: int, inner: int, act: Act, names: tuple[str, str], *, bias: bool = True, transposed: bool = False
) -> MLP:
    """Two matrices with these names."""
    up = ColumnLinear(b, hidden, {names[0]: Rows(inner, inner)}, bias=bias, transposed=transposed)
    return MLP(up, RowLinear(b, inner, hidden, names[1], bias=bias, transposed=transposed), act)
