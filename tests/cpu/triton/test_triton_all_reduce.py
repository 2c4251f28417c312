"""The sum over GPUs, one rank at a time: what the others push is put into its buffer before it looks."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.triton.all_reduce import BLOCK, EMPTY, SLOTS, push_sum

SIZE = 4 * BLOCK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (2, 3)])
def test_every_rank_adds_in_rank_order_and_leaves_empty_slots_behind(rank, ranks, dtype):
    torch.manual_seed(rank + ranks)
    buffers = torch.full((ranks, SLOTS, ranks, SIZE), EMPTY, dtype=torch.int16)
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
                buffers[rank, done[block] % SLOTS, peer, block * BLOCK : block * BLOCK + len(piece)] = bits
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
                sent = buffers[peer, done[block] % SLOTS, rank, block * BLOCK : block * BLOCK + len(piece)]
                assert torch.equal(sent.view(dtype), piece) and not (sent == EMPTY).any()
        for block in range(blocks):
            before = (done[block] + SLOTS - 1) % SLOTS
            assert (buffers[rank, before, :, block * BLOCK : (block + 1) * BLOCK] == EMPTY).all()
            done[block] += 1
    assert turns.tolist() == done
