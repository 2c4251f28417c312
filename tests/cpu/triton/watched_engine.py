"""An engine as it is on a GPU, without one: Triton's interpreter on a device made of the CPU, steps recorded, every
access to memory watched. A program, because such a device stays for the whole process.

python -m tests.cpu.triton.watched_engine FOLDER OPTIONS: options of LLM in JSON, and of the requests: `rows`, `tokens`
(to make), `lengths` (of prompts, in turn). Prints what was made, and how often each kernel was launched.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


def open_watched(folder: str, options: dict[str, Any]) -> Any:
    """An engine for the device."""
    from tests.cpu.triton.fake_graph import FakeRecorder  # in this order: it, too, stands between a launch and Triton

    from tokenmill import LLM
    from tokenmill.engine.load import loading
    from tokenmill.kernels.triton import TritonKernels
    from tokenmill.runner import replays, runner

    def make_kernels(device: str, *, steady: bool, without: Collection[str], **_: object) -> TritonKernels:
        return TritonKernels(steady=steady, without=without)

    for module, name, other in (
        (loading, "make_kernels", make_kernels),
        (loading, "records", lambda device: True),
        (replays, "Recorder", FakeRecorder),
        (runner, "Recorder", FakeRecorder),
    ):
        setattr(module, name, other)
    return LLM(model=folder, device="fake", dtype="float32", kv_cache_memory_bytes=1 << 20, depth=2, **options)


def main() -> None:
    """Prompts of several lengths, twice."""
    from tests.cpu.engine.fake_device import FakeTensor, install

    install()
    from tests.cpu.triton.bounds import Bounds
    from tests.cpu.triton.conftest import _repair_interpreter

    _repair_interpreter()
    with Bounds(lambda x: x.inner if isinstance(x, FakeTensor) else x).watching() as bounds:
        print(json.dumps({**answers(sys.argv[1], json.loads(sys.argv[2])), "launches": bounds.launches}))


def answers(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Tokens of both rounds, and counters."""
    from tokenmill import SamplingParams
    from tokenmill.core.drafting import AllOfThem

    rows, most, lengths = options.pop("rows"), options.pop("tokens"), options.pop("lengths")
    with open_watched(folder, options) as llm:
        if options.get("speculative_config"):
            llm.engine.scheduler.ahead.control = AllOfThem(options["speculative_config"]["num_speculative_tokens"])
        prompts = [{"prompt_token_ids": [3 + i] * lengths[i % len(lengths)]} for i in range(rows)]
        params = [
            SamplingParams(
                temperature=0.8 * (i % 2), top_p=0.9 if i % 3 else 1.0, seed=i, max_tokens=most, ignore_eos=True
            )
            for i in range(rows)
        ]
        found = [[o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] for _ in range(2)]
        counters = llm.engine.scheduler.counters
        assert counters.failures == 0
        return {"tokens": found, "drafted": counters.drafted, "accepted": counters.accepted}


if __name__ == "__main__":
    main()
