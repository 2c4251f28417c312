"""Drafting models on the device: recorded passes, plans in flight, the same tokens with --deterministic, and no holes
in what a drafter keeps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tokenmill import LLM, SamplingParams
from tokenmill.core.drafting import AllOfThem
from tokenmill.core.errors import UserError
from tokenmill.demo import demo_dir

MOST = 3
PROMPTS = [
    "Once upon a time there was a little",
    "<|im_start|>user\nWhat is 23 + 45?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story about a dog.<|im_end|>\n<|im_start|>assistant\n",
    "one two three one two three one two",
] * 4
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, seed=4, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=48, logprobs=2, ignore_eos=True),
] * 4


@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    """A random EAGLE-3 head for the demo model: nothing that it guesses is right."""
    folder, hidden, inner = tmp_path_factory.mktemp("eagle3"), 256, 512
    shapes = {f"self_attn.{x}_proj": (n, 2 * hidden) for x, n in (("q", 256), ("k", 128), ("v", 128))}
    shapes |= {"self_attn.o_proj": (hidden, 256), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    tensors = {f"midlayer.{name}.weight": torch.randn(shape) * 0.05 for name, shape in shapes.items()}
    tensors |= {"fc.weight": torch.randn(hidden, 3 * hidden) * 0.05, "lm_head.weight": torch.randn(1024, hidden)}
    tensors["d2t"] = torch.arange(1024) * 5
    norms = ["norm", *(f"midlayer.{n}" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))]
    save_file(tensors | {f"{name}.weight": torch.ones(hidden) for name in norms}, folder / "model.safetensors")
    config = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 64, "vocab_size": 6144, "draft_vocab_size": 1024, "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make(speculative=None, **options):
    """The demo model on the device; every draft is made."""
    options = {"max_num_seqs": 32, "max_model_len": 1024, "num_gpu_blocks_override": 1500, **options}
    llm = LLM(model="demo", device="cuda", speculative_config=speculative, **options)
    if speculative:
        llm.engine.scheduler.ahead.control = AllOfThem(MOST)
    return llm


def config(name, eagle):
    """--speculative-config of a drafter."""
    models = {"self": demo_dir("main"), "draft": demo_dir("draft"), "medusa": demo_dir("medusa"), "eagle3": eagle}
    method = {"self": "draft_model", "draft": "draft_model"}.get(name, name)
    return {"method": method, "model": str(models[name]), "num_speculative_tokens": MOST}


def tokens(llm):
    """Ids of two rounds, the second of which is served by the prefix cache."""
    return [[o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] for _ in range(2)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["self", "draft", "medusa", "eagle3"])
def test_the_same_tokens_with_deterministic(name, eager, eagle):
    with make(deterministic=True) as llm:
        wanted = tokens(llm)
    with make(config(name, eagle), deterministic=True, enforce_eager=eager) as llm:
        found = tokens(llm)
        counters = llm.engine.scheduler.counters
        assert counters.failures == 0 and counters.drafted > 500
        assert counters.accepted > 0 or name == "eagle3"
    assert found == wanted


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 32}, {"kv_cache_dtype": "fp8"}])
def test_a_model_that_drafts_for_itself_is_right(options, eagle):
    """bf16 sums in another order may flip a near tie, so not always."""
    plain = [SamplingParams(temperature=t, seed=7, max_tokens=64, ignore_eos=True) for t in (0.0, 0.8)] * 8
    with make(config("self", eagle), **options) as llm:
        for _ in range(2):
            llm.generate(PROMPTS, plain, use_tqdm=False)
        counters = llm.engine.scheduler.counters
        assert counters.accepted > 0.9 * counters.drafted > 500


def test_drafts_do_not_wait_for_the_device(eagle):
    """With two plans in flight nothing in a step asks the device for a number."""
    with make(config("draft", eagle)) as llm:
        llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
        before = llm.engine.executor.runner.kernels.waits
        llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
        assert llm.engine.executor.runner.kernels.waits == before


def test_trees_are_refused_by_name(eagle):
    """Attention on a GPU knows no paths yet."""
    with pytest.raises(UserError, match=r"trees are not built on cuda.*without it drafts are chains"):
        make(config("medusa", eagle) | {"speculative_token_tree": "best"})
