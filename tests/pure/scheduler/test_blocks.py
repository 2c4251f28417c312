"""What a pool says of its blocks is what its holders say, whatever happens to them."""

from __future__ import annotations

import random

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
