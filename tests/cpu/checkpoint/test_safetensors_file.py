"""Safetensors files: the library's own files are read alike, and no header can lie."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.cpu_time import least_cpu_time

from tokenmill.checkpoint.folder import open_checkpoint
from tokenmill.checkpoint.safetensors import DTYPES, SafetensorsFile
from tokenmill.checkpoint.safetensors_header import SIZES, parse_header
from tokenmill.core.errors import ModelError

# The library at hand cannot write the other types of the format.
assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == SIZES
WRITABLE = sorted({*DTYPES.values()} - {torch.float8_e8m0fnu}, key=str)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape[:-1], shape[-1] * dtype.itemsize))
    return bits.to(torch.uint8).view(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_reads_as_the_library_wrote_it(tmp_path: Path) -> None:
    tensors = {str(dtype): some(dtype, 3, 5) for dtype in WRITABLE}
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "deep": torch.randn(1, 2, 3, 4, 5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert checkpoint.has(name) and checkpoint.shape(name) == tuple(tensor.shape)
        assert same(checkpoint.tensor(name, tuple(tensor.shape)), tensor), name
    assert not checkpoint.has("other")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_parts_are_slices(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(WRITABLE))
    folder = tmp_path_factory.mktemp("parts")
    tensor = some(dtype, *shape)
    save_file({"w": tensor}, folder / "model.safetensors")
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    stop = data.draw(st.integers(start, shape[dim]))
    checkpoint = open_checkpoint(folder)
    got = checkpoint.part("w", dim, start, stop, tuple(shape))
    assert same(got.clone(), tensor.narrow(dim, start, stop - start).clone())
    for bad in ((dim, start, shape[dim] + 1), (len(shape), 0, 0), (dim, -1, stop), (dim, 1, 0), (-1, 0, 0)):
        with pytest.raises(ModelError):
            checkpoint.part("w", *bad)


def test_tensors_outlive_the_checkpoint_and_leave_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(1000.0)}, path)
    before = path.read_bytes()
    checkpoint = open_checkpoint(tmp_path)
    tensor, again = checkpoint.tensor("w"), checkpoint.tensor("w")
    assert tensor.data_ptr() == again.data_ptr()
    checkpoint.close()
    del checkpoint
    gc.collect()
    assert torch.equal(tensor, torch.arange(1000.0))
    tensor.zero_()
    assert path.read_bytes() == before


def test_a_file_that_is_read_may_change_afterwards(tmp_path: Path) -> None:
    """Each tensor has memory of its own: a whole file's would be got and freed in one long call."""
    path, values = tmp_path / "model.safetensors", torch.randn(7)
    header = json.dumps({"a": entry([7], 0, 28), "none": entry([0], 28, 28), "b": entry([2], 28, 36)}).encode()
    write(path, header + b" " * 3, values.numpy().tobytes() + torch.ones(2).numpy().tobytes())
    file = SafetensorsFile(path, copied=True)
    path.write_bytes(b"")
    assert torch.equal(file.tensor("a"), values) and file.tensor("none").shape == (0,)
    for name, length in (("a", 7), ("b", 2)):
        tensor = file.tensor(name)
        assert tensor.untyped_storage().nbytes() == 4 * length and tensor.data_ptr() % 4 == 0


