"""Every family of the table against Transformers in float32, each with the twists that real checkpoints have, and the
same bytes however its sequences are computed."""

from __future__ import annotations

import os

import pytest
import torch
from family_cases import ALL, FAMILIES
from parity import load, ours, theirs
from test_families import prompt

from tokenmill.kernels.reference import ReferenceKernels

FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
STEPS = [[("a", 7)], [("b", 1), ("a", 40)], [("a", 1), ("b", 2)]] + [[("a", 1)]] * 5 + [[("a", 27)]]


def equal(name: str, folder, backend) -> None:
    """Logits within 1e-4 of Transformers', and the same bytes in chunks and in company."""
    case = ALL[name]
    reference, config, tensors = case.make(folder)
    model = load(config, tensors, max_positions=case.longest, kernels=backend)
    prompts = {"a": prompt(80), "b": prompt(3, 2)}
    whole = {k: ours(model, {k: v}, [[(k, len(v))]], backend)[k] for k, v in prompts.items()}
    for key, tokens in prompts.items():
        expected = theirs(reference, tokens)
        assert expected.std() > 0.03
        assert (whole[key] - expected).abs().max() <= 1e-4, key
    for key, logits in ours(model, prompts, STEPS, backend).items():
        assert torch.equal(logits, whole[key]), key


@pytest.mark.parametrize("name", ALL)
def test_same_logits_and_same_bytes(name, backend, tmp_path):
    if type(backend) is ReferenceKernels and not FULL and not name.endswith("-0"):
        pytest.skip("only with TOKENMILL_FAMILIES=1")
    equal(name, tmp_path, backend)


def test_every_family_has_three_twists():
    assert all(len(cases) >= 3 for cases in FAMILIES.values())
