"""`python -m tokenmill`: the command line, for whom its script is not on the path."""

from __future__ import annotations

import sys
from pathlib import Path

from tokenmill.cli.main import main

if __name__ == "__main__":
    # Python puts the current folder first, which may hold a types.py of somebody's own
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != Path(__file__).resolve().parents[1]:
        del sys.path[0]
    main()
