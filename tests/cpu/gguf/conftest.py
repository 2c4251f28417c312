"""Lets these tests use the model tests' comparison with Transformers."""

import sys
from pathlib import Path

for folder in ("models", "kernels", "gguf"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
