"""Every scaling against Transformers; both spellings; tables shared."""

from __future__ import annotations

import pytest
import torch
from tests.cpu.models.parity import DictCheckpoint
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenmill.core.errors import ModelError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.layers.build import Build
from tokenmill.layers.rope import attention_gain, frequencies, make_rope, rope_settings

ORIGINAL = {"original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "yarn-deepseek": {"factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.0, **ORIGINAL},
    "yarn-whole": {"factor": 4.0, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0, **ORIGINAL},
    "yarn-gain": {"factor": 4.0, "attention_factor": 1.25, **ORIGINAL},
    "longrope": {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
                 "factor": 4.0, **ORIGINAL},
    "proportional": {"partial_rotary_factor": 0.5},
    "proportional-slower": {"partial_rotary_factor": 0.25, "factor": 2.0},
}  # fmt: skip


def build(positions: int = 256) -> Build:
    return Build(DictCheckpoint({}), torch.float32, torch.device("cpu"), ReferenceKernels(), positions)


@pytest.mark.parametrize("length", [50, 256, 600])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_agree_with_transformers(name, length):
    kind = name.split("-")[0]
    parameters = {"rope_type": kind, "rope_theta": 5000.0, **SCALINGS[name]}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=parameters)
    expected, gain = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    got, got_gain = frequencies(rope_settings(config.to_dict(), 16), length)
    assert torch.allclose(got, expected, rtol=1e-6)
    assert got_gain == pytest.approx(gain)


@pytest.mark.parametrize("name", SCALINGS)
def test_the_older_spelling_means_the_same(name):
    kind = name.split("-")[0]
    new = {"max_position_embeddings": 256, "rope_parameters": {"rope_type": kind, "rope_theta": 5000, **SCALINGS[name]}}
    for key in ("type", "rope_type"):
        old = {"max_position_embeddings": 256, "rope_theta": 5000, "rope_scaling": {key: kind, **SCALINGS[name]}}
        for length in (50, 256):
            one, other = (frequencies(rope_settings(c, 16), length) for c in (new, old))
            assert torch.equal(one[0], other[0]) and one[1] == other[1]


def test_settings_nested_per_layer_type():
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4), ("other", 77.0)):
        assert rope_settings({"rope_parameters": nested}, 16, layer_type=kind, theta=77.0).theta == theta


def test_tables_are_shared_by_equal_settings_only():
    b = build()
    one = rope_settings({"rope_theta": 1e4}, 16)
    assert make_rope(b, one) is make_rope(b.at("elsewhere"), rope_settings({"rope_theta": 10000}, 16))
    assert make_rope(b, one) is not make_rope(b, one, interleaved=True)
    assert make_rope(b, one) is not make_rope(b, rope_settings({"rope_theta": 2e4}, 16))
    assert make_rope(b, one).cos.shape == (256, 8)


def test_a_row_of_the_table_does_not_depend_on_its_length():
    settings = rope_settings({}, 16)
    short, long = make_rope(build(77), settings), make_rope(build(4099), settings)
    assert torch.equal(short.cos, long.cos[:77]) and torch.equal(short.sin, long.sin[:77])


def test_partial_rotation():
    assert rope_settings({"partial_rotary_factor": 0.25}, 32).dim == 8
    assert rope_settings({"rope_parameters": {"partial_rotary_factor": 0.5}}, 32).dim == 16


def test_deepseek_scales_the_softmax():
    settings = rope_settings({"rope_parameters": {"rope_type": "yarn", **SCALINGS["yarn-deepseek"]}}, 16)
    assert attention_gain(settings) == pytest.approx((0.1 * 1.0 * torch.log(torch.tensor(4.0)).item() + 1) ** 2)
    assert attention_gain(rope_settings({}, 16)) == 1.0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 0.0}}, "rope_theta"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0}}, "attention_factor"),
        ({"partial_rotary_factor": 0.3}, "even number"),
    ],
)
def test_unusable_settings_are_refused_by_name(config, says):
    with pytest.raises(ModelError, match=says):
        frequencies(rope_settings(config, 10 if "partial_rotary_factor" in config else 16), 10)
