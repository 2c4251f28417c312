"""Which family a folder is of: `architectures` and `model_type` as Transformers writes them, left out, misspelt, of a
body without its head; what is not built is told in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tests.cpu.models.families_helpers import BASE, prompt
from tests.cpu.models.family_cases import FAMILIES
from tests.cpu.models.foreign_configs import tiny
from tests.cpu.models.parity import load, make, ours, theirs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ModelError, ParameterError
from tokenmill.core.request import Request
from tokenmill.engine.running.wire import Ready
from tokenmill.models.config_fields import FIELDS
from tokenmill.models.family_of import BODY, BY_TYPE, NAMES, NOTE, SAME, SHARED, settled, type_of
from tokenmill.models.multimodal import OUTERS
from tokenmill.models.registry import check_keys, is_elsewhere, read
from tokenmill.quant.convert import check_upright
from tokenmill.server.engines.ready_message import learn_admission

LLAMA = {**BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def test_names_of_published_files_are_those_of_classes():
    config = {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "auto_map": {}}
    assert settled(config) == {**config, "architectures": ["BailingHybridForCausalLM"]}
    assert all(name not in FIELDS and family in FIELDS for name, family in NAMES.items())


def test_each_type_of_transformers_is_its_own_family_or_goes_there():
    """A class that several types share is never taken for the first one's family."""
    wrong = []
    for kind, named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config = {"model_type": kind, "architectures": [named]}
        if is_elsewhere(config, "auto") or named in OUTERS:
            continue
        family = settled(config)["architectures"][0]
        own = FIELDS[family].model_type
        if own not in (kind, f"{kind}_text", SAME.get(kind)):
            wrong.append((kind, named, family))
    assert not wrong
    for kind, named in SHARED.items():
        assert kind in BY_TYPE and MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] == named


