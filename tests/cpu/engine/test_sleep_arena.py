"""Sleep on a GPU, with pages of the host in the device's place: addresses stay, pages go, and hold rubbish when new."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

import pytest
import torch
from tests.cpu.engine.engines import exact, greedy, open_llm, run

from tokenmill.core.errors import UserError
from tokenmill.device import arena
from tokenmill.device.arena import Arena, relocate
from tokenmill.engine.load import loading
from tokenmill.engine.load.inplace import held, weights_of
from tokenmill.engine.load.sleeping import DeviceBed
from tokenmill.testing.tiny import make_tiny

PROMPTS = [[1, 2, 3], [4, 5] * 12]


class HostPages:
    """Pages, as a device has them. What is not mapped may not be touched: the test process would end."""

    device = torch.device("cpu")
    granule = 1 << 16

    def __init__(self, room=1 << 40):
        self.room, self.areas, self.mapped, self.log = room, {}, {}, []
        self.libc = ctypes.CDLL(None, use_errno=True)

    def reserve(self, size):
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        found = torch.frombuffer(area, dtype=torch.uint8)
        address = found.data_ptr()
        self.areas[address] = (area, found)
        self._protect(address, size, 0)
        return address

    def free(self, address, size):
        self.areas.pop(address)

    def map(self, address, size):
        assert not size % self.granule and address not in self.mapped
        if sum(self.mapped.values()) + size > self.room:
            raise UserError("no room.")
        self._protect(address, size, 3)
        ctypes.memset(address, 0xFE, size)
        self.mapped[address] = size
        self.log.append(("map", size))

    def unmap(self, address, size):
        assert self.mapped.pop(address) == size
        self._protect(address, size, 0)
        self.log.append(("unmap", size))

    def tensor(self, address, size, owner):
        memory = (ctypes.c_char * size).from_address(address)
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)

    def wait(self):
        """The host is never behind."""

    def trim(self):
        """Nothing is cached."""

    def _protect(self, address, size, rights):
        assert not self.libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), rights)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(arena, "PIECE", 1 << 18)
    monkeypatch.setattr(arena, "HOST_PIECE", 1 << 17)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("sleeper"), hidden=64, heads=4, kv_heads=2)


@pytest.fixture
def beds(monkeypatch):
    made = []

    def make(config, device):
        made.append(DeviceBed(HostPages(), 1 << 28))
        return made[-1]

    monkeypatch.setattr(loading, "make_bed", make)
    return made


def said(llm, count=10):
    return [exact(output) for output in run(llm, PROMPTS, greedy(count, logprobs=2))]


@pytest.mark.parametrize("quantization", ["int8"] if not os.environ.get("TOKENMILL_RELIABILITY") else [None, "int4"])
def test_weights_and_cache_live_in_arenas(folder, beds, quantization):
    options = {"kernels": "reference", "quantization": quantization}  # native ones bind addresses while loading
    speculation = {"model": str(folder), "num_speculative_tokens": 2}
    with open_llm(folder, **options, speculative_config=speculation) as llm:
        bed, before = beds[0], said(llm)
        runner = llm.engine.executor.runner
        places = [t.data_ptr() for t in (*weights_of(runner.model), *runner.pool.storage)]
        first, last = bed.weights.address, bed.weights.address + bed.weights.used
        assert all(first <= t.data_ptr() < last for t in weights_of(runner.model))
        assert bed.cache.address == runner.pool.storage[0].data_ptr() and bed.beside.used, "the drafter has an arena"
        for level in (1, 1, 2, 1):
            llm.sleep(level)
            assert not bed.weights.pages.mapped, "all pages have been given back"
            assert bool(bed.weights.host_bytes) is (level == 1)
            llm.wake_up(["weights"])
            assert bed.cache.pieces == [] != bed.weights.pieces
            llm.wake_up()
            assert [t.data_ptr() for t in (*weights_of(runner.model), *runner.pool.storage)] == places
            assert said(llm) == before


def test_a_device_that_is_full_is_told_and_waking_can_be_tried_again(folder, beds):
    with open_llm(folder) as llm:
        before = said(llm)
        llm.sleep(1)
        pages = beds[0].weights.pages
        pages.room = 0
        for _ in range(2):
            with pytest.raises(UserError, match="no room"):
                llm.wake_up()
            assert llm.is_sleeping and not pages.mapped
        pages.room = 1 << 40
        llm.wake_up()
        assert said(llm) == before


def test_buffers_that_ranks_share_stay():
    from tokenmill.parallel.group import SoloGroup

    class Layer:
        __module__ = "tokenmill.layers.made_up"

    layer, group = Layer(), SoloGroup()
    layer.weight, layer.group, group.buffer = torch.ones(3), group, torch.ones(5)
    assert [each.numel() for each in held(layer, set())] == [3]


def test_views_move_with_their_storage():
    made = Arena(HostPages(), 1 << 22)
    whole = torch.arange(300_000, dtype=torch.float32)
    views = [whole, whole[1000:2000].view(10, 100), whole.view(300, 1000).t()]
    values = [view.clone() for view in views]
    other = torch.arange(7, dtype=torch.int8)
    assert relocate([*views, other], made) == whole.nbytes + 7
    assert views[1].data_ptr() == views[0].data_ptr() + 4000 and views[2].stride() == (1, 1000)
    assert other.data_ptr() % arena.ALIGN == 0
    made.save()
    made.drop()
    made.restore()
    assert all(torch.equal(view, value) for view, value in zip(views, values, strict=True))
    views[0][5] = -1
    made.changed()
    made.save()
    made.drop()
    made.restore()
    assert views[0][5] == -1
    with pytest.raises(UserError, match="larger than"):
        made.take(1 << 22)


def test_arenas_give_pages_back_when_nothing_names_them():
    pages = HostPages()
    made = Arena(pages, 1 << 20)
    part = made.take(100)
    assert pages.mapped
    del made
    assert pages.mapped, "a tensor keeps them"
    del part
    import gc

    gc.collect()
    assert not pages.mapped and not pages.areas


def test_structures_are_as_the_driver_lays_them_out():
    """cuda.h: CUmemAllocationProp is 32 bytes, with the location at 8; CUmemAccessDesc is 12."""
    assert ctypes.sizeof(arena._Properties) == 32 and arena._Properties.location.offset == 8
    assert arena._Properties.win32.offset == 16 and ctypes.sizeof(arena._Access) == 12
    made = arena._Properties(type=1, location=arena._Location(1, 3))
    assert struct.unpack_from("iiii", bytes(made)) == (1, 0, 1, 3)


def test_pages_that_may_not_be_used_are_given_back():
    """Else a second try would find them in its way, and the device would miss them."""
    called = []

    class Driver:
        def __getattr__(self, name):
            return lambda *given: called.append(name) or (2 if name == "cuMemSetAccess" else 0)

    pages = object.__new__(arena.CudaPages)
    pages.index, pages.properties, pages.cuda = 0, arena._Properties(), Driver()
    with pytest.raises(UserError, match="no room"):
        pages.map(1 << 21, 1 << 21)
    assert called == ["cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemUnmap"]
