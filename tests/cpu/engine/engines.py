"""What engine tests have in common: opening engines, comparing outputs bit for bit, and looking for leftovers."""

from __future__ import annotations

import importlib
import os
import random
from collections import deque
from pathlib import Path
from typing import Any

from tokenmill import LLM, SamplingParams
from tokenmill.core.drafting import AllOfThem
from tokenmill.core.request import Request, RequestOutput
from tokenmill.core.sequence import FINISHED
from tokenmill.engine.interfaces.outputs import Accumulator
from tokenmill.engine.steps.engine import Engine


def backends() -> list[str]:
    """Kernel backends of this machine."""
    try:
        importlib.import_module("tokenmill.kernels.cpu")
    except ImportError:
        return ["reference"]
    return ["reference", "auto"]


BACKENDS = backends()
USUAL, OTHER = (BACKENDS[0], BACKENDS[-1]) if os.environ.get("TOKENMILL_FAMILIES") else (BACKENDS[-1], BACKENDS[0])
"""The kernels of open_usual: the quick ones, for the reference takes several times as long. It has its
turn in tests for all BACKENDS, where OTHER is named, and everywhere with TOKENMILL_FAMILIES."""


def all_of_them(llm: LLM) -> LLM:
    """Every draft is made: the control looks at the time that steps take."""
    if most := llm.engine.scheduler.limits.max_guesses:
        llm.engine.scheduler.ahead.control = AllOfThem(most)
    return llm


def hear_guesses(llm: LLM, found: dict[tuple[int, ...], list[int]], *, sampled: bool = True) -> None:
    """`found` gets what the device's drafter guesses behind each text from now on; sampled: of sampling rows, too."""
    runner = llm.engine.executor.runner
    honest = runner.drafter.propose

    def propose(step: Any) -> None:
        honest(step)
        for row in step.row_list:
            known = int(step.rows.length[row])
            tokens = step.rows.tokens[row, : known + step.count].tolist()
            if sampled or runner.rows.sampling.params[row].temperature == 0:
                found[tuple(tokens[:known])] = tokens[known:]

    runner.drafter.propose = propose


def open_llm(folder: Path, **options: Any) -> LLM:
    """A small engine in float32."""
    options = {"dtype": "float32", "kernels": "reference", "max_num_seqs": 8, "max_model_len": 512, **options}
    if "num_blocks" not in options:
        options.setdefault("kv_cache_memory_bytes", 1 << 23)
    return LLM(model=str(folder), **options)


def open_usual(folder: Path, **options: Any) -> LLM:
    """The same with the quick kernels, for tests whose property does not depend on them."""
    return open_llm(folder, **{"kernels": USUAL, **options})


def greedy(count: int = 16, **more: Any) -> SamplingParams:
    """Greedy parameters for exactly `count` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=count, **{"ignore_eos": True, **more})


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    """Token id prompts (or any others) through `generate`, without a bar."""
    if prompts and isinstance(prompts[0], list):
        prompts = [{"prompt_token_ids": p} for p in prompts]
    return llm.generate(prompts, params, use_tqdm=False)


def follow(llm: LLM, requests: list[Request], rng: random.Random | None) -> dict[str, RequestOutput]:
    """Run requests that arrive at random steps (rng None: at once); -> outputs by request id."""
    found = {request.id: Accumulator(request) for request in requests}
    coming = deque(requests)
    while coming or llm.engine.has_work:
        while coming and (rng is None or rng.random() < 0.4):
            llm.driver.add(coming[0], found[coming.popleft().id].add)
        llm.driver.step()
    assert all(accumulator.finished for accumulator in found.values())
    return {name: accumulator.output() for name, accumulator in found.items()}


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of every output of every request."""
    return [[o.token_ids for o in out.outputs] for out in outputs]


def exact(output: RequestOutput) -> list[Any]:
    """Everything that must not depend on company, as plain data; floats compare by their bits."""
    found: list[Any] = []
    for o in output.outputs:
        found.append((o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason, _plain(o.logprobs)))
    return [*found, _plain(output.prompt_logprobs)]


def _plain(rows: Any) -> Any:
    if rows is None:
        return None
    return [row and [(t, lp.logprob.hex(), lp.rank, lp.decoded_token) for t, lp in row.items()] for row in rows]


def check_nothing_left(engine: Engine) -> None:
    """No request, row, block or draft index survives; the prefix cache alone may keep blocks, and gives them back."""
    scheduler, roster = engine.scheduler, engine.scheduler.roster
    assert not engine.has_work and not engine.flying and not scheduler.flying
    assert not roster.groups and not roster.running
    assert all(seq.status == FINISHED for _, _, seq in roster.waiting)
    assert sorted(roster.free_rows) == list(range(scheduler.limits.max_rows))
    assert not getattr(roster.drafter, "indexes", {})
    tables = scheduler.tables
    assert [pool.held for pool in tables.pools] == [0] * len(tables.pools)
    tables.cache.clear()
    assert [len(pool.stack) for pool in tables.pools] == [pool.num_blocks for pool in tables.pools]
