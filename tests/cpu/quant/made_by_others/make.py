"""Files of others' tools, one linear layer each: the weight as they store it (`w.`), inputs `x`, and their `outputs`.

python make.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from safetensors.torch import save_file
from torch import Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)
from torchao.quantization.granularity import PerGroup

ROWS, COLUMNS, FOLDER = 32, 128, Path(sys.argv[1])
RANDOM = torch.Generator().manual_seed(7)
WEIGHT = torch.randn(ROWS, COLUMNS, generator=RANDOM) * 0.05
X = torch.randn(4, COLUMNS, generator=RANDOM)
TORCHAO = {
    "int8": Int8WeightOnlyConfig(version=2),
    "fp8": Float8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "8da4w": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
}


def write(name: str, tensors: dict[str, Tensor], layer: torch.nn.Module, metadata: Any = None) -> None:
    with torch.no_grad():
        outputs = layer(X)
    save_file({**tensors, "x": X, "outputs": outputs}, FOLDER / f"{name}.safetensors", metadata=metadata)


def stored(layer: torch.nn.Module) -> dict[str, Tensor]:
    return {f"w.{name}": tensor.contiguous().clone() for name, tensor in layer.state_dict().items()}


for kind in ("nf4", "fp4"):
    for double in (False, True):
        how = {"quant_type": kind, "compress_statistics": double}
        four = bnb.nn.Linear4bit(COLUMNS, ROWS, bias=False, compute_dtype=torch.float32, **how)
        four.weight = bnb.nn.Params4bit(WEIGHT.clone(), requires_grad=False, **how)
        four = four.to("cpu")
        write(f"bitsandbytes-{kind}{'-double' if double else ''}", stored(four), four)
eight = bnb.nn.Linear8bitLt(COLUMNS, ROWS, bias=False, has_fp16_weights=False, threshold=0.0)
eight.weight = bnb.nn.Int8Params(WEIGHT.clone(), requires_grad=False, has_fp16_weights=False)
eight = eight.to("cpu")
write("bitsandbytes-int8", stored(eight), eight)

for name, config in TORCHAO.items():
    model = torch.nn.Sequential()
    model.add_module("w", torch.nn.Linear(COLUMNS, ROWS, bias=False))
    model.w.weight.data = WEIGHT.clone()
    quantize_(model, config)
    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    write(f"torchao-{name}", tensors, model, metadata)
