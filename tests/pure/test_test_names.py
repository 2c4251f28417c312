"""Test files are imported by name: of two with one name, apart by no `__init__.py`, only one is collected."""

from __future__ import annotations

from collections import defaultdict
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
