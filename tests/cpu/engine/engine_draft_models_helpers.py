"""What test_engine_draft_models.py and other tests share."""

from __future__ import annotations

import json

import pytest
from tests.cpu.engine.drafters import MOST, make_eagle, make_medusa
from tests.cpu.engine.engines import greedy, run
from tests.cpu.engine.engines import open_usual as open_llm

from tokenmill import SamplingParams
from tokenmill.testing.tiny import make_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The target; another model with other heads and layers; random Medusa heads; heads in FasterDecoding's form."""
    root = tmp_path_factory.mktemp("drafting")
    target = make_tiny(root / "target")
    other = make_tiny(root / "other", hidden=32, heads=2, kv_heads=1, layers=1, architecture="llama", seed=1)
    medusa = make_medusa(root / "medusa")
    eagle3 = make_eagle(root / "eagle3", words=100)
    return {"self": target, "other": other, "medusa": medusa, "eagle3": eagle3, "eagle": make_eagle(root / "eagle")}


def drafts(folders, name, **more):
    """--speculative-config of one of the drafters."""
    method = {} if name in ("self", "other") else {"method": name}
    model = {"model": str(folders[name])} if name in folders else {}
    return {"speculative_config": {**method, **model, "num_speculative_tokens": MOST, **more}}


def plain_outputs(folder, prompts, parameters):
    """A function that gives the outputs without drafts, by the options that may change them."""
    known = {}

    def outputs(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            with open_llm(folder, **options, enforce_eager=True) as llm:
                known[key] = run(llm, prompts, parameters)
        return known[key]

    return outputs


STEM = [5, 9, 200, 17, 5, 9, 200, 17, 33, 5, 9]
PROMPTS = [STEM + tail for tail in ([], [8], [1, 2, 3, 1, 2], [9] * 20)] * 2
PARAMETERS = [
    greedy(24, logprobs=1),
    greedy(25, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0.9, seed=3, max_tokens=24, n=3, ignore_eos=True),
    SamplingParams(temperature=0.4, top_k=8, seed=5, max_tokens=19, logprobs=2, ignore_eos=True),
] * 2
