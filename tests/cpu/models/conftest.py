"""Lets model tests use the paged batches of the kernel tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
