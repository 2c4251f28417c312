"""Shapes of draft trees, as a person may ask for them. Owns: what a path is, shapes that are written down, and the
tree of Jacobi windows.

A path names, level by level, which of the likeliest guesses is taken: (0,) is the first level's best one, (1, 0) the
best one behind the first level's second best. Nodes are in an order in which parents come before children. Must not
know: torch (options are read before it is imported), who guesses, plans.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

MOST_NODES, MOST_LEVELS, MOST_CHILDREN = 64, 16, 16
LONGEST = 4096
"""Most characters of a written shape."""
Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """paths: the nodes of a fixed tree; None: the `nodes` likeliest ones, found anew each time."""

    nodes: int
    paths: tuple[Path, ...] | None = None


def read_shape(said: Any, nodes: int | None) -> TreeShape:
    """A list of paths, also as vLLM's text "[(0,), (0, 0), (1,)]", or "best"; nodes: how many there are to be. A
    ValueError says what is wrong."""
    if said == "best":
        return TreeShape(nodes or 16)
    if isinstance(said, str):
        try:
            said = ast.literal_eval(said) if len(said) <= LONGEST else None
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            said = None
    if not isinstance(said, (list, tuple)) or not said or not all(_is_path(path) for path in said):
        raise ValueError(
            f'it must be "best" or a list of paths like [[0], [1], [0, 0]], of up to {MOST_LEVELS} numbers from 0 to '
            f"{MOST_CHILDREN - 1} each"
        )
    paths = sorted({tuple(path) for path in said}, key=lambda path: (len(path), path))
    if len(paths) != len(said):
        raise ValueError("a path comes twice")
    if len(paths) > MOST_NODES:
        raise ValueError(f"{len(paths)} paths are more than {MOST_NODES}")
    for path in paths:
        if len(path) > 1 and path[:-1] not in paths:
            raise ValueError(f"{list(path)} goes on from {list(path[:-1])}, which is not there")
    if nodes not in (None, len(paths)):
        raise ValueError(f"num_speculative_tokens is {nodes}, and there are {len(paths)} paths")
    return TreeShape(len(paths), tuple(paths))


def parents_of(paths: tuple[Path, ...]) -> list[int]:
    """Each path's parent: 1 + its node's number; 0: the newest known token."""
    places = {path: n + 1 for n, path in enumerate(paths)}
    return [places[path[:-1]] if len(path) > 1 else 0 for path in paths]


@dataclass(frozen=True, slots=True)
class Windows:
    """window: lines that go on beside the text; length: tokens of a run, its first one included; candidates: runs of
    the pool that are tried at a time."""

    window: int
    length: int
    candidates: int

    @property
    def nodes(self) -> int:
        return (self.window + self.candidates) * (self.length - 1)

    @property
    def levels(self) -> int:
        """How deep the tree is."""
        return self.window + self.length - 2

    def parents(self) -> list[int]:
        """Each node's parent: 1 + its number; 0: the newest token. Candidates come one after the other, then the first
        guesses of all lines, then the second ones, ..."""
        deep = self.length - 1
        first = self.candidates * deep
        runs = [at if at % deep else 0 for at in range(first)]
        chain = [first + line if line else 0 for line in range(self.window)]
        return runs + chain + [first + 1 + n for n in range((deep - 1) * self.window)]


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, (list, tuple))
        and 0 < len(path) <= MOST_LEVELS
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < MOST_CHILDREN for n in path)
    )
