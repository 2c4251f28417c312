"""How a model's files begin. Owns: refusing files that are no model, before a model of them is stored.

Only headers are read. Whether this program knows the model, and whether its tensors are whole, is for the load to say.
Must not know: the store, torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenmill.checkpoint.gguf_file import open_gguf
from tokenmill.checkpoint.no_model import check_gguf
from tokenmill.checkpoint.safetensors_header import read_header, safetensors_files
from tokenmill.checkpoint.shards import torch_files
from tokenmill.core.errors import ModelError
from tokenmill.core.files import LOOK, open_regular, present, read_object, told_by

MAX_CONFIG_BYTES = 4 << 20


def check_files(form: str, folder: Path, files: Iterable[Path]) -> None:
    """Raise a ModelError that names the file which is not part of a model in this format, or is missing. `files`: a
    GGUF model's."""
    if form == "gguf":
        for file in files:
            check_gguf(open_gguf(file), file)
        return
    if not present(folder / "config.json"):
        raise ModelError(f"{folder}: there is no config.json beside the weights.")
    read_object(folder / "config.json", MAX_CONFIG_BYTES)
    safe = form == "safetensors"
    for file in (safetensors_files if safe else torch_files)(folder)[0]:
        (_check_safetensors if safe else _check_torch)(file)


def check_adapter(path: Path) -> None:
    """The same of an adapter whose settings are read. A GGUF file was read for them."""
    safe, old = path / "adapter_model.safetensors", path / "adapter_model.bin"
    if not path.is_dir():
        return
    if not present(safe) and not present(old):
        raise ModelError(f"{path}: there is no {safe.name} beside adapter_config.json.")
    _check_safetensors(safe) if present(safe) else _check_torch(old)


def _check_safetensors(file: Path) -> None:
    try:
        with open_regular(file) as opened:
            read_header(opened)
    except ModelError as error:
        reason = str(error)
        raise ModelError(reason if reason.startswith(str(file)) else f"{file}: {reason}") from error


def _check_torch(file: Path) -> None:
    """A zip archive, or a pickle as older versions write them."""
    with open_regular(file) as opened:
        first = opened.read(LOOK)
    if not first.startswith((b"PK\x03\x04", b"\x80\x02")):
        raise ModelError(f"{file}: it is {told_by(first) or 'no file that torch.save has written'}.")
