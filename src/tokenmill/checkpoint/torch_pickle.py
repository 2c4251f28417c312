"""What a torch file may make torch do while it is opened. Owns: refusing, before torch sees the file, what a table of
tensors does not need.

torch runs no code of a file, but a few bytes may still ask it for any amount of memory (an archive that is compressed,
`bytearray(10**12)`) or time (a key of tuples in tuples, whose hash takes as long as its text). So the opcodes are gone
through here with nothing but the kinds of what lies on the stack. Must not know: torch, models.
"""

from __future__ import annotations

import mmap
import pickletools
import tarfile
import zipfile
from typing import Any, BinaryIO

from tokenmill.core.errors import ModelError

_STORAGE = "torch.storage UntypedStorage"
_CALLED = frozenset(
    f"torch._utils {name}" for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
                                        "_rebuild_parameter", "_rebuild_meta_tensor_no_storage",
                                        "_rebuild_sparse_tensor")
) | {"torch Size", "torch.serialization _get_layout", "torch device"}  # fmt: skip
"""Functions from whose arguments nothing larger is made than the file holds, or what is refused afterwards."""
_TABLE = "collections OrderedDict"
_TEXT, _TUPLE, _EMPTY, _OTHER, _MARK = "text", "tuple", "empty tuple", "other", "mark"
"""Kinds. A global's kind is its name, which has a space."""
_PUSHED = {
    "BINUNICODE": _TEXT, "SHORT_BINSTRING": _TEXT, "EMPTY_TUPLE": _EMPTY, "MARK": _MARK,
    **dict.fromkeys(("NONE", "NEWFALSE", "NEWTRUE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "BININT", "BININT1",
                     "BININT2", "BINFLOAT", "LONG1"), _OTHER),
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_OLD_PICKLES = 5
"""A file from before torch 1.6: a magic number, a version, facts about the machine, the table, the storages' keys."""


def check_torch_file(file: BinaryIO, *, zipped: bool) -> int | None:
    """Refuse what a table of tensors does not need. A ModelError (without the file's name) says what it is. Returns how
    many storages an old file fills: torch leaves others as it found the memory. None: each is looked for."""
    try:
        if not zipped:
            return _check_old(file)
        _check_archive(file)
        return None
    except ModelError:
        raise
    except (ValueError, IndexError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise ModelError(f"not a usable torch file ({str(error)[:200]}); download it again") from error


def _check_archive(file: BinaryIO) -> None:
    """torch.save compresses nothing, so what is read from an archive is never larger than the file."""
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(each.compress_type != zipfile.ZIP_STORED or each.file_size != each.compress_size for each in entries):
            raise ModelError("its archive is compressed, as torch.save never writes one; unpack it and save it anew")
        if sum(each.file_size for each in entries) > size or len({each.filename for each in entries}) < len(entries):
            raise ModelError("its archive names more bytes than there are, or a part twice: it is damaged")
        for each in entries:
            if each.filename.endswith("data.pkl"):
                with archive.open(each) as stream:
                    _check_pickle(stream)


def _check_old(file: BinaryIO) -> int:
    file.seek(0)
    if tarfile.is_tarfile(file):
        raise ModelError("is a tar archive, as torch wrote them before 0.1.10; save it anew")
    # A read beyond the end of a map gives what is there, so no length that the file claims is ever taken.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
        for _ in range(_OLD_PICKLES - 1):
            _check_pickle(stream)
        return len(_check_pickle(stream))


def _check_pickle(stream: Any) -> set[str]:
    """Go through one pickle, and return its texts. stream: what can be read, line by line, too."""
    stack: list[str] = []
    texts: set[str] = set()
    memo: dict[Any, str] = {}
    for code, value, _ in pickletools.genops(stream):
        name = code.name
        if name in _PUSHED:
            stack.append(_PUSHED[name])
            if _PUSHED[name] == _TEXT:
                texts.add(str(value))
        elif name == "GLOBAL":
            stack.append(_global(str(value)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name in _TUPLES:
            del stack[-_TUPLES[name] :]
            stack.append(_TUPLE)
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items = _to_mark(stack)
            if name == "TUPLE":
                stack.append(_TUPLE)
            elif name == "SETITEMS":
                _check_keys(items[::2])
        elif name == "SETITEM":
            _check_keys([stack[-2]])
            del stack[-2:]
        elif name in ("APPEND", "BUILD"):
            stack.pop()
        elif name == "BINPERSID":
            stack[-1] = _OTHER
        elif name == "REDUCE":
            arguments = stack.pop()
            stack[-1] = _made(stack[-1], arguments)
        elif name not in ("PROTO", "STOP"):
            raise ModelError(f"has the instruction {name}, which a table of tensors does not need")
    return texts


def _global(said: str) -> str:
    """The kind of what a module's name stands for."""
    module = said.rpartition(" ")[0]
    if said in _CALLED or said in (_TABLE, _STORAGE) or module in ("torch", "torch.cuda"):
        return said
    raise _no_need(said)


def _made(function: str, arguments: str) -> str:
    """The kind of what a function returns."""
    if function in _CALLED or (function == _TABLE and arguments == _EMPTY):
        return _OTHER
    raise _no_need(function)


def _no_need(said: str) -> ModelError:
    return ModelError(
        f"is damaged, or would run code while it is loaded, which is never done: it asks for "
        f"{said.replace(' ', '.')[:80]}; convert the weights to safetensors where you trust them"
    )


def _to_mark(stack: list[str]) -> list[str]:
    at = len(stack) - 1 - stack[::-1].index(_MARK)
    items = stack[at + 1 :]
    del stack[at:]
    return items


def _check_keys(kinds: list[str]) -> None:
    if _TUPLE in kinds:
        raise ModelError("has an entry whose name is a tuple: it must hold a table of named tensors")
