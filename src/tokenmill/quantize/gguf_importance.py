"""How large the inputs of each column are, measured on a text. Owns: adding them up layer by layer, under the names of
GGUF files. Must not know: command lines, how rounding uses it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.checkpoint.gguf_metadata import GgufPlace, architecture, place
from tokenmill.core.errors import ModelError
from tokenmill.quant.convert import Tell
from tokenmill.quant.importance import Sums
from tokenmill.quantize.inputs import Squares
from tokenmill.quantize.layer_stream import Stream
from tokenmill.quantize.watched_weights import InputRecord


def measure(
    source: Path, tokens: Tensor, device: str = "cpu", tell: Tell = lambda name, done, total: None
) -> dict[str, Sums]:
    """Run the model in folder `source` on tokens [N, L]. Returns sums by the matrices' names in GGUF files, without
    embeddings and head."""
    config = read_config(source)
    if config.get("quantization_config"):
        raise ModelError(f"{source} is already quantised; start from the unquantised model.")
    arch, seen = architecture(config, str(source)), {}
    ckpt = open_checkpoint(source)
    try:
        matrices = frozenset(name for name in ckpt.names() if len(ckpt.shape(name) or ()) == 2)
        stream = Stream(config, ckpt, device, tokens)
        for index in range(stream.count):
            layer = InputRecord(wanted=matrices, make=Squares)
            stream.watch(index, layer)
            seen.update({name: layer.inputs.get(name) for name in layer.built if name in matrices})
            tell(f"layer {index}", index + 1, stream.count)
        places = [(name, place(name, arch, config, str(source))) for name in seen]
        return _by_place({name: where for name, where in places if where is not None}, seen)
    finally:
        ckpt.close()


def _by_place(places: dict[str, GgufPlace], seen: dict[str, Squares | None]) -> dict[str, Sums]:
    """Experts of one tensor in their order. An expert that no token reached has sums of 0."""
    stacks: dict[str, dict[int, Squares | None]] = {}
    for name, where in places.items():
        stacks.setdefault(where.name, {})[where.expert or 0] = seen[name]
    found = {}
    for name, experts in stacks.items():
        columns = next((len(each.squares) for each in experts.values() if each is not None), None)
        if columns is None:
            continue
        empty = torch.zeros(columns)
        ordered = [experts.get(number) for number in range(max(experts) + 1)]
        squares = torch.stack([empty if each is None else each.squares.cpu() for each in ordered])
        found[name] = Sums(squares, torch.tensor([[0.0 if each is None else float(each.count)] for each in ordered]))
    return found
