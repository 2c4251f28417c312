"""Decode steps that are recorded natively give the bytes of steps that are not; what cannot be recorded is not."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from tests.cpu.engine.engine_families_helpers import ALL, Family
from tests.cpu.engine.engine_same_bytes_helpers import stories
from tests.cpu.engine.engines import BACKENDS, exact, follow, greedy, open_llm, run

from tokenmill import LLM, SamplingParams
from tokenmill.engine.interfaces.prompts import make_request

pytestmark = pytest.mark.skipif("auto" not in BACKENDS, reason="no native module")


def tapes(llm: LLM, kind: int = 0):
    """Recordings of steps of one token a row (0) and of ragged ones (1)."""
    recorders = llm.engine.executor.runner.recorders
    return recorders[kind].recordings if recorders else None


def to_logits(llm: LLM) -> bool:
    return llm.engine.executor.runner.recorders[0].layout.to_logits


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int4"}, {"kv_dtype": "int8"}])
def test_recorded_steps_change_no_byte(tiny, options):
    requests = stories(16, 8)
    found = []
    for eager in (True, False):
        with open_llm(tiny, kernels="auto", enforce_eager=eager, **options) as llm:
            found.append(follow(llm, requests, None))
            if eager:
                assert tapes(llm) is None
            else:
                assert tapes(llm).possible and tapes(llm).made and to_logits(llm)
    for request in requests:
        assert exact(found[0][request.id]) == exact(found[1][request.id]), request


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16", "kv_dtype": "int8"}, {"speculative_config": {"method": "ngram"}},
    {"speculative_config": {"method": "ngram"}, "depth": 2}],
    ids=["plain", "bf16, int8 cache", "drafts", "drafts of the device"],
)  # fmt: skip
def test_ragged_steps_change_no_byte(tiny, options):
    """Text that a grammar forces, drafts and short prompts: rows with several tokens beside rows with one."""
    requests = [r for r in stories(24, 8) if r.params.prompt_logprobs is None]
    for i in range(24):
        pattern = ["((ab|cd)same[xy]){6}", "([a-c]{2}, and [xy]){5}", "(no [a-z]choice){4}"][i % 3]
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=i, structured_outputs={"regex": pattern})
        requests.append(make_request(f"s{i}", None, [7 + i] * (2 + i), params, arrival=float(i)))
    found, replays = [], 0
    for eager in (True, False):
        with open_llm(tiny, kernels="auto", enforce_eager=eager, max_num_seqs=6, **options) as llm:
            if not eager:
                ragged = tapes(llm, 1)

                def counted(key, layout, plan, ragged=ragged, replay=ragged.replay):
                    nonlocal replays
                    replays += key in ragged.made
                    return replay(key, layout, plan)

                ragged.replay = counted
            found.append(follow(llm, requests, random.Random(3)))
    assert replays > 5
    for request in requests:
        assert exact(found[0][request.id]) == exact(found[1][request.id]), request


def test_tables_grow_under_a_recording(tiny):
    """16 positions a block: what a recording gathers follows the rows' tables, short and long in turn."""
    params = greedy(40)
    prompts = [[5] * 20, [7] * 1100, [9] * 30]
    found = []
    for eager in (True, False):
        with open_llm(tiny, kernels="auto", enforce_eager=eager, max_model_len=2048) as llm:
            found.append([run(llm, [prompt], params)[0].outputs[0].token_ids for prompt in prompts])
            if not eager:
                assert [key[0] for key in tapes(llm).made] == [1]
    assert found[0] == found[1]


def test_more_rows_than_are_recorded(tiny, monkeypatch):
    """Counts above the limit, and those for which no room is left, are gathered natively and computed call by call."""
    monkeypatch.setattr("tokenmill.runner.single.MOST_ROWS", 2)
    prompts, params = [[i + 3] * (5 + i) for i in range(6)], [greedy(4 + 3 * i) for i in range(6)]
    found = []
    for eager in (True, False):
        with open_llm(tiny, kernels="auto", enforce_eager=eager, max_num_seqs=8) as llm:
            found.append([output.outputs[0].token_ids for output in run(llm, prompts, params)])
            if not eager:
                assert tapes(llm).possible and {key[0] for key in tapes(llm).made} <= {1, 2}
                assert len(tapes(llm).seen) > 2
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "deepseek-v2", "qwen3"])
def test_families_with_and_without_recordings(family, tmp_path):
    made = Family(ALL[family], tmp_path)
    found = []
    for eager in (True, False):
        with made.open(kernels="auto", enforce_eager=eager) as llm:
            params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
            outputs = run(llm, made.prompts[:1], params)
            found.append([exact(output) for output in outputs])
            if not eager and family == "qwen3":
                assert tapes(llm).made
            if not eager and family == "gpt-oss":  # experts are chosen by torch
                assert not tapes(llm).possible and not tapes(llm).made
    assert found[0] == found[1]


@pytest.mark.parametrize("read", [False, True], ids=["by torch", "on the host"])
def test_logits_that_are_no_native_product(tiny, monkeypatch, read):
    """What torch caps is part of the recording; where numbers are read on the host, the head follows it."""
    found = []
    for eager in (True, False):
        with open_llm(tiny, kernels="auto", enforce_eager=eager) as llm:
            model = llm.engine.executor.runner.model
            model.softcap = 3.0
            if read:
                head = model.logits
                monkeypatch.setattr(model, "logits", lambda h, ctx, head=head: torch.tensor(head(h, ctx).tolist()))
            params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
            found.append([exact(output) for output in run(llm, [[1, 2, 3]], params)])
            if not eager:
                assert tapes(llm).possible and tapes(llm).made and to_logits(llm) != read
    assert found[0] == found[1]


def test_a_broken_input_is_still_refused(tiny):
    with open_llm(tiny, kernels="auto") as llm, torch.inference_mode():
        run(llm, [[1, 2, 3]], greedy(8))
        ((made, replay),) = [v for key, v in tapes(llm).made.items() if key[0] == 1]
        rows = llm.engine.executor.runner.rows
        rows.tokens.fill_(10**6)
        with pytest.raises(ValueError, match="out of range"):
            replay()
        rows.tokens.fill_(1)
        rows.tables[0].fill_(2**30)
        with pytest.raises(ValueError, match="outside the pages"):
            replay()
        rows.computed.fill_(10**9)
        with pytest.raises(ValueError, match="beyond the row"):
            replay()
        assert torch.isfinite(made.hidden).all()


def test_recording_loads_no_compiler():
    """torch imports its compiler for whoever watches it and does not decline: a second's standstill, and its memory."""
    code = (
        "import sys, torch; from tokenmill.kernels.cpu.replay import _Watch\n"
        "with torch.inference_mode(), _Watch() as watch: torch.empty(2)\n"
        "assert watch.kept and 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
