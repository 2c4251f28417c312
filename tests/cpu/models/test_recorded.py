"""Every family's decode steps are recorded natively, and a recording computes what the calls do, byte for byte. Where
an index chooses keys they are not: plain torch chooses, and reads lengths on the host."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.models.families_helpers import CASES, prompt
from tests.cpu.models.family_cases import ALL
from tests.cpu.models.parity import load

pytest.importorskip("tokenmill._native", reason="the native kernels were not built")

FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
EVERY = {**CASES, **ALL}
FIRST = [name for name in EVERY if FULL or name in CASES or name.endswith("-0")]
WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
          "intermediate_size", "intermediate_size_mlp", "shared_intermediate_size")  # fmt: skip
"""Native experts are as wide as some tiles; real ones are. Others are computed by torch, and not recorded."""


INDEXED = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")


def widened(case):
    """The case with widths that native experts take."""
    made = copy.deepcopy(case)
    for name in WIDTHS:
        if isinstance(getattr(made.config, name, None), int) and getattr(made.config, name):
            setattr(made.config, name, 64)
    if hasattr(made.config, "ffn_config"):
        made.config.ffn_config.ffn_hidden_size = 64
    return made


@pytest.mark.parametrize("name", FIRST)
def test_steps_are_recorded(name, tmp_path):
    from tokenmill.kernels.cpu import CpuKernels

    case, kernels = widened(EVERY[name]), CpuKernels()
    _, config, tensors = case.make(tmp_path)
    room = torch.zeros(1 << 22, dtype=torch.uint8)
    with torch.inference_mode():
        model = load(config, tensors, max_positions=case.longest, kernels=kernels)
        tokens, calls, found = torch.tensor([5, 6]), [], []
        for _ in range(2):
            batch = PagedBatch(model.spec.kv_specs, kernels, states=model.spec.states)
            for key, count in (("a", 20), ("b", 3)):
                model.forward(torch.tensor(prompt(count)), batch.step([(key, count)]))
            ctx = batch.step([("a", 1), ("b", 1)])
            calls.append(lambda ctx=ctx: model.logits(model.forward(tokens, ctx), ctx))
        for computing in (lambda: kernels.record(calls[0], room), lambda: (calls[1](), None)):
            tokens.copy_(torch.tensor([5, 6]))
            made, again = computing()
            found.append([made.clone()])
            for last in ([9, 2], [1, 1]):
                tokens.copy_(torch.tensor(last))
                if again is None:
                    made = calls[1]()
                else:
                    again()
                found[-1].append(made.clone())
            if len(found) == 1:
                if name.startswith(INDEXED) and len(set(model.spec.kv_specs)) > 1:
                    assert again is None
                    return
                assert again is not None and again.spilled <= 1 << 12, "not recorded"
    assert not torch.equal(found[1][0], found[1][1])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_what_cannot_be_made_again_is_not_recorded():
    """Numbers that the host reads, shapes that numbers decide, chance."""
    from tokenmill.kernels.cpu import CpuKernels

    kernels, x = CpuKernels(), torch.arange(4.0)
    unknown = (lambda y: y * float(y[0]), lambda y: y[y > 1], lambda y: torch.tensor(y.tolist()), torch.rand_like,
               lambda y: torch.where(y > 1)[0], lambda y: torch.from_numpy(y.numpy() + 1), torch.bernoulli)  # fmt: skip
    with torch.inference_mode():
        for compute in unknown:
            assert kernels.record(lambda compute=compute: compute(kernels.add(x, x).clamp(0, 1)))[1] is None, compute
        made, again = kernels.record(lambda: (kernels.add(x, x) * 2).clamp(max=9.0), torch.zeros(512).byte())
        assert again is not None and again.spilled == 0
        x.fill_(1.5)
        again()
        assert made.tolist() == [6.0] * 4
        assert kernels.record(lambda: kernels.add(x, x) * 2, torch.zeros(64).byte())[1].spilled == 16
