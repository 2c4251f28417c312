"""Rows of the table in other formats: weights quantised at load, bfloat16, several ranks; and what a row refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.cpu.models.families_helpers import prompt
from tests.cpu.models.family_cases import ALL, PHIMOE
from tests.cpu.models.parity import load, ours, theirs
from tests.cpu.models.ranks_helpers import Shared, ThreadGroup
from torch import Tensor
from transformers import PhimoeConfig

from tokenmill.core.errors import ModelError

NATIVE = pytest.importorskip("tokenmill.kernels.cpu", reason="the native kernels were not built")
MANY = (
    "olmo2-0",
    "cohere-0",
    "phi-0",
    "apertus-0",
    "qwen2_moe-0",
    "granitemoeshared-0",
    "deepseek_v3-0",
    "gemma4-0",
    "gemma3n-0",
    "hy_v4-0",
    "cohere2_moe-0",
)
SPLIT = ("granite-0", "glm4-0", "phi-0", "starcoder2-0", "hunyuan_v1_dense-0", "gpt_bigcode-1", "codegen-0", "mpt-1",
         "qwen2_moe-0", "ernie4_5_moe-0", "granitemoeshared-0", "deepseek_v3-0", "llama4-0", "dbrx-0", "olmo2-0",
         "cohere-0", "bitnet-0", "cohere2_moe-0")  # fmt: skip
STEPS = [[("a", 7)], [("a", 20)]] + [[("a", 1)]] * 13


@pytest.mark.parametrize("form", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("name", MANY)
def test_other_formats_stay_near_and_give_the_same_bytes(name, form, tmp_path):
    case, kernels = ALL[name], NATIVE.CpuKernels(1)
    _, config, tensors = case.make(tmp_path)
    prompts = {"a": prompt(40)}
    exact = ours(load(config, tensors, kernels=kernels), prompts, [[("a", 40)]], kernels)["a"]
    narrow = {"dtype": torch.bfloat16} if form == "bfloat16" else {}
    options = narrow or {"quantization": form}
    model = load(config, tensors, kernels=kernels, **options)
    found = ours(model, prompts, [[("a", 40)]], kernels, **narrow)["a"]
    alike = torch.nn.functional.cosine_similarity(found.float().flatten(), exact.flatten(), dim=0)
    assert alike > (0.8 if form == "int4" else 0.99)
    assert torch.equal(ours(model, prompts, STEPS, kernels, **narrow)["a"], found)


@pytest.mark.parametrize("name", SPLIT)
def test_ranks_give_what_one_gives(name, tmp_path):
    _, config, tensors = ALL[name].make(tmp_path)
    prompts, steps = {"a": prompt(40)}, [[("a", 30)], [("a", 10)]]
    alone = ours(load(config, tensors), prompts, steps)["a"]
    shared = Shared(2)

    def run(rank: int) -> Tensor:
        with torch.no_grad():
            return ours(load(config, tensors, group=ThreadGroup(shared, rank)), prompts, steps)["a"]

    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(run, range(2)):
            assert (result - alone).abs().max() <= 1e-4


def test_what_cannot_be_split_is_refused(tmp_path):
    _, config, tensors = ALL["gemma4-0"].make(tmp_path)
    with pytest.raises(ModelError, match="cannot be split"):
        load(config, tensors, group=ThreadGroup(Shared(3), 0))


def test_layers_for_drafts_are_left_and_other_surplus_is_refused(tmp_path):
    _, config, tensors = ALL["glm4_moe-0"].make(tmp_path)
    more = {**tensors, "model.layers.2.eh_proj.weight": torch.zeros(2, 2)}
    plain, with_drafts = (
        ours(load({**config, "num_nextn_predict_layers": 1}, t), {"a": prompt(9)}, [[("a", 9)]])["a"]
        for t in (tensors, more)
    )
    assert torch.equal(plain, with_drafts)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.eh_proj"):
        load({**config, "num_nextn_predict_layers": 0}, more)
    with pytest.raises(ModelError, match=r"model\.layers\.3\.eh_proj"):
        load(config, {**more, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)})


def test_mimo_is_qwen2_with_layers_for_drafts(tmp_path):
    _, config, tensors = ALL["qwen2-0"].make(tmp_path)
    named = {**config, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    more = {**tensors, "model.mtp_layers.0.input_proj.weight": torch.zeros(2, 2)}
    one, other = (
        ours(load(c, t), {"a": prompt(40)}, [[("a", 40)]])["a"] for c, t in ((config, tensors), (named, more))
    )
    assert torch.equal(one, other)


def test_a_long_run_has_the_long_factors_of_phimoe(tmp_path):
    """Transformers always takes the short ones; given the long ones under that name it agrees with a long run."""
    case = ALL["phimoe-2"]
    base = {**case.config.to_dict(), "architectures": None}
    long = {**PHIMOE, "short_factor": PHIMOE["long_factor"], "short_mscale": PHIMOE["long_mscale"]}
    reference, config, tensors = type(case)(PhimoeConfig(**{**base, "rope_parameters": long})).make(tmp_path)
    said = {**PHIMOE, "original_max_position_embeddings": 64}
    said_above = {"original_max_position_embeddings": 64, "rope_parameters": said}
    model = load({**config, **said_above}, tensors, max_positions=128)
    tokens = prompt(80)
    assert (ours(model, {"a": tokens}, [[("a", 80)]])["a"] - theirs(reference, tokens)).abs().max() <= 1e-4
