"""Makes the training folder of the demo model importable; its modules are scripts, not a package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "train" / "demo"))
