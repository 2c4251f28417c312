"""Ranks that torch connects choose among their own words as ranks with shared memory do.

Processes of their own are slow to start: TOKENMILL_RELIABILITY=1 runs this."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.core.config import LINKS

SCRIPT = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[4])
from tests.cpu.sampling.test_shards import KINDS, ask_of, lines, table_of
from tokenmill.compute.model import Words
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.parallel.distributed import TorchGroup, World
from tokenmill.parallel.stages import Place
from tokenmill.sampling.choose import choose

rank, ranks, meeting, vocab = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], 960
group = TorchGroup(World(meeting, Place(), rank, ranks, "cpu"), exact=True)
words = Words(group, rank * vocab // ranks, vocab // ranks)
for params in KINDS.values():
    rows, table, kernels = [i % len(params) for i in range(24)], table_of(params, vocab), ReferenceKernels()
    logits = lines(24, vocab)
    wanted = choose(logits.clone(), ask_of(rows, 24), table, kernels)[1]
    part = logits[:, words.first : words.first + words.count].clone()
    found = choose(part, ask_of(rows, 24), table, kernels, words)[1]
    good = wanted >= 0
    assert torch.equal(found >= 0, good) and torch.equal(found[good], wanted[good])
print("alike", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(os.environ.get("TOKENMILL_RELIABILITY") != "1", reason="long: set TOKENMILL_RELIABILITY=1")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_over_gloo_choose_what_the_whole_does(ranks: int, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[3])
    made = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(ranks), str(tmp_path / "meeting"), root],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **LINKS},
        )
        for rank in range(ranks)
    ]
    assert [each.communicate(timeout=120)[0].strip() for each in made] == ["alike"] * ranks
