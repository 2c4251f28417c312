"""`--pruned-weights`: the same answers however zeros are held, and a word on what was found."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokenmill import LLM, SamplingParams
from tokenmill.core.config import make_config
from tokenmill.core.errors import UserError
from tokenmill.engine.load import memory
from tokenmill.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tokenmill._native") is None, reason="kernels are not built")


@pytest.mark.parametrize(("zeros", "said"), [(0.6, "matrices are held without their zeros"), (0.0, "has no effect")])
def test_the_option_says_what_it_found(tmp_path, zeros, said):
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=128, max_position_embeddings=256)  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            parameter.data = (torch.randn(parameter.shape) * (torch.rand(parameter.shape) > zeros) / 20).bfloat16()
    model.save_pretrained(tmp_path)
    found = {}
    for wanted in ("packed", "dense", "auto"):
        llm = LLM(model=str(tmp_path), skip_tokenizer_init=True, pruned_weights=wanted, kv_cache_memory_bytes=1 << 22)
        out = llm.generate({"prompt_token_ids": [5, 9, 77]}, SamplingParams(temperature=0, max_tokens=8, logprobs=1))
        found[wanted] = out[0].outputs[0].logprobs
        reasons = [reason for reason in llm.built.facts.reasons if "zeros" in reason]
        assert (any(said in reason for reason in reasons)) if wanted == "packed" else not reasons
        llm.close()
    assert found["packed"] == found["dense"] == found["auto"]


def test_plain_torch_multiplies_zeros():
    with pytest.raises(UserError, match="--kernels reference multiplies matrices with their zeros"):
        LLM(model="demo", kernels="reference", pruned_weights="packed")


@pytest.mark.parametrize("packed", [False, True])
def test_steps_before_the_first_request_have_all_few_rows(monkeypatch, packed):
    """A head that is held 2:4 has a kernel for each power of two rows: none is compiled while a request waits."""
    tried: list[int] = []

    def note(made, peak, device, how):
        tried.append(len(peak[0].rows))
        return 0, None

    monkeypatch.setattr(memory, "_try_step", note)
    kernels = ReferenceKernels()
    if packed:
        kernels.count("pack_pruned")
    made = SimpleNamespace(spec=SimpleNamespace(states=[])), kernels, SimpleNamespace(groups=[], page_bytes=[])
    made[2].block_size = 16
    config = make_config({}, model="demo", max_num_seqs=128)
    memory.peak_step_bytes(config, made, "cpu", 4096, 4096)
    assert {2, 64, 128} <= set(tried) and ({16, 32} <= set(tried)) == packed
