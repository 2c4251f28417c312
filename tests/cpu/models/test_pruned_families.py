"""Every family with channels, heads and layers taken out: Transformers reads what is written and says the same as ours,
or the cut is refused by name. The default run takes a few families; TOKENMILL_FAMILIES=1 takes all."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from safetensors.torch import load_file
from tests.cpu.models.families_helpers import CASES, prompt
from tests.cpu.models.family_cases import ALL, LLAMA3
from tests.cpu.models.parity import load, make, ours, theirs
from transformers import AutoModelForCausalLM, LlamaConfig

from tokenmill.core.errors import ModelError, UserError
from tokenmill.kernels.reference import ReferenceKernels
from tokenmill.quantize.prune_model import Cut, prune_model

BASE = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None, "num_key_value_heads": 2, "num_hidden_layers": 4}  # fmt: skip
CUTS = {"channels": Cut(channels=0.3, multiple=4), "heads": Cut(heads=0.5), "layers": Cut(layers=1)}
EVERY = os.environ.get("TOKENMILL_FAMILIES") == "1"


def deep(config):
    """The same with layers in the middle that can go, where nothing is said of each layer."""
    said = {name: value for name, value in config.to_diff_dict().items() if name != "layer_types"}
    lists = any(isinstance(value, list) and len(value) == 2 for value in said.values())
    if said.get("num_hidden_layers") == 2 and not lists:
        config = type(config)(**{**said, "num_hidden_layers": 4})
    return config


def cut(config, what, folder, attention="eager", longest=None):
    """Transformers and ours say the same of what was written, and all of it is read."""
    make(config, folder / "whole", attention=attention)
    tokens = torch.randint(0, 67, (3, 40), generator=torch.Generator().manual_seed(0))
    prune_model(folder / "whole", folder / "less", CUTS[what], tokens)
    said = json.loads((folder / "less" / "config.json").read_text())
    model, info = AutoModelForCausalLM.from_pretrained(
        folder / "less", attn_implementation=attention, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    wanted = theirs(model.eval(), prompt(80))
    tensors = {k: v for file in (folder / "less").glob("*.safetensors") for k, v in load_file(file).items()}
    mine = load(said, tensors, max_positions=longest)
    found = ours(mine, {"a": prompt(80)}, [[("a", 80)]], ReferenceKernels())["a"]
    assert float((found - wanted).abs().max()) <= 1e-4
    whole = sum(v.numel() for f in (folder / "whole").glob("*.safetensors") for v in load_file(f).values())
    assert sum(v.numel() for v in tensors.values()) < whole


@pytest.mark.parametrize("what", CUTS)
def test_what_is_left_is_what_transformers_reads(what, tmp_path):
    twists = {"mlp_bias": True, "attention_bias": True, "rope_parameters": dict(LLAMA3), "tie_word_embeddings": True}
    cut(LlamaConfig(**BASE, **twists), what, tmp_path)


def test_layers_whose_kind_follows_from_their_number(tmp_path):
    """Every second layer of this one has experts."""
    config = copy.deepcopy(ALL["llama4-0"].config)
    make(config, tmp_path / "whole")
    tokens = torch.randint(0, 67, (3, 40), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match=r"in which layer \d would be of another kind"):
        prune_model(tmp_path / "whole", tmp_path / "less", CUTS["layers"], tokens)
    assert not (tmp_path / "less").exists()


@pytest.mark.parametrize("what", CUTS)
@pytest.mark.parametrize("name", [*ALL, *CASES] if EVERY else ["gemma2"])
def test_every_family_is_read_or_refused(name, what, tmp_path):
    case = ALL.get(name) or CASES[name]
    config = deep(copy.deepcopy(case.config))
    try:
        cut(config, what, tmp_path, case.attention, case.longest)
    except (UserError, ModelError) as error:
        pytest.skip(str(error))
