"""Drafts over states on a GPU: with --deterministic the tokens of a run without drafts, though many are wrong."""

from __future__ import annotations

import json

import pytest
import torch

from tokenmill import LLM, SamplingParams
from tokenmill.core.drafting import AllOfThem

hf = pytest.importorskip("transformers")
MOST = 4


@pytest.fixture(scope="module", params=["qwen3_5", "mamba2"])
def folder(request, tmp_path_factory):
    """A small hybrid, and a model of state spaces alone."""
    made = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "qwen3_5":
        config = hf.Qwen3_5TextConfig(
            vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, max_position_embeddings=512, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, eos_token_id=None,
            layer_types=["linear_attention", "full_attention"] * 2,
        )  # fmt: skip
        model = hf.Qwen3_5ForCausalLM(config)
    else:
        config = hf.Mamba2Config(
            vocab_size=128, hidden_size=64, state_size=32, num_heads=8, head_dim=16, n_groups=2, num_hidden_layers=3,
            expand=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        model = hf.Mamba2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(made)
    said = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(said | {"max_position_embeddings": 512}))
    return made


PROMPTS = [{"prompt_token_ids": [(7 * i + j * j) % 128 for j in range(9 + 5 * i)]} for i in range(8)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True),
] * 4


def answers(folder, speculative=None, texts=None, **options):
    """Token ids, and how many drafts stood. texts: what the host's drafter guesses from, one token in four wrong."""
    given = {"max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 28, "device": "cuda", **options}
    llm = LLM(model=str(folder), skip_tokenizer_init=True, deterministic=True, speculative_config=speculative, **given)
    try:
        if texts is not None:

            def propose(seq, most):
                text = next((t for t in texts if t[: len(seq.tokens)] == seq.tokens), [])
                after = text[len(seq.tokens) : len(seq.tokens) + most]
                return [(n + 1) % 128 if (len(seq.tokens) + 3 * i + n) % 4 == 0 else n for i, n in enumerate(after)]

            llm.engine.scheduler.roster.drafter.propose = propose
        elif speculative is not None:  # those of the device, all of them
            llm.engine.scheduler.ahead.control = AllOfThem(MOST)
        found = [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] for _ in range(2)]
        return found, llm.engine.scheduler.counters.accepted
    finally:
        llm.close()


def test_the_same_tokens(folder):
    plain, _ = answers(folder)
    texts = [p["prompt_token_ids"] + list(t) for p, t in zip(PROMPTS, plain[0], strict=True)]
    for eager in (False, True):
        config = {"method": "suffix", "num_speculative_tokens": MOST}
        found, accepted = answers(folder, config, texts, enforce_eager=eager)
        assert found == plain and accepted > 100
        config = {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 1}
        found, accepted = answers(folder, config, enforce_eager=eager)
        assert found == plain and accepted > 0