def test_an_odd_address_is_copied_to_an_even_one(tmp_path: Path) -> None:
    values = torch.randn(4)
    header = json.dumps({"w": entry([4], 0, 16)}).encode()
    header += b" " * ((-len(header)) % 8 + 3)
    write(tmp_path / "model.safetensors", header, values.numpy().tobytes())
    tensor = open_checkpoint(tmp_path).tensor("w")
    assert torch.equal(tensor, values) and tensor.data_ptr() % 4 == 0


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    save_file({"layer.w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"'layer\.w' has shape \[2, 3\].*asks for \[3, 2\]"):
        checkpoint.tensor("layer.w", (3, 2))
    with pytest.raises(ModelError, match=r"'layer\.w'.*\[2, 3\]"):
        checkpoint.part("layer.w", 0, 0, 1, (2, 4))
    for call in (checkpoint.tensor, checkpoint.shape):
        with pytest.raises(ModelError, match="'nothing'"):
            call("nothing")


HUGE = 1 << 62
LIES = {
    "overlap": {"a": entry([2], 0, 8), "b": entry([2], 4, 12)},
    "gap": {"a": entry([1], 0, 4), "b": entry([1], 8, 12)},
    "same place": {"a": entry([3], 0, 12), "b": entry([3], 0, 12)},
    "late start": {"a": entry([2], 4, 12)},
    "unused rest": {"a": entry([2], 0, 8)},
    "past the end": {"a": entry([4], 0, 16)},
    "backwards": {"a": entry([3], 12, 0)},
    "negative offset": {"a": entry([4], -4, 12)},
    "negative shape": {"a": entry([-3, -1], 0, 12)},
    "wrapping shape": {"a": entry([HUGE, 4], 0, 0), "b": entry([3], 0, 12)},
    "wrapping to size": {"a": entry([(1 << 64) + 3], 0, 12)},
    "huge with zero": {"a": entry([0, 1 << 64], 0, 0), "b": entry([3], 0, 12)},
    **{f"{shape} with a zero": {"a": entry(shape, 0, 0), "b": entry([3], 0, 12)}
       for shape in ([HUGE, 0], [1 << 40, 1 << 40, 0], [0, HUGE, HUGE])},
    "float shape": {"a": entry([3.0], 0, 12)},
    "true in shape": {"a": entry([3, True], 0, 12)},
    "shape too small": {"a": entry([2], 0, 12)},
    "deep shape": {"a": entry([1] * 17 + [3], 0, 12)},
    "unknown dtype": {"a": entry([3], 0, 12, "F31")},
    "dtype not text": {"a": {"dtype": ["F32"], "shape": [3], "data_offsets": [0, 12]}},
    "three offsets": {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 6, 12]}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 12]}},
    "extra key": {"a": entry([3], 0, 12) | {"more": 1}},
    "entry is a list": {"a": [1]},
    "a list": [1],
    "metadata": {"a": entry([3], 0, 12), "__metadata__": {"a": 1}},
    "twice": b'{"a":%s,"a":%s}' % ((json.dumps(entry([3], 0, 12)).encode(),) * 2),
    "shape twice": b'{"a":{"dtype":"F32","shape":[3],"shape":[3],"data_offsets":[0,12]}}',
    "not JSON": b"{",
    "not UTF-8": b'{"\xff":1}',
    "UTF-16": json.dumps({"a": entry([3], 0, 12)}).encode("utf-16"),
    "deep": b'{"a":' + b"[" * 100_000,
    "long number": b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,12]}}',
    "long name": {"n" * 100_000: entry([4], 0, 12)},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LIES))
def test_lies_are_refused_with_the_file_name(name: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", LIES[name], bytes(12))
    with pytest.raises(ModelError, match=r"model\.safetensors: ") as caught:
        open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 1000


def test_the_lies_differ_from_a_truth(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": entry([3], 0, 12), "__metadata__": {"a": "b"}}, bytes(12))
    assert open_checkpoint(tmp_path).tensor("a").tolist() == [0, 0, 0]


@pytest.mark.parametrize("length", [0, 1, 13, 100_000_001, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_header_length_is_checked_before_use(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"a":[]}    ')

    def refuse() -> None:
        with pytest.raises(ModelError, match=r"model\.safetensors: "):
            open_checkpoint(tmp_path)

    assert least_cpu_time(refuse, 1.0) < 1.0


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.randn(7), "b": torch.randn(3, 3)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            SafetensorsFile(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ModelError):
        SafetensorsFile(path)


def test_mutated_headers_never_crash(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(4, 4), "b": torch.randn(3).half(), "c": torch.ones(2, dtype=torch.int64)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    whole = (tmp_path / "m.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    good, rest = whole[8 : 8 + size], len(whole) - 8 - size
    dice = random.Random(7)
    pieces = [
        b"0",
        b"-1",
        b"9223372036854775807",
        b"18446744073709551616",
        b"1e9",
        b"[",
        b"]",
        b'"',
        b"{}",
        b"null",
        b"\xff",
    ]
    read = refused = 0
    for _ in range(100_000):
        header = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(header))
            kind = dice.randrange(4)
            if kind == 0:
                header[at] = dice.randrange(256)
            elif kind == 1:
                header[at : at + 1] = dice.choice(pieces)
            elif kind == 2:
                header[at] = dice.choice(b"0123456789")
            else:
                del header[at : at + dice.randint(1, 4)]
        try:
            entries = parse_header(bytes(header), rest)
        except ModelError:
            refused += 1
            continue
        read += 1
        assert sum(item.end - item.begin for item in entries.values()) == rest
        for item in entries.values():
            assert 0 <= item.begin <= item.end <= rest
    assert refused > 40_000 and read > 1000


def test_mutated_files_are_read_inside_their_bounds(tmp_path: Path) -> None:
    save_file({"a": torch.randn(4, 4), "b": torch.randn(3)}, tmp_path / "m.safetensors")
    whole = bytearray((tmp_path / "m.safetensors").read_bytes())
    path = tmp_path / "changed.safetensors"
    dice = random.Random(11)
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 2)):
            data[dice.randrange(len(data) - 76)] = dice.randrange(256)
        path.write_bytes(data)
        try:
            file = SafetensorsFile(path)
        except ModelError:
            continue
        for name in file.entries:
            file.tensor(name).view(torch.uint8).sum()


def shards(folder: Path, table: dict[str, str] | None = None) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.randn(2), "b": torch.randn(3), "c": torch.randn(4)}
    save_file({"a": tensors["a"], "b": tensors["b"]}, folder / "model-1.safetensors")
    save_file({"c": tensors["c"]}, folder / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table or names}))
    return tensors


