"""Runs pytest on a package installed aside, though this environment has an editable one: FOLDER PYTEST-ARGUMENTS...

Owns: putting the folder first. An editable install answers imports before any path does, so it is taken out.
"""

from __future__ import annotations

import sys

import pytest


def main() -> int:
    """Exit code of pytest; 2 if the package does not come from the folder."""
    folder, *arguments = sys.argv[1:]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, folder)
    from tokenmill import _native

    if folder not in (_native.__file__ or ""):
        print(f"the native module comes from {_native.__file__}, not from {folder}", file=sys.stderr)
        return 2
    return int(pytest.main(["-o", "pythonpath=", "-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    sys.exit(main())