def test_a_type_that_nobody_here_knows_goes_to_transformers(monkeypatch):
    """A new Transformers may compute a new type with a class that is built here, and read its config in its own way."""
    config = {**LLAMA, "model_type": "flint"}
    assert is_elsewhere(config, "auto") and not is_elsewhere(config, "tokenmill")
    other = {**LLAMA, "model_type": "llama-of-somebody"}
    assert not is_elsewhere(other, "auto")
    assert "llama-of-somebody" in read(other)[NOTE] and read(other)["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("kind", sorted(SHARED))
@torch.inference_mode()
def test_folders_with_a_shared_class_as_transformers_writes_them(kind, tmp_path):
    reference, config, tensors = make(FAMILIES[kind][0].config, tmp_path)
    assert config["architectures"] == [SHARED[kind]] and config["model_type"] == kind
    assert read(config)["architectures"] == [BY_TYPE[kind]] and SHARED[kind] in read(config)[NOTE]
    expected = theirs(reference, prompt(50))
    assert (ours(load(config, tensors), {"a": prompt(50)}, [[("a", 50)]])["a"] - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("change", "family"),
    [
        ({"architectures": None}, "LlamaForCausalLM"),
        ({"architectures": []}, "LlamaForCausalLM"),
        ({"architectures": "LLamaForCausalLM"}, "LlamaForCausalLM"),
        ({"architectures": ["LLaMAForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["LlamaForCasualLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["MPTForCausalLM"], "model_type": "mpt", "auto_map": {"a": "b"}}, "MptForCausalLM"),
        ({"architectures": ["LlamaXForCausalLM"], "auto_map": {"a": "b"}}, None),
        ({"architectures": None, "auto_map": {"a": "b"}}, None),
        ({"architectures": ["LlamaForSequenceClassification"]}, None),
        ({"architectures": ["LlamaBidirectionalModel"]}, None),
        ({"architectures": ["LlamaForCausalLMEagle"]}, None),
        ({"architectures": None, "model_type": "nobody"}, None),
        ({"architectures": None, "model_type": "kimi_k2"}, "DeepseekV3ForCausalLM"),
        ({"architectures": ["LlamaModel"], "model_type": None}, "LlamaForCausalLM"),
        ({"architectures": ["LlamaModel"], "model_type": "internlm3"}, "InternLM3ForCausalLM"),
        ({"architectures": ["GPT2Model"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text"}, "Gemma3ForCausalLM"),
    ],
)
def test_the_family_by_its_type(change, family):
    found = settled({**LLAMA, **change})
    assert settled(found) == found
    if family is None:
        assert found == {**LLAMA, **change}
        return
    assert found["architectures"] == [family] and found[NOTE]
    assert (BODY in found) == str(change["architectures"]).endswith("Model']")
    assert not is_elsewhere({**LLAMA, **change}, "auto")


def test_types_are_read_as_their_family_spells_them():
    assert type_of({"model_type": "gpt-sw3"}) == "gpt2" and type_of({"model_type": 3}) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": None, "model_type": None}, "names no architecture and no model_type: say what it is"),
        ({"architectures": ["FlintForCausalLM"], "model_type": "flint"},
         r"'FlintForCausalLM' is not built here.*; --model-impl transformers runs it"),
        ({"architectures": ["Qwen33ForCausalLM"], "model_type": "qwen33"},
         r"\(the nearest that is: Qwen3ForCausalLM\), nor can --model-impl transformers run it.*'qwen33'"),
        ({"architectures": ["LlamaForTokenClassification"]}, "has a head for something else than next tokens"),
        ({"architectures": ["MistralForCausalLM"]}, "contradict each other"),
        ({"architectures": 3}, "'architectures' must be a list"),
        ({"architectures": ["Odd"], "model_type": "odd", "auto_map": {"a": "b"}}, "remote code is never run"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_one_sentence(change, says):
    with pytest.raises(ModelError, match=says) as raised:
        check_keys({**LLAMA, **change})
    assert len(str(raised.value)) < 260 and "\n" not in str(raised.value)


def body_of(config: hf.PretrainedConfig, folder: Path) -> hf.PreTrainedModel:
    """A body without its head, as Transformers writes it."""
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and not parameter.any():
                parameter.normal_(std=0.1)  # a router of zeros leaves open which experts are chosen
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (hf.LlamaConfig(**BASE), "LlamaModel"),
        (hf.MistralConfig(**BASE, sliding_window=None), "MistralModel"),
        (hf.Qwen3Config(**BASE, head_dim=8), "Qwen3Model"),
        (hf.PhiConfig(**BASE), "PhiModel"),
        (hf.GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=128), "GPT2Model"),
        (hf.FlintConfig(**BASE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                        shared_expert_intermediate_size=16), "FlintModel"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_a_body_without_a_head_gives_vectors_and_no_text(config, named, tmp_path):
    reference = body_of(config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [named]
    asked = prompt(30)
    with torch.no_grad():
        last = reference(torch.tensor([asked])).last_hidden_state[0, -1].float()
    with LLM(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64, device="cpu", dtype="float32") as llm:
        found = llm.embed([{"prompt_token_ids": asked}], use_tqdm=False)[0].outputs.embedding
        assert torch.allclose(torch.tensor(found), torch.nn.functional.normalize(last, dim=0), atol=1e-4)
        with pytest.raises(ParameterError, match="no head for tokens"):
            llm.generate([{"prompt_token_ids": asked}], SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_server_refuses_text_of_such_a_body_before_it_sends_the_request():
    facts = {"vocab_size": 67, "max_model_len": 64, "max_rows": 4, "headless": True}
    admission = learn_admission(Ready(facts=facts, eos_ids=[], generation={}, tokenizer=None), None)
    request = Request(id="a", prompt_ids=[1, 2], params=SamplingParams(max_tokens=1))
    admission.check(request, 0, "last")
    with pytest.raises(ParameterError, match="no head for tokens"):
        admission.check(request, 0)


def test_a_body_that_has_a_head_is_the_whole_model(tmp_path):
    reference, config, tensors = make(hf.LlamaConfig(**BASE), tmp_path)
    model = load({**config, "architectures": ["LlamaModel"]}, tensors)
    assert not model.spec.extras["headless"]
    assert (ours(model, {"a": prompt(9)}, [[("a", 9)]])["a"] - theirs(reference, prompt(9))).abs().max() <= 1e-4
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor 'lm_head.weight'"):
        load(config, tensors)


def test_what_is_stored_transposed_is_known_without_its_name(tmp_path):
    with pytest.raises(ModelError, match="stores its matrices transposed"):
        check_upright({"model_type": "gpt2"}, tmp_path)
    check_upright({"model_type": "llama", "architectures": None}, tmp_path)


def away(config: dict[str, Any], tensors: dict[str, torch.Tensor], expected: torch.Tensor, *, body: bool) -> str:
    """What becomes of a folder here, compared with Transformers' logits or hidden states."""
    if is_elsewhere(config, "auto"):
        return "elsewhere"
    try:
        model = load(config, tensors)
    except ModelError as error:
        return f"refused: {error}"
    assert model.spec.extras["headless"] == body
    if body:
        model.logits = lambda hidden, ctx: hidden.clone()
    found = ours(model, {"a": prompt(50)}, [[("a", 50)]])["a"]
    return "equal" if (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max())) else "WRONG"


@pytest.mark.skipif(os.environ.get("TOKENMILL_FAMILIES") != "1", reason="minutes: TOKENMILL_FAMILIES=1")
@torch.inference_mode()
def test_no_folder_that_transformers_writes_is_wrong_in_silence(tmp_path):
    """Every causal type: whole, without its architecture, and its body alone."""
    found = {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        whole, part = tmp_path / kind / "whole", tmp_path / kind / "part"
        try:
            made = tiny(kind)
            reference, config, tensors = make(made, whole)
            body = body_of(made, part)
        except Exception:  # Transformers makes no model of it
            continue
        if not is_elsewhere(config, "auto"):
            reference = type(reference).from_pretrained(whole, attn_implementation="eager", dtype=torch.float32).eval()
            expected = theirs(reference, prompt(50))
            found[kind] = away(config, tensors, expected, body=False)
            found[f"{kind} by type"] = away({**config, "architectures": None}, tensors, expected, body=False)
            said = json.loads((part / "config.json").read_text())
            stored = {name: each for file in part.glob("*.safetensors") for name, each in load_file(file).items()}
            hidden = body(torch.tensor([prompt(50)]), use_cache=False)[0][0]
            found[f"{kind} body"] = away(said, stored, hidden, body=True)
        shutil.rmtree(tmp_path / kind)
    assert not [what for what, said in found.items() if said == "WRONG"]
    assert sum(said == "equal" for said in found.values()) > 250
