"""Every family's choice of experts against Transformers' router, alone: saturated scores, tiny sums, wide ranges.

A router whose matrix holds ones on its diagonal gives back its input, so the logits are what a case says.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.cpu.models.families_helpers import CASES as OTHERS
from tests.cpu.models.family_cases import ALL
from tests.cpu.models.parity import load, ours
from torch import Tensor

from tokenmill.compute.forward import RouteSpec
from tokenmill.kernels.reference import ReferenceKernels

ROUTER = re.compile(r"(Router|MoEV1Gate)$")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config")
FAMILIES = {
    name: case
    for name, case in (ALL | OTHERS).items()
    if any(isinstance(getattr(case.config, key, 0), int | list) and getattr(case.config, key, 0) for key in COUNTS[:4])
    or hasattr(case.config, "ffn_config")
}
ROWS = 40


class Watched(ReferenceKernels):
    """Notes how experts are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: list[RouteSpec] = []

    def route(self, logits: Tensor, spec: RouteSpec) -> tuple[Tensor, Tensor]:
        self.specs.append(spec)
        return super().route(logits, spec)


def logits_of(experts: int) -> dict[str, Tensor]:
    """By name: what a router may say."""
    noise = torch.randn(ROWS, experts, generator=torch.Generator().manual_seed(5))
    return {
        "usual": noise,
        "saturated": 24 + 4 * noise,
        "tiny": 4 * noise - 56,
        "low": 8 * noise - 20,
        "wide": 30 * noise,
    }


def matrix_of(router: Any) -> Any:
    """The router's matrix, wherever its class keeps it."""
    for name in ("weight", "gate.weight", "wg.weight", "layer.weight", "proj.weight", "classifier.weight"):
        found: Any = router
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    raise AssertionError(f"no matrix in {type(router).__name__}")


def bias_for(router: Any, spec: RouteSpec) -> Tensor | None:
    """The same bias on both sides; no two experts, nor groups, tie where their scores do."""
    if spec.bias is None:
        return None
    bias = torch.randn(spec.experts, generator=torch.Generator().manual_seed(9)) * 0.3
    for name, buffer in [*router.named_buffers(), *router.named_parameters()]:
        if name.endswith("correction_bias"):
            buffer.data.copy_(bias.view(buffer.shape))
    return bias


def theirs(router: Any, block: Any, logits: Tensor, bias: Tensor | None) -> Tensor:
    """Gates by expert [T, E], 0 for those that are not chosen."""
    matrix = matrix_of(router)
    x = torch.nn.functional.pad(logits, (0, matrix.shape[1] - logits.shape[1]))
    wanted = inspect.signature(router.forward).parameters
    given = {name: bias for name in wanted if name.endswith("bias")}
    if type(router).__name__ == "AfmoeTokenChoiceRouter":
        x = x[None]
    with torch.no_grad():
        found = router(x, **given)
    if type(router).__name__ == "Llama4Router":
        return found[0]
    if type(router).__name__ == "DbrxRouter":
        found = (found, *block.route_tokens_to_experts(found))
    _, gates, ids = found
    if type(router).__name__ == "LagunaTopKRouter":
        gates = gates * block.routed_scaling_factor
    return torch.zeros_like(logits).scatter(1, ids, gates.float())


def made(name: str, folder: Any) -> tuple[Any, Any, RouteSpec]:
    """(router, the module around it, how ours chooses)."""
    model, config, tensors = FAMILIES[name].make(folder)
    at = next((at for at, module in model.named_modules() if ROUTER.search(type(module).__name__)), None)
    if at is None:
        pytest.skip("none of this case's layers has experts")
    modules, kernels = dict(model.named_modules()), Watched()
    mine = load(config, tensors, kernels=kernels)
    ours(mine, {"a": [3]}, [[("a", 1)]], kernels)
    router, spec = modules[at], kernels.specs[0]
    with torch.no_grad():
        matrix = matrix_of(router)
        matrix.copy_(torch.eye(*matrix.shape))
        if getattr(router, "bias", None) is not None:
            router.bias.zero_()
    return router, modules[at.rpartition(".")[0]], spec


def backends() -> dict[str, Any]:
    found: dict[str, Any] = {"reference": ReferenceKernels()}
    try:
        from tokenmill.kernels.cpu import CpuKernels
    except ImportError:
        return found
    return {**found, "native": CpuKernels()}


@pytest.mark.parametrize("name", [n for n in FAMILIES if not n.startswith("gemma4")])
def test_the_same_experts_with_the_same_gates(name, tmp_path):
    router, block, spec = made(name, tmp_path)
    bias = bias_for(router, spec)
    for kind, logits in logits_of(spec.experts).items():
        expected = theirs(router, block, logits, bias)
        for backend, kernels in backends().items():
            ids, gates = kernels.route(logits, replace(spec, bias=bias))
            found = torch.zeros_like(logits).scatter(1, ids, gates)
            told = f"{backend}, {kind} logits"
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-30, msg=lambda m, told=told: f"{told}: {m}")
