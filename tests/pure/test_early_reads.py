"""What kernels with dependent launch read before they wait for the launch before them: only what is older than an
ordinary launch. The two launches before may still run then, so a tensor of theirs may hold anything."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "src/tokenmill/kernels/triton"
WEIGHTS = {"w_ptr", "weight_ptr", "norm_ptr", "bias_ptr", "rate_ptr", "shift_ptr", "skip_ptr", "times_ptr", "rows",
           "partners", "norm_b_ptr", "norm_c_ptr"}  # fmt: skip
PLACES = {"plan", "start_ptr", "row_ptr", "position_ptr", "slot_ptr", "slots_ptr", "ranks_ptr", "left_ptr"}
"""Which rows a step has, where they are, and their adapters: made by ordinary launches before the embedding, or before
a later stage's copy of its inbox. (A head's lines have their adapters' slots from an ordinary launch, too.)"""
STATES = {"state_ptr", "places"}
"""What the step before has left."""
AGREED = {
    ("narrow_one.py", "_down_kernel"): {"id_ptr", "gate_ptr"},
    ("experts.py", "_down_kernel"): {"id_ptr", "gate_ptr"},
}
"""The launch before these waits before it lets them start."""


def early_reads(function: ast.FunctionDef) -> set[str]:
    """The names that pointers of loads begin with, in lines before the first wait."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    waits = [call.lineno for call in calls if ast.unparse(call.func) == "wait"]
    loads = [call for call in calls if ast.unparse(call.func) == "tl.load" and waits and call.lineno < min(waits)]
    return {base_of(load.args[0]) for load in loads}


def base_of(pointer: ast.expr) -> str:
    """The name that it begins with."""
    while not isinstance(pointer, ast.Name):
        pointer = pointer.left if isinstance(pointer, ast.BinOp) else pointer.value  # type: ignore[attr-defined]
    return pointer.id


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.name)
def test_only_what_is_older_is_read_before_a_wait(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            known = WEIGHTS | PLACES | STATES | AGREED.get((path.name, node.name), set())
            assert early_reads(node) <= known, f"{node.name}: may these be read before the launch before has ended?"


def test_a_read_of_the_launch_before_is_found() -> None:
    source = "def kernel(x_ptr, w_ptr, k):\n    w = tl.load(w_ptr + k)\n    x = tl.load(x_ptr + k)\n    wait(PDL)\n"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef) and early_reads(function) == {"w_ptr", "x_ptr"}