def test_shards(tmp_path: Path) -> None:
    tensors = shards(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    assert all(same(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())
    (tmp_path / "model.safetensors.index.json").unlink()
    assert sorted(open_checkpoint(tmp_path).names()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "name",
    ["../model-2.safetensors", "/etc/passwd", "x/../model-2.safetensors", "..", "", ".", "a\\b", "sub/x", "a\0b"],
)
def test_shard_names_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shards(folder, {"a": "model-1.safetensors", "c": name})
    save_file({"c": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match="plain file name"):
        open_checkpoint(folder)


def test_links_of_a_download_cache_work(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    folder.mkdir()
    tensors = shards(blobs)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(Path("..") / "blobs" / path.name)
    assert same(open_checkpoint(folder).tensor("c"), tensors["c"])


def test_an_index_that_lies(tmp_path: Path) -> None:
    shards(tmp_path, {"a": "model-1.safetensors", "z": "model-2.safetensors"})
    with pytest.raises(ModelError, match="'z' in model-2"):
        open_checkpoint(tmp_path)
    shards(tmp_path, {"a": "model-9.safetensors"})
    with pytest.raises(ModelError, match="not in the folder"):
        open_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(ModelError, match="weight_map"):
        open_checkpoint(tmp_path)
    shards(tmp_path, {"a": "m" * 5000})
    with pytest.raises(ModelError, match="not in the folder") as caught:
        open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 1000
    first, second = (f'"a": "model-{number}.safetensors"' for number in (1, 2))
    for text in (
        f'{{"weight_map": {{{first}, {second}}}}}',
        f'{{"weight_map": {{{first}}}, "weight_map": {{{second}}}}}',
    ):
        index.write_text(text)
        with pytest.raises(ModelError, match=r"index\.json: '(a|weight_map)' is there twice, with two values"):
            open_checkpoint(tmp_path)


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="in both"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_the_index_forgets_is_read_all_the_same(tmp_path: Path) -> None:
    """A bias that a model may have or lack must not vanish in silence."""
    tensors = shards(tmp_path, {"a": "model-1.safetensors", "c": "model-2.safetensors"})
    assert same(open_checkpoint(tmp_path).tensor("b"), tensors["b"])
    shards(tmp_path, {"a": "model-1.safetensors", "c": "model-2.safetensors"})
    save_file({"b": torch.zeros(1), "c": tensors["c"]}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match="'b' is in both"):
        open_checkpoint(tmp_path)


def test_a_whole_file_beside_an_index_of_others_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = shards(tmp_path)
    open_checkpoint(tmp_path)
    assert not caplog.messages
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert same(open_checkpoint(tmp_path).tensor("a"), tensors["a"])
    assert len(caplog.messages) == 1 and "the file is not read" in caplog.messages[0]


def test_names_of_torchao_0_14(tmp_path: Path) -> None:
    """It wrote a matrix's parts behind a colon; later versions write them, and we read them, behind the module."""
    codes, scales, norm = torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1), torch.ones(4)
    old = {"a.b.weight:qdata": codes, "a.b.weight:scale": scales, "norm.weight:_data": norm, "other:name": norm + 1}
    save_file(old, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert sorted(found.names()) == ["a.b._weight_qdata", "a.b._weight_scale", "norm.weight", "other:name"]
    assert found.shape("a.b._weight_qdata") == (4, 8) and same(found.tensor("a.b._weight_scale"), scales)
    assert same(found.tensor("other:name"), norm + 1) and not found.has("norm.weight:_data")
    save_file({**old, "norm.weight": norm + 2}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"names of torchao 0\.14 and under later ones"):
        open_checkpoint(tmp_path)
