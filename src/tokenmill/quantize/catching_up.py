"""Making up for what earlier layers lose. Owns: the weight that does so, before it is rounded.

The inputs x of a weight come from layers that are rounded already. In the unrounded model it would have got m in their
place, and given W m. W + W E for the least squares E of m - x by x gives that from x as nearly as a matrix can
(Arai, Ichikawa, 2025). Half of this way is better than all of it: E is found on little text. Must not know: how weights
are rounded.
"""

from __future__ import annotations

from torch import Tensor

from tokenmill.quantize.gptq import factored
from tokenmill.quantize.inputs import Inputs


def caught_up(weight: Tensor, inputs: Inputs, part: float, damping: float) -> Tensor:
    """The weight [out, columns] that goes this part of the way. Where it is not known what all inputs should have been
    (other tokens may reach an expert), it stays as it is."""
    part *= max(0.0, 1.0 - inputs.hessian.shape[0] / max(inputs.count, 1))
    if not part or inputs.drift is None or inputs.paired < inputs.count:
        return weight
    order, upper = factored(inputs, damping)
    made = weight.clone()
    made[:, order] += part * ((weight @ inputs.drift)[:, order] @ upper.T @ upper)
    return made
