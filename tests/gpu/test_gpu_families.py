"""Every family on the device in bfloat16 against plain torch in float32, from the same weights.

The measure is ReferenceKernels in float32, which tests/cpu/models holds against Transformers; their own bfloat16 run
shows what the type costs. So an older Transformers on the machine, or one that cannot run a family, does not matter.
"""

from __future__ import annotations

import pytest
import torch

hf = pytest.importorskip("transformers")
from tests.cpu.kernels.paged_batch import PagedBatch  # noqa: E402
from tests.cpu.models.config_types_helpers import LACKING  # noqa: E402
from tests.cpu.models.families_helpers import CASES as OTHERS  # noqa: E402
from tests.cpu.models.families_helpers import prompt as random_prompt  # noqa: E402
from tests.cpu.models.family_cases import FAMILIES  # noqa: E402
from tests.cpu.models.parity import DictCheckpoint, make  # noqa: E402

from tokenmill.kernels.reference import ReferenceKernels  # noqa: E402
from tokenmill.models.registry import build_model  # noqa: E402

LLAMA = hf.LlamaConfig(vocab_size=67, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
                       num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
QWEN3 = hf.Qwen3Config(vocab_size=67, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
CASES = {**OTHERS, **{f"{name} of the table": several[0] for name, several in FAMILIES.items()}}
STEPS = [[("a", 40), ("b", 3)], [("a", 1), ("b", 1)], [("a", 1), ("b", 60)], [("a", 1)], [("a", 37)]]


def errors(found, exact):
    """Relative error of each position [T]."""
    return (found - exact).norm(dim=-1) / exact.norm(dim=-1)


def logits_of(case, config, tensors, kernels, dtype, prompts):
    """Logits [T, vocab] of each sequence, computed in STEPS."""
    model = build_model(
        config, DictCheckpoint({k: v.to("cuda", dtype) for k, v in tensors.items()}), dtype=dtype, device="cuda",
        kernels=kernels, max_positions=None if case is None else case.longest,
    )  # fmt: skip
    batch = PagedBatch(model.spec.kv_specs, kernels, dtype=dtype, device="cuda", states=model.spec.states)
    done, out = dict.fromkeys(prompts, 0), {name: [] for name in prompts}
    for grants in STEPS:
        tokens = [t for name, n in grants for t in prompts[name][done[name] : done[name] + n]]
        context = batch.step(grants)
        logits = model.logits(model.forward(torch.tensor(tokens, device="cuda"), context), context).float().cpu()
        at = 0
        for name, n in grants:
            out[name].append(logits[at : at + n])
            at, done[name] = at + n, done[name] + n
    return {name: torch.cat(parts) for name, parts in out.items()}


def test_every_type_is_there():
    if LACKING:
        pytest.skip(f"this Transformers lacks {', '.join(LACKING)}")


@pytest.mark.parametrize("name", ["llama", "qwen3", *CASES])
def test_logits(name, tmp_path):
    from tokenmill.kernels.triton import TritonKernels

    own = {"llama": LLAMA, "qwen3": QWEN3}
    case = CASES.get(name)
    try:
        _, config, tensors = make(
            own[name] if case is None else case.config, tmp_path, attention="eager" if case is None else case.attention
        )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        pytest.skip("this Transformers has a config of it, but no model")
    tensors = {k: v.bfloat16() for k, v in tensors.items()}  # weights that bfloat16 holds exactly
    prompts = {"a": random_prompt(80), "b": random_prompt(64, 2)}
    exact = logits_of(case, config, tensors, ReferenceKernels(), torch.float32, prompts)
    plain = logits_of(case, config, tensors, ReferenceKernels(), torch.bfloat16, prompts)
    found = logits_of(case, config, tensors, TritonKernels(), torch.bfloat16, prompts)
    ours, theirs, measure = (torch.cat([each[key] for key in prompts]) for each in (found, plain, exact))
    error, usual = errors(ours, measure), errors(theirs, measure)
    # Where two experts score alike, rounding may choose the other: such positions are few. But a state remembers them,
    # so that all later ones of a sequence differ: both sequences are looked at together.
    assert torch.median(error) <= max(1e-2, 1.5 * float(torch.median(usual))), (error, usual)
    assert torch.mean(error) <= max(2e-2, 3 * float(torch.mean(usual))), (error, usual)
    best = measure.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 4 * error.clamp(min=1e-2) * measure.std(dim=-1)
    agree, total = int((ours.argmax(-1) == measure.argmax(-1))[clear].sum()), int(clear.sum())
    assert agree >= 0.99 * total and total > 0
