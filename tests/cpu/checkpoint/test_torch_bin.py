"""Torch files load without running code."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill.checkpoint.folder import open_checkpoint
from tokenmill.core.errors import ModelError


class Runs:
    """Unpickling this makes a folder: the canary."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_reads_what_torch_wrote(zipped: bool, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(checkpoint.names()) == ["a", "b"] and checkpoint.shape("a") == (3, 4)
    assert torch.equal(checkpoint.tensor("a", (3, 4)), tensors["a"])
    assert torch.equal(checkpoint.part("a", 1, 1, 3, (3, 4)), tensors["a"][:, 1:3])
    with pytest.raises(ModelError, match=r"'a' has shape \[3, 4\]"):
        checkpoint.tensor("a", (4, 3))
    with pytest.raises(ModelError, match="'z'"):
        checkpoint.tensor("z")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_wants_to_run_code_is_refused(zipped: bool, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(1), "b": Runs(canary)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match="safetensors"):
        open_checkpoint(tmp_path)
    path.write_bytes(pickle.dumps(Runs(canary)))
    with pytest.raises(ModelError):
        open_checkpoint(tmp_path)
    assert not canary.exists()
    pickle.loads(path.read_bytes())
    assert canary.exists(), "the canary itself works"


@pytest.mark.parametrize(
    "value",
    [
        [torch.zeros(1)],
        {"a": 3},
        {1: torch.zeros(1)},
        {"a": torch.zeros(2, 2).to_sparse()},
        {"a": torch.zeros(2, 2, device="meta")},
        {"a": {"b": torch.zeros(1)}},
    ],
)
def test_only_named_dense_tensors(value: object, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_few_bytes_are_not_many_numbers(zipped: bool, tmp_path: Path) -> None:
    path, small = tmp_path / "pytorch_model.bin", torch.arange(6.0)
    whole = {"rows": small.view(2, 3).T, "part": small[4:], "lone": small[:1].expand(1, 1)}
    torch.save(whole, path, _use_new_zipfile_serialization=zipped)
    assert all(torch.equal(open_checkpoint(tmp_path).tensor(name), value) for name, value in whole.items())
    torch.save({"bomb": small[:1].expand(1 << 20, 1 << 20)}, path, _use_new_zipfile_serialization=zipped)
    assert path.stat().st_size < 5000
    with pytest.raises(ModelError, match="'bomb' has 1099511627776 numbers, and the file holds fewer"):
        open_checkpoint(tmp_path)


def _archive(pickled: bytes, folder: Path, how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", how) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + pickled)
        archive.writestr("a/version", "3\n")


_NAMED = b"}X\x01\x00\x00\x00a"
"""A table, and the name of an entry."""
_MANY = b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85R"
"""A call with a large number."""
_TUPLES = b"K\x01q\x00" + 60 * b"h\x00h\x00\x86q\x00"
"""A tuple of twice a tuple of twice a tuple ..., whose hash takes years, and whose text fills any memory."""
BOMBS = {
    "bytes of a length": (_NAMED + b"cbuiltins\nbytearray\n" + _MANY + b"s.", r"asks for builtins\.bytearray"),
    "a tensor of a size": (_NAMED + b"ctorch\nTensor\n" + _MANY + b"s.", r"asks for torch\.Tensor"),
    "a storage of a size": (_NAMED + b"ctorch.storage\nUntypedStorage\n" + _MANY + b"s.", "asks for torch.storage"),
    "text of text": (_NAMED + b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86Rs.", "_codecs.encode"),
    "a name of tuples": (_TUPLES + b"}h\x00K\x01s.", "whose name is a tuple"),
    "names of tuples": (_TUPLES + b"}(h\x00K\x01u.", "whose name is a tuple"),
    "a table from tuples": (_TUPLES + b"ccollections\nOrderedDict\nh\x00\x85R.", "asks for collections.OrderedDict"),
    "tuples in tuples": (b"}K\x01" + 1_000_000 * b"\x85" + b"K\x01s.", "whose name is a tuple"),
    "a list of tuples as a name": (_TUPLES + b"}]h\x00aK\x01s.", "unhashable"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_few_bytes_ask_for_little(name: str, tmp_path: Path) -> None:
    pickled, said = BOMBS[name]
    _archive(pickled, tmp_path)
    with pytest.raises(ModelError, match=rf"pytorch_model\.bin: .*{said}"):
        open_checkpoint(tmp_path)


def test_an_archive_is_not_unpacked(tmp_path: Path) -> None:
    """torch.save writes none that is compressed: a small one would fill the memory."""
    _archive(b"X" + struct.pack("<I", 1 << 24) + b"a" * (1 << 24) + b".", tmp_path, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 1 << 16
    with pytest.raises(ModelError, match="its archive is compressed"):
        open_checkpoint(tmp_path)


def test_memory_that_a_file_does_not_fill_is_not_read(tmp_path: Path) -> None:
    """An old file lists the storages whose numbers follow. torch leaves others as it found the memory."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(64), "b": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    assert open_checkpoint(tmp_path).tensor("a").tolist() == [1.0] * 64
    at = whole.rfind(b"\x80\x02]q\x00")  # the list
    path.write_bytes(whole[:at] + b"\x80\x02]." + bytes(400))
    with pytest.raises(ModelError, match="holds the numbers of 0 storages, and its tensors need 2"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_whatever_torch_writes_of_tensors_is_read(zipped: bool, tmp_path: Path) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    one = torch.arange(12.0).view(3, 4)
    kinds = (torch.int8, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.int64, torch.complex64)
    newer = (torch.float8_e4m3fn, torch.uint16) if zipped else ()
    table = {
        **layer.state_dict(), "one": one, "tied": one, "turned": one.T, "none": torch.empty(0), "number": one[0, 1],
        "parameter": torch.nn.Parameter(one[0]), **{str(kind): torch.ones(3).to(kind) for kind in (*kinds, *newer)},
    }  # fmt: skip
    for written in (table, layer.state_dict(), dict(layer.named_parameters())):
        torch.save(written, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        found = open_checkpoint(tmp_path)
        assert sorted(found.names()) == sorted(written)
        assert all(torch.equal(found.tensor(name), value.detach()) for name, value in written.items())


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.randn(50)}, path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 61):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
            open_checkpoint(tmp_path)


def test_shards(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        torch.save({name: torch.full((2,), float(number))}, tmp_path / f"pytorch_model-{number}.bin")
    table = {"a": "pytorch_model-0.bin", "b": "pytorch_model-1.bin"}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    assert open_checkpoint(tmp_path).tensor("b").tolist() == [1.0, 1.0]
    index.write_text(json.dumps({"weight_map": table | {"c": "pytorch_model-1.bin"}}))
    with pytest.raises(ModelError, match="'c'"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(ModelError, match="plain file name"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    """The index says which one counts; where there is none, neither does."""
    for number in range(2):
        torch.save(
            {"a": torch.tensor([number]), f"b{number}": torch.zeros(1)}, tmp_path / f"pytorch_model-{number}.bin"
        )
    with pytest.raises(ModelError, match=r"'a' is in both pytorch_model-0\.bin and pytorch_model-1\.bin"):
        open_checkpoint(tmp_path)
    index = tmp_path / "pytorch_model.bin.index.json"
    files = [f"pytorch_model-{number}.bin" for number in range(2)]
    index.write_text(json.dumps({"weight_map": {"a": files[0], "b1": files[1]}}))
    found = open_checkpoint(tmp_path)
    assert found.tensor("a").tolist() == [0]
    assert sorted(found.names()) == ["a", "b0", "b1"], "a tensor that the index forgets is not lost"
    index.write_text(json.dumps({"weight_map": {"a": files[0], "b0": files[1]}}))
    with pytest.raises(ModelError, match=r"places tensor 'b0' in pytorch_model-1\.bin, which does not hold it"):
        open_checkpoint(tmp_path)
    index.unlink()
    torch.save({"a": torch.tensor([2])}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(tmp_path).tensor("a").tolist() == [2], "a whole file goes before parts beside it"
