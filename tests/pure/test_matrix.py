"""The covering design of bench/gpu_matrix.py: every pair, and no case twice."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_every_pair_is_there() -> None:
    """The design alone: the module itself needs Triton."""
    tree = ast.parse((ROOT / "bench" / "gpu_matrix.py").read_text())
    names = ("INTERWOVEN", "LATENT", "ROUNDS_OF_FAMILIES")
    wanted: list[ast.stmt] = [
        n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in names
    ]
    wanted += [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name in ("cells", "Cell")]
    axes = {"WEIGHTS": [f"w{i}" for i in range(11)], "KEYS": ["kv16", "kv-fp8", "kv-int8"], "DEVICES": list("abcd")}
    space: dict[str, Any] = {"dataclass": dataclass, "Iterator": object, **axes}
    exec(compile(ast.Module(wanted, []), "cells", "exec"), space)  # our own source
    geometries, families = [f"g{i}" for i in range(56)], [f"f{i}" for i in range(70)]
    found = list(space["cells"](geometries, families))
    assert len({cell.name for cell in found}) == len(found)
    sets = [(c.geometry, c.weights, c.keys, c.device) for c in found]
    parts = [geometries, *axes.values()]
    for a, b in itertools.combinations(range(4), 2):
        pairs = {(row[a], row[b]) for row in sets}
        assert pairs >= set(itertools.product(parts[a], parts[b])), (a, b)
    first = {cell.geometry for cell in found[: len(geometries) + len(families)]}
    assert first == {*geometries, *families}, "a first round has every geometry"
    assert {(c.geometry, c.device) for c in found} >= set(itertools.product(families, axes["DEVICES"]))
