"""Weights that change in place: answers are then those of a model that was loaded with them, whatever the format."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu.engine.engine_families_helpers import ALL
from tests.cpu.engine.engines import BACKENDS, exact, greedy, run
from tests.cpu.engine.engines import open_usual as open_llm
from tests.cpu.models.family_cases import ALL as LATER
from tests.cpu.models.text_part_cases import Seeing
from transformers import AutoModelForCausalLM

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.core.errors import UserError
from tokenmill.engine.load.inplace import LayerMaker, inside
from tokenmill.testing.tiny import make_tiny

FAMILIES = ("mistral-window", "qwen3-moe", "gemma3", "gpt2", "opt", "falcon-7b", "deepseek-v2", "gpt-oss", "qwen3-next",
            "gemma3n-0", "gemma4-0", "llava", "deepseek_v32-0", "hy_v4-0")  # fmt: skip
PROMPTS = [[1, 2, 3], [4, 5] * 12]
KINDS = [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "fp8"}]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folders(request, tmp_path_factory):
    """Two models of one shape, with the head tied and not."""
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "architecture": request.param}
    root = tmp_path_factory.mktemp(request.param)
    return make_tiny(root / "a", **sizes), make_tiny(root / "b", seed=5, **sizes)


def said(llm, count=10):
    return [exact(output) for output in run(llm, PROMPTS, greedy(count, logprobs=2))]


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(o.values()) or "float32")
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_those_of_the_new_weights(folders, backend, options):
    old, new = folders
    with open_llm(new, kernels=backend, **options) as fresh:
        wanted = said(fresh)
    with open_llm(old, kernels=backend, **options) as llm:
        before = said(llm)
        assert said(llm) == before != wanted  # recorded steps, cached prompts
        tensors = load_file(new / "model.safetensors")
        assert llm.update_weights(tensors.items()) == len(tensors)
        assert said(llm) == wanted and said(llm) == wanted
        assert llm.update_weights(old / "model.safetensors") == len(tensors)
        assert said(llm) == before


@pytest.mark.parametrize("given", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", [torch.float16, torch.float32], ids=str)
def test_numbers_of_16_bits_and_of_32_take_the_place_of_either(folders, stored, given, tmp_path):
    """Matrices that are stored in float16 are held in 16 bits, whatever a trainer computes in."""
    for folder, name in zip(folders, ("old", "new"), strict=True):
        shutil.copytree(folder, tmp_path / name)
        half = {key: tensor.half() for key, tensor in load_file(folder / "model.safetensors").items()}
        save_file({key: tensor.to(stored) for key, tensor in half.items()}, tmp_path / name / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config.pop("torch_dtype", None)
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "dtype": str(stored).split(".")[1]}))
    with open_llm(tmp_path / "new", kernels=BACKENDS[-1]) as fresh:
        wanted = said(fresh)
    with open_llm(tmp_path / "old", kernels=BACKENDS[-1]) as llm:
        assert said(llm) != wanted
        llm.update_weights({key: tensor.to(given) for key, tensor in half.items()})
        assert said(llm) == wanted and said(llm) == wanted


def test_zeros_beside_a_quantised_matrix_are_passed_over(folders, tmp_path):
    """AutoGPTQ wrote a bias for every matrix; the model here has none."""
    folder, tensors = tmp_path / "stored", load_file(folders[0] / "model.safetensors")
    shutil.copytree(folders[0], folder)
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    tensors |= {f"{name}.weight_scale": torch.ones(1), f"{name}.bias": torch.zeros(32)}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with open_llm(folder, kernels=BACKENDS[-1]) as llm:
        before = said(llm)
        assert llm.update_weights(folder / "model.safetensors") == len(tensors)
        assert said(llm) == before


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(o.values()) or "float32")
def test_addresses_stay(folders, options):
    """Recorded steps name them."""
    old, new = folders
    with open_llm(old, kernels=BACKENDS[-1], **options) as llm:
        said(llm)
        model = llm.apply_model(lambda model: model)[0]
        before = addresses(model, {})
        llm.update_weights(new)
        assert addresses(model, {}) == before and len(before) > 10


def addresses(thing, found):
    """Where every tensor of a model lies, by the tensor."""
    if id(thing) in found:
        return found
    found[id(thing)] = thing.data_ptr() if isinstance(thing, torch.Tensor) else 0
    for inner, _ in inside(thing, thing):
        addresses(inner, found)
    return found


def test_a_layer_alone_and_parts_that_come_one_by_one(folders, tmp_path):
    old, new = folders
    tensors = load_file(new / "model.safetensors")
    first = {name: t for name, t in tensors.items() if ".layers.0." in name}
    mixed = tmp_path / "mixed"
    shutil.copytree(old, mixed)
    save_file({**load_file(old / "model.safetensors"), **first}, mixed / "model.safetensors", metadata={"format": "pt"})
    with open_llm(mixed) as fresh:
        wanted = said(fresh)
    with open_llm(old) as llm, open_llm(new) as other:
        llm.update_weights(first)
        assert said(llm) == wanted
        query, rest = "model.layers.0.self_attn.q_proj.weight", dict(first)
        with pytest.raises(UserError, match=r"holds model.layers.0.self_attn.q_proj.weight but not .* give all"):
            llm.update_weights({query: rest.pop(query)})
        assert said(llm) == wanted
        buffer = torch.empty(max(t.numel() for t in tensors.values()))
        llm.start_weight_update()
        for name, tensor in tensors.items():  # one buffer, as a sender's
            part = buffer[: tensor.numel()].view(tensor.shape)
            part.copy_(tensor)
            llm.update_weights([(name, part)])
        assert said(llm) == wanted
        assert llm.finish_weight_update() == len(tensors)
        assert said(llm) == said(other)


def test_what_does_not_fit_changes_nothing(folders):
    old, _ = folders
    norm = "model.norm.weight"
    with open_llm(old) as llm:
        before = said(llm)
        for given, words in (
            ([], "no tensors"), ([(norm, torch.ones(31))], r"shape \[31\].*needs \[32\]"), ([norm], "pairs of a name"),
            ({norm: 3.0}, "must be a tensor"), ([(norm, torch.ones(32))] * 2, "given twice"),
            ({"model.nrm.weight": torch.ones(32)}, "no tensor model.nrm.weight"), ("/nowhere", "no such file"),
            ({norm: torch.full((32,), float("nan"))}, "NaN"), (str(old / "config.json"), "config.json"),
            ({norm: torch.ones(32, device="meta")}, "no numbers"), ({norm: torch.ones(32).to(torch.int8)}, "packed"),
        ):  # fmt: skip
            with pytest.raises(UserError, match=words):
                llm.update_weights(given)
            assert said(llm) == before
        with pytest.raises(UserError, match="no update has been started"):
            llm.finish_weight_update()
        llm.llm_engine.add_request("open", [1, 2, 3], greedy(3))
        with pytest.raises(UserError, match="requests are open"):
            llm.update_weights({norm: torch.ones(32)})
        llm.driver.leave(["open"])
        assert llm.update_weights({norm: torch.ones(32)}) == 1
    with open_llm(old, executor="process") as far, pytest.raises(UserError, match="inprocess"):
        far.update_weights({norm: torch.ones(32)})


def test_an_update_that_breaks_off_leaves_nothing_of_before(folders, tmp_path, monkeypatch):
    """Neither cached prefixes nor what is known about changes, whatever ended it."""
    old, new = folders
    tensors = load_file(new / "model.safetensors")
    odd, buffer = tmp_path / "odd", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    shutil.copytree(old, odd)
    save_file({**load_file(old / "model.safetensors"), **buffer}, odd / "model.safetensors")
    with open_llm(new) as fresh, open_llm(odd) as llm:
        wanted, before = said(fresh), said(llm)
        assert said(llm) == before != wanted
        build, made = LayerMaker.build, []

        def end_after_the_first(self, *given):
            made.append(given)
            if len(made) == 2:
                raise UserError("The memory is full.")
            return build(self, *given)

        monkeypatch.setattr(LayerMaker, "build", end_after_the_first)
        with pytest.raises(UserError, match=r"is full\. Layers before it have their new weights already"):
            llm.update_weights(tensors)
        monkeypatch.undo()
        assert said(llm) not in (before, wanted)
        assert llm.update_weights({**tensors, **buffer}) == len(tensors) + 1
        assert said(llm) == wanted
        with pytest.raises(UserError, match="sparse"):
            llm.update_weights({"model.norm.weight": torch.ones(32).to_sparse()})


def test_a_tied_head_may_come_twice(folders):
    old, new = folders
    if not json.loads((old / "config.json").read_text())["tie_word_embeddings"]:
        return
    tensors = load_file(new / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    with open_llm(old) as llm, open_llm(new) as fresh:
        llm.update_weights({**tensors, "lm_head.weight": table.clone()})
        assert said(llm) == said(fresh)
        with pytest.raises(UserError, match="no tensor lm_head"):
            llm.update_weights({"lm_head.weight": table})


async def test_an_async_engine_takes_them_between_requests(folders):
    old, new = folders
    options = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, "num_blocks": 64}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with open_llm(new) as fresh:
        wanted = run(fresh, PROMPTS, params)[0].outputs[0].token_ids
    async with AsyncLLM(str(old), **options) as llm:

        async def answer():
            return [output async for output in llm.generate(PROMPTS[0], params)][-1].outputs[0].token_ids

        assert await answer() != wanted
        assert await llm.update_weights(new) > 20
        assert await answer() == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
    _, config, tensors = {**ALL, **LATER, "llava": Seeing("llava")}[name].make(tmp_path / "old")
    config = config.get("text_config", config)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    source = torch.Generator().manual_seed(3)
    new = {k: t + 0.02 * torch.randn(t.shape, generator=source).to(t.dtype) for k, t in tensors.items()}
    file = next((tmp_path / "new").glob("*.safetensors"))
    new = {k: new[k].contiguous() for k in load_file(file)}
    save_file(new, file, metadata={"format": "pt"})
    prompts = [[i % config["vocab_size"] for i in range(1, 24)], [3]]
    options = {"kernels": BACKENDS[-1], "skip_tokenizer_init": True, "max_model_len": 64}
    with open_llm(tmp_path / "new", **options) as fresh, open_llm(tmp_path / "old", **options) as llm:
        wanted = [exact(out) for out in run(fresh, prompts, greedy(8, logprobs=1))]
        for _ in range(2):  # then there are recorded steps
            assert [exact(out) for out in run(llm, prompts, greedy(8, logprobs=1))] != wanted
        llm.update_weights(file)
        for _ in range(2):
            assert [exact(out) for out in run(llm, prompts, greedy(8, logprobs=1))] == wanted


def test_rollouts_follow_a_trainer(folders):
    """Transformers trains, the engine samples: it always samples from the newest weights, and reward rises."""
    trainer = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    steps = torch.optim.Adam(trainer.parameters(), lr=0.02)
    rewards = []
    with open_llm(folders[0]) as llm:
        for turn in range(5):
            params = SamplingParams(n=32, max_tokens=6, logprobs=0, seed=turn, ignore_eos=True)
            (output,) = run(llm, [PROMPTS[0]], params)
            rows = torch.tensor([PROMPTS[0] + out.token_ids for out in output.outputs])
            logits = trainer(rows).logits[:, len(PROMPTS[0]) - 1 : -1]
            chosen = rows[:, len(PROMPTS[0]) :]
            logprobs = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
            ours = [
                [row[token].logprob for row, token in zip(o.logprobs, o.token_ids, strict=True)] for o in output.outputs
            ]
            assert torch.allclose(logprobs, torch.tensor(ours), atol=1e-3)  # of the same weights
            reward = (chosen < 100).float()
            rewards.append(reward.mean().item())
            (-(reward - reward.mean()) * logprobs).mean().backward()
            steps.step()
            steps.zero_grad()
            llm.update_weights(trainer.state_dict())
    assert rewards[-1] > rewards[0] + 0.2, rewards
