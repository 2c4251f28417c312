"""Cycles among the modules of `src/tokenmill`, found without running anything; exit status 1 when there is one.

Owns: which import counts. All of them do: those that only type checkers follow, and those within functions, because a
module that has to know another one's types knows that module. A package's `__init__` counts as a module of its own.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src"


def main() -> int:
    """Print every cycle, largest first."""
    modules = find_modules(ROOT / "tokenmill")
    found = find_cycles(modules)
    for cycle in found:
        print(f"CYCLE of {len(cycle)} modules")
        for name in cycle:
            print(f"  {name} imports {', '.join(sorted(modules[name] & set(cycle)))}")
    print(f"{len(modules)} modules, {len(found)} cycles")
    return 1 if found else 0


def find_modules(package: Path) -> dict[str, set[str]]:
    """Every module below a package, with the modules there that it imports."""
    paths = {_name(path, package.parent): path for path in sorted(package.rglob("*.py"))}
    return {name: _imports(name, path, set(paths)) for name, path in paths.items()}


def find_cycles(modules: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (strongly connected ones, by Tarjan's algorithm), largest first."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in sorted(modules[name]):
            if other not in order:
                visit(other)
            if other in path:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            group = path[path.index(name) :]
            del path[path.index(name) :]
            if len(group) > 1 or name in modules[name]:
                cycles.append(sorted(group))

    for name in sorted(modules):
        if name not in order:
            visit(name)
    return sorted(cycles, key=len, reverse=True)


def _name(path: Path, top: Path) -> str:
    parts = path.relative_to(top).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, path: Path, known: set[str]) -> set[str]:
    found: set[str] = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (above, node.module) if part)
            for alias in node.names:  # `from package import module` is an import of the module
                whole = f"{source}.{alias.name}"
                found.add(whole if whole in known else source)
    return (found & known) - ({name} if path.name == "__init__.py" else set())


if __name__ == "__main__":
    sys.exit(main())
