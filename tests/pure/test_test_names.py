"""Test files are imported by name: of two with one name, apart by no `__init__.py`, only one is collected.

What several of them share lies in a file of its own (`*_helpers.py`, or called after what it owns): whoever imports a
test file drags in all that its tests need.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def module_of(file: Path) -> str:
    """The name that pytest imports a test file by."""
    name, folder = file.stem, file.parent
    while (folder / "__init__.py").exists():
        name, folder = f"{folder.name}.{name}", folder.parent
    return name


def test_no_two_test_files_have_one_name():
    files = defaultdict(list)
    for file in ROOT.rglob("test_*.py"):
        files[module_of(file)].append(str(file.relative_to(ROOT)))
    assert not [found for found in files.values() if len(found) > 1]


def imported(file: Path) -> Iterator[str]:
    """The modules that a file imports, and what may be one."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{each.name}" for each in node.names))
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def test_no_test_file_is_imported_from():
    modules = {module_of(file) for file in ROOT.rglob("test_*.py")}
    modules |= {f"tests.{module}" for module in modules}
    found = {str(file.relative_to(ROOT)): modules & {*imported(file)} for file in ROOT.rglob("*.py")}
    assert not {file: names for file, names in found.items() if names}


def test_helpers_are_imported_by_their_whole_names():
    """`from tests.cpu.engine.engines import run`: a bare name depends on what other tests have put onto the path."""
    elsewhere = {file.stem for file in (ROOT.parent / "train").rglob("*.py")}
    helpers = {file.stem for file in ROOT.rglob("*.py") if not file.name.startswith(("test_", "__", "conftest"))}
    found = {str(file.relative_to(ROOT)): (helpers - elsewhere) & {*imported(file)} for file in ROOT.rglob("*.py")}
    assert not {file: names for file, names in found.items() if names}
