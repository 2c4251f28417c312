"""Lets layer tests use the helpers of the kernel and model tests."""

import sys
from pathlib import Path

for folder in ("kernels", "models"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
