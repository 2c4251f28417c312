"""The same for MLX: python make_mlx.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

ROWS, COLUMNS, FOLDER = 32, 128, Path(sys.argv[1])
mx.random.seed(7)
WEIGHT = mx.random.normal((ROWS, COLUMNS)) * 0.05
X = mx.random.normal((4, COLUMNS))

for bits in (2, 3, 4, 5, 6, 8):
    plain = nn.Linear(COLUMNS, ROWS, bias=False)
    plain.weight = WEIGHT.astype(mx.bfloat16 if bits == 4 else mx.float32)
    made = plain.to_quantized(group_size=32 if bits == 3 else 64, bits=bits)
    tensors = {f"w.{name}": each for name, each in made.parameters().items()}
    wide = (each.astype(mx.float32) for each in (made.scales, made.biases))
    outputs = X @ mx.dequantize(made.weight, *wide, made.group_size, bits).T
    mx.save_safetensors(str(FOLDER / f"mlx-{bits}.safetensors"), {**tensors, "x": X, "outputs": outputs})

for mode in ("mxfp4", "mxfp8", "nvfp4"):
    plain = nn.Linear(COLUMNS, ROWS, bias=False)
    plain.weight = WEIGHT
    made = plain.to_quantized(mode=mode)
    outputs = X @ mx.dequantize(made.weight, made.scales, mode=mode).astype(mx.float32).T
    tensors = {"w.weight": made.weight, "w.scales": made.scales, "x": X, "outputs": outputs}
    mx.save_safetensors(str(FOLDER / f"mlx-{mode}.safetensors"), tensors)
