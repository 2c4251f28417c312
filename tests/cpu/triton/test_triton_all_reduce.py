"""The sum over GPUs, one rank at a time: what the others push is put into its buffer before it looks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.compute.forward import NormSpec
from tokenmill.compute.model import Addition
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.kernels.triton import all_reduce, arrived
from tokenmill.kernels.triton.all_reduce import BLOCK, EMPTY, SLOTS, push_norm, push_sum
from tokenmill.kernels.triton.arrived import add_arrived
from tokenmill.parallel.exchanged import MOST_PIECES
from tokenmill.parallel.exchanged import SLOTS as ROOMS

SIZE = 4 * BLOCK


def place(peer: int, rank: int) -> int:
    """Which place within a slot of rank's is for what peer sends."""
    return peer - (peer > rank)


@pytest.fixture(params=[None, 16], ids=["a program each", "one program"])
def programs(request, monkeypatch):
    """How many warps the device holds."""
    if request.param is not None:
        monkeypatch.setattr(all_reduce, "RESIDENT_WARPS", request.param)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (2, 3)])
def test_every_rank_adds_in_rank_order_and_leaves_empty_slots_behind(rank, ranks, dtype):
    torch.manual_seed(rank + ranks)
    buffers = torch.full((ranks, SLOTS, ranks - 1, SIZE), EMPTY, dtype=torch.int16)
    addresses = torch.tensor([each.data_ptr() for each in buffers])
    turns = torch.zeros(SIZE // BLOCK, dtype=torch.int32)
    done = [0] * (SIZE // BLOCK)
    for call, count in enumerate((BLOCK + 7, SIZE, 5, BLOCK + 7, 2 * BLOCK, SIZE, SIZE)):
        parts = torch.randn(ranks, count).to(dtype)
        parts[:, 1] = -0.0
        blocks = -(-count // BLOCK)
        for peer in range(ranks):
            for block in range(blocks if peer != rank else 0):
                piece = parts[peer, block * BLOCK : (block + 1) * BLOCK]
                bits = torch.where(piece == 0.0, torch.zeros_like(piece), piece).view(torch.int16)
                buffers[rank, done[block] % SLOTS, place(peer, rank), block * BLOCK : block * BLOCK + len(piece)] = bits
        residual = torch.randn(count).to(dtype) if call % 2 else None
        found = push_sum(parts[rank].clone(), residual, addresses, turns, rank, SIZE, pdl=False)
        total = torch.zeros(count)
        for part in parts:
            total += part.float()
        total = total if residual is None else total + residual.float()
        if dtype == torch.float16:
            assert torch.equal(found, total.half())
        else:  # the interpreter cuts off what a GPU rounds
            torch.testing.assert_close(found.float(), total, rtol=2**-7, atol=0.0)
        for peer in range(ranks):  # what was pushed to them, into the slot whose turn it was
            for block in range(blocks if peer != rank else 0):
                piece = parts[rank, block * BLOCK : (block + 1) * BLOCK]
                sent = buffers[peer, done[block] % SLOTS, place(rank, peer), block * BLOCK : block * BLOCK + len(piece)]
                assert torch.equal(sent.view(dtype), piece) and not (sent == EMPTY).any()
        for block in range(blocks):
            before = (done[block] + SLOTS - 1) % SLOTS
            assert (buffers[rank, before, :, block * BLOCK : (block + 1) * BLOCK] == EMPTY).all()
            done[block] += 1
    assert turns.tolist() == [count % SLOTS for count in done], "a count of calls would overflow"


def sent(parts: torch.Tensor) -> torch.Tensor:
    """The bits of what a rank pushes."""
    return torch.where(parts == 0.0, torch.zeros_like(parts), parts).view(torch.int16)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("scale", "within"), [(1.0, False), (0.5, True), (1.0, True), (0.5, False)])
@pytest.mark.parametrize(("rank", "ranks", "unadded"), [(0, 2, 0), (2, 3, 0), (1, 2, 3)])
def test_a_row_comes_with_its_norm_and_shares_turns_with_plain_sums(rank, ranks, unadded, scale, within):
    """unadded: this rank's rows lie in so many parts of a sum."""
    torch.manual_seed(rank)
    kernels, norm = ReferenceKernels(), NormSpec(torch.randn(1300), 1e-5, "layer", torch.randn(1300), offset=1.0)
    inner = NormSpec(torch.randn(1300), 1e-6) if within else None
    buffers = torch.full((ranks, SLOTS, ranks - 1, SIZE), EMPTY, dtype=torch.int16)
    addresses = torch.tensor([each.data_ptr() for each in buffers])
    turns = torch.zeros(SIZE // BLOCK, dtype=torch.int32)
    done = [0] * (SIZE // BLOCK)
    for rows in (1, 0, 2, 0, 2, 1):  # 0: a sum of one block between them, so that blocks of a row differ in turns
        parts = torch.randn(ranks, rows or 1, 1300 if rows else 700).half()
        parts[:, :, 1] = -0.0
        pieces = [
            (2 * row + i, row, slice(i * BLOCK, min((i + 1) * BLOCK, 1300))) for row in range(rows) for i in (0, 1)
        ]
        pieces = pieces or [(0, 0, slice(0, 700))]
        for peer in range(ranks):
            for block, row, at in pieces if peer != rank else ():
                slot = buffers[rank, done[block] % SLOTS, place(peer, rank), block * BLOCK : (block + 1) * BLOCK]
                slot[: at.stop - at.start] = sent(parts[peer, row, at])
        x, around = parts[rank].clone(), (addresses, turns, rank, SIZE)
        if unadded and rows:
            x = torch.randn(unadded, rows, 1300)
            x[:, :, 1] = -0.0
            parts[rank] = x.sum(0).half()
        total = sum(part.float() for part in parts)
        if rows:
            residual = torch.randn(rows, 1300).half()
            found = push_norm(x, residual, norm, scale, inner, *around, pdl=False)
            if inner is None and scale == 1.0:  # rounded once
                plain = (total + residual.float()).half()
                wanted = plain, kernels.norm(plain, norm)
            else:
                wanted = kernels.add_norm(residual, total.half(), norm, scale, within=inner)
            assert torch.allclose(found[0], wanted[0], atol=2e-3) and torch.allclose(found[1], wanted[1], atol=2e-2)
        else:
            assert torch.equal(push_sum(x, None, *around, pdl=False), total.half())
        for block, row, at in pieces:
            for peer in range(ranks):
                if peer != rank:
                    there = buffers[peer, done[block] % SLOTS, place(rank, peer), block * BLOCK : (block + 1) * BLOCK]
                    assert torch.equal(there[: at.stop - at.start], sent(parts[rank, row, at]))
            before = (done[block] + SLOTS - 1) % SLOTS
            assert (buffers[rank, before, :, block * BLOCK : (block + 1) * BLOCK] == EMPTY).all()
            done[block] += 1
    assert turns.tolist() == [count % SLOTS for count in done], "a count of calls would overflow"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_longer_than_a_slot_takes_several_launches(ranks, normed):
    """Two, as the third would need what the others push when they have seen the second."""
    torch.manual_seed(ranks)
    buffers = torch.full((ranks, SLOTS, ranks - 1, SIZE), EMPTY, dtype=torch.int16)
    addresses = torch.tensor([each.data_ptr() for each in buffers])
    turns = torch.zeros(SIZE // BLOCK, dtype=torch.int32)
    parts, residual = torch.randn(ranks, 7, BLOCK).half(), torch.randn(7, BLOCK).half()
    for peer in range(1, ranks):
        bits = sent(parts[peer]).view(-1)
        buffers[0, 0, place(peer, 0)] = bits[:SIZE]
        buffers[0, 1, place(peer, 0), : len(bits) - SIZE] = bits[SIZE:]
    total = parts.float().sum(0) + residual.float()
    around = addresses, turns, 0, SIZE
    if normed:
        norm = NormSpec(torch.randn(BLOCK), 1e-5)
        found, also = push_norm(parts[0], residual, norm, 1.0, None, *around, pdl=False)
        assert torch.allclose(also, ReferenceKernels().norm(total.half(), norm), atol=2e-2)
    else:
        found = push_sum(parts[0], residual, *around, pdl=False)
    assert torch.allclose(found, total.half(), atol=2e-3)
    assert turns.tolist() == [2, 2, 2, 1]
    assert torch.equal(buffers[1, 0, 0], sent(parts[0]).view(-1)[:SIZE])
    assert torch.equal(buffers[1, 1, 0, : 3 * BLOCK], sent(parts[0]).view(-1)[SIZE:])


@pytest.mark.parametrize("turn", [5, -(1 << 31)])
@pytest.mark.parametrize(("rows", "width"), [(3, 96), (11, 40)])
def test_what_has_arrived_is_added_and_normed(rows, width, turn, monkeypatch):
    """A number that has wrapped around counts as later."""
    monkeypatch.setattr(arrived, "MOST_PROGRAMS", 4)
    mine, theirs, residual = (torch.randn(rows, width).half() for _ in range(3))
    turns = torch.tensor([turn], dtype=torch.int32)
    weight, bias = torch.randn(2, width).half()
    layer = NormSpec(weight, 1e-5, kind="layer", bias=bias)
    for norm, scale, within in (
        (None, 1.0, None), (NormSpec(weight, 1e-5), 1.0, None), (layer, 1.0, None), (None, 0.3, None),
        (layer, 1.0, NormSpec(bias, 1e-5, offset=1.0)), (None, 0.3, layer),
    ):  # fmt: skip
        out, normed = torch.empty_like(mine), None if norm is None else torch.empty_like(mine)
        both = (mine.float() + theirs.float()).half()
        wanted = ReferenceKernels().add(residual, both, scale, within=within)
        if within is None and scale == 1.0:
            wanted = (mine.float() + theirs.float() + residual.float()).half()
        for asked in (turn, turn - 1 if turn > 0 else (1 << 31) - 1):
            addition = Addition(norm, scale, within)
            add_arrived(mine, theirs, turns, asked, residual, addition, out, normed, pdl=False)
            assert (out - wanted).abs().max() <= (0.0 if within is None else 0.01)
            if norm is not None:
                assert (normed.float() - ReferenceKernels().norm(out.float(), norm)).abs().max() <= 0.01


def _asked(streams: list[tuple[int, int]]) -> list[tuple[str, int]]:
    """What a rank does in order: ("send" or "read", number of a piece). streams: of (pieces, blocks that go through
    them piece by piece)."""
    asked, number, before = [], 0, []
    for pieces, blocks in streams:
        for block in range(1 + blocks):
            asked += [("read", piece) for piece in before] if not block else []
            sent = []
            for piece in range(pieces):
                asked += [("read", before[piece])] if block else []
                asked.append(("send", number))
                sent.append(number)
                number += 1
            before = sent
    return asked + [("read", piece) for piece in before]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(2, MOST_PIECES), st.integers(0, 3)), min_size=1, max_size=12))
def test_room_for_pieces_is_used_again_only_when_it_was_read(streams):
    """However far one rank is ahead of the other: it must wait for pieces that come after those were read."""
    asked = _asked(streams)
    for stop in range(len(asked) + 1):  # the other has come so far, and its copies have arrived at once
        sent = {number for what, number in asked[:stop] if what == "send"}
        read = {number for what, number in asked[:stop] if what == "read"}
        for what, number in asked:
            if what == "read" and number not in sent:
                break
            if what == "send" and number >= ROOMS:
                assert number - ROOMS in read
