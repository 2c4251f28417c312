"""What a pool says of its blocks is what its holders say, whatever happens to them."""

from __future__ import annotations

import random

from tokenmill.kvcache.allocation import BlockTables, GroupLayout
from tokenmill.kvcache.blocks import BlockPool


def test_shared_blocks_are_counted() -> None:
    draw = random.Random(7)
    pool = BlockPool(40)
    pool.on_evict = pool.uncache
    held: list[int] = []
    most = 0
    for _ in range(4000):
        roll = draw.random()
        if roll < 0.35 and pool.available:
            (block,) = pool.take(1)
            held.append(block)
            if draw.random() < 0.5:
                pool.cache(block, object())
        elif roll < 0.6 and held:
            pool.share(draw.choice(held))
            held.append(draw.choice(held))
            pool.share(held[-1])
            pool.release([held[-1]])
        elif roll < 0.7 and pool.idle:
            held.append(draw.choice(list(pool.idle)))
            pool.share(held[-1])
        elif held:
            pool.release([held.pop(draw.randrange(len(held)))])
        held = [block for block in range(40) for _ in range(pool.refs[block])]
        assert pool.shared == sum(refs > 1 for refs in pool.refs)
        most = max(most, pool.shared)
    assert most > 3
    pool.release(held)
    assert pool.shared == pool.held == 0


def test_a_window_bounds_no_length() -> None:
    """A group with a window needs blocks for the window and one step, in a pool of its own or shared with others."""
    whole, narrow = GroupLayout(0), GroupLayout(1, 1024)
    step = {"block_size": 16, "step_tokens": 8192}
    least = (1024 + 8192) // 16 + 1
    assert BlockTables([whole, narrow], [10_000, least], **step).max_length() == 160_000
    assert BlockTables([whole, narrow], [10_000, least - 1], **step).max_length() == 16 * (least - 1)
    assert BlockTables([whole, GroupLayout(0, 1024)], [10_000 + least], **step).max_length() == 160_000
    assert BlockTables([whole, GroupLayout(0, 1024)], [100], **step).max_length() == 800
    assert BlockTables([whole, whole], [100], **step).max_length() == 800
