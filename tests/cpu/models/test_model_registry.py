"""What is refused at load, in which words; stages, taps, embeds; what a spec says."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.models.config_fields_helpers import SMALL
from tests.cpu.models.families_helpers import CASES
from tests.cpu.models.parity import DictCheckpoint, load, make, ours
from transformers import GPT2Config, LlamaConfig

from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.layers.build import Build
from tokenmill.models.config import ModelConfig
from tokenmill.models.registry import architectures, build_stage, check_length
from tokenmill.parallel.stages import Place

CONFIG = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
TOKENS = list(range(3, 40))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    _, config, tensors = make(LlamaConfig(**CONFIG), tmp_path_factory.mktemp("llama"))
    return config, tensors


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["StrangeForCausalLM"]}, "StrangeForCausalLM.*LlamaForCausalLM"),
        ({"architectures": ["Odd"], "auto_map": {"AutoModel": "x.Odd"}}, "remote code is never run"),
        ({"architectures": None, "model_type": "odd"}, "odd"),
        ({"architectures": ["Qwen34ForCausalLM"]}, "not built here .the nearest that is: Qwen3ForCausalLM"),
        ({"architectures": ["Gemma3mForConditionalGeneration"]}, "the nearest that is: Gemma3ForCausalLM"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "32"}, "'hidden_size' must be a whole number"),
        ({"hidden_size": True}, "'hidden_size' must be a whole number"),
        ({"hidden_size": -32}, "'hidden_size' = -32 is out of bounds"),
        ({"hidden_size": 10**12}, "'hidden_size' = 1000000000000 is out of bounds"),
        ({"num_hidden_layers": 10**5}, "'num_hidden_layers' = 100000 is out of bounds"),
        ({"vocab_size": 10**7}, "embed_tokens.weight.*67.*10000000"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"hidden_act": "mish"}, "hidden_act .mish. is not supported"),
        ({"attention_bias": 1}, "'attention_bias' must be true or false"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"quantization_config": {"quant_method": "spqr"}}, "spqr"),
        ({"tie_word_embeddings": None, "num_hidden_layers": 3}, r"model\.layers\.3\..* and 1 more"),
        ({"num_hidden_layers": 5}, r"no tensor 'model\.layers\.4\."),
    ],
)
def test_unusable_configs_are_refused_in_words(llama, change, says):
    config, tensors = llama
    with pytest.raises(ModelError, match=says):
        load({**config, **change}, tensors)


HOSTILE = (math.nan, math.inf, -1, 0, 2**63, 10**30, 2**25, 2**16, 0.5, [], {}, [math.nan], "x")


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3NextForCausalLM", "FalconH1ForCausalLM", "BloomForCausalLM"]
)
def test_no_number_of_a_config_is_worked_with_before_it_is_checked(name, tmp_path):
    """Each number of a config, made unusable, is one sentence, before anything of that size is made."""
    _, config, tensors = SMALL[name].make(tmp_path)
    numbers = [key for key, value in config.items() if isinstance(value, int | float) and not isinstance(value, bool)]
    refused = 0
    for key in numbers:
        for value in HOSTILE:
            try:
                load({**config, "architectures": [name], key: value}, tensors, max_positions=64)
            except ModelError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 400, (key, value)
    assert refused > 5 * len(numbers) // 2


ODD_VALUES = [None, "x", -1, 0, 10**12, 10**400, 0.5, float("nan"), [], {}, True, [1], {"a": 1}]


def odd_variants(config: dict) -> Iterator[dict]:
    """The config with one value, at the top or nested, replaced by each odd one."""
    for key, value in {"rope_scaling": None, **config}.items():
        yield from ({**config, key: odd} for odd in ODD_VALUES)
        if isinstance(value, dict):
            yield from ({**config, key: inner} for inner in odd_variants(value))


@pytest.mark.parametrize("name", ["phi3-long", "gemma3", "deepseek-v2", "gpt-oss", "gpt2", "opt-350m", "falcon-40b"])
def test_a_config_with_any_odd_value_loads_or_is_refused(name, tmp_path):
    _, config, tensors = make(CASES[name].config, tmp_path)
    refused = 0
    for variant in odd_variants(config):
        try:
            load(variant, tensors, max_positions=64)
        except ModelError:
            refused += 1
    assert refused > 50


def test_surplus_keys_are_ignored(llama):
    config, tensors = llama
    load({**config, "some_new_switch": {"a": [1]}}, tensors)


def test_architectures_are_listed():
    assert "LlamaForCausalLM" in architectures() and architectures() == sorted(architectures())


def test_config_reads_whole_floats_as_integers_but_not_others():
    assert ModelConfig({"a": 4.0}).need("a", int) == 4
    with pytest.raises(ModelError, match=r"'sub\.a'"):
        ModelConfig({"sub": {"a": 4.5}}).sub("sub").need("a", int)


def test_spec(llama):
    config, tensors = llama
    spec = load(config, tensors).spec
    assert (spec.vocab_size, spec.max_positions, spec.hidden_size) == (67, 64, 32)
    assert len(spec.kv_specs) == 4 and len(set(spec.kv_specs)) == 1
    layers = sum(v.numel() for k, v in tensors.items() if "proj" in k)
    assert spec.flops_per_token == 2 * (layers + 67 * 32)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 32768, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 131072, "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 131072),
        ({}, 1 << 22),
        ({"max_position_embeddings": 1 << 24}, 1 << 22),
        ({"max_position_embeddings": 262144, "rope_parameters": {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1}}, 262144),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 1.0}}, 32768),
    ],
)  # fmt: skip
def test_lengths_beyond_the_context_are_refused_with_both_numbers(config, longest):
    check_length(config, None)
    check_length(config, longest)
    with pytest.raises(ParameterError, match=f"{longest + 1} is more than (the )?{longest}"):
        check_length(config, longest + 1)


def test_learned_positions_bound_the_context(tmp_path):
    config = GPT2Config(vocab_size=67, n_embd=32, n_layer=1, n_head=4, n_positions=48)
    _, config, tensors = make(config, tmp_path)
    assert load(config, tensors, max_positions=1000).spec.max_positions == 48


def test_a_base_checkpoint_lacks_the_outer_name(tmp_path):
    config = GPT2Config(vocab_size=67, n_embd=32, n_layer=1, n_head=4, n_positions=48)
    _, config, tensors = make(config, tmp_path)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    one, other = (ours(load(config, t), {"a": TOKENS}, [[("a", 37)]])["a"] for t in (tensors, bare))
    assert torch.equal(one, other)


def test_stages_give_what_the_whole_gives(llama):
    config, tensors = llama
    kernels = ReferenceKernels()
    whole = ours(load(config, tensors), {"a": TOKENS}, [[("a", 37)]])["a"]
    x = torch.tensor(TOKENS)
    for stage in ((0, 1), (1, 3), (3, 4)):
        b = Build(DictCheckpoint(tensors), torch.float32, torch.device("cpu"), kernels, 64, place=Place(only=stage))
        model = build_stage(config, b)
        assert len(model.spec.kv_specs) == stage[1] - stage[0]
        ctx = PagedBatch(model.spec.kv_specs, kernels).step([("a", 37)])
        x = model.forward(x, ctx)
    assert torch.equal(model.logits(x, ctx), whole)


def test_taps_and_embeds(llama):
    config, tensors = llama
    model, kernels = load(config, tensors), ReferenceKernels()
    ctx = PagedBatch(model.spec.kv_specs, kernels).step([("a", 37)])
    ctx.taps = {1: torch.empty(0), 3: torch.empty(0)}
    tokens = torch.tensor(TOKENS)
    final = model.forward(tokens, ctx)
    assert torch.equal(kernels.norm(ctx.taps[3], model.norm), final)
    assert ctx.taps[1].shape == (37, 32) and not torch.equal(ctx.taps[1], ctx.taps[3])

    other = PagedBatch(model.spec.kv_specs, kernels).step([("a", 37)])
    rows = torch.tensor([2, 5])
    other.embeds = (rows, tensors["model.embed_tokens.weight"][tokens[rows]])
    changed = tokens.clone()
    changed[rows] = 1
    assert torch.equal(model.forward(changed, other), final)


@pytest.mark.parametrize("architecture", ["GraniteForCausalLM", "MiniCPM3ForCausalLM"])
def test_taps_and_embeds_of_a_stream_that_is_divided(architecture, tmp_path):
    """Drafters, and who hands over embeddings, see the stream as the model's authors do."""
    reference, config, tensors = make(SMALL[architecture].config, tmp_path)
    model, kernels = load(config, tensors), ReferenceKernels()
    assert model.unit != 1.0
    tokens = torch.tensor(TOKENS)
    states = reference(tokens[None], output_hidden_states=True).hidden_states
    ctx = PagedBatch(model.spec.kv_specs, kernels).step([("a", 37)])
    ctx.taps = {0: torch.empty(0)}
    final = model.forward(tokens, ctx)
    assert torch.allclose(ctx.taps[0], states[1][0], atol=1e-4)
    other = PagedBatch(model.spec.kv_specs, kernels).step([("a", 37)])
    rows = torch.tensor([2, 5])
    other.embeds = (rows, states[0][0][rows])
    changed = tokens.clone()
    changed[rows] = 1
    assert torch.allclose(model.forward(changed, other), final, atol=1e-4)
