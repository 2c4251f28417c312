"""What may be wrong with an adapter's files: one sentence, before any work; and what PEFT can say that is done."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cpu.engine.engines import greedy, open_llm
from tests.cpu.lora.making import write_adapter

from tokenmill import LLM, AsyncLLM, LoRARequest
from tokenmill.core.config import make_config
from tokenmill.core.errors import UserError
from tokenmill.demo.files import demo_dir
from tokenmill.lora.config import MOST_RANK, read_adapter_config
from tokenmill.lora.peft import read_peft
from tokenmill.testing.tiny import make_tiny

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llm(base: Path) -> Any:
    with open_llm(base, enable_lora=True, kernels="auto", max_loras=2) as made:
        yield made


def say(**changes: Any) -> Callable[[Path], None]:
    """Other entries of adapter_config.json."""

    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def hold(**changes: Any) -> Callable[[Path], None]:
    """Other tensors; None takes one away."""

    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = {k: v for k, v in {**load_file(file), **changes}.items() if v is not None}
        save_file(tensors, file)

    return change


def text(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def make_folder(folder: Path) -> None:
    """In the place of the config."""
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()


ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def _rows(ids: list[int], width: int) -> Callable[[Path], None]:
    """Rows for these tokens."""

    def change(folder: Path) -> None:
        say(trainable_token_indices=ids)(folder)
        hold(**{ROWS: torch.ones(len(ids), width)})(folder)

    return change


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
NAN = torch.full((4, 128), math.nan)
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "config is a folder": (make_folder, "is a folder"),
    "config is no JSON": (text("adapter_config.json", b"{"), "not valid JSON"),
    "config is a list": (text("adapter_config.json", b"[]"), "must hold a JSON object"),
    "another method": (say(peft_type="IA3"), "peft_type"),
    "another task": (say(task_type="SEQ_CLS"), "task_type"),
    "rank is text": (say(r="8"), "r must be a whole number"),
    "rank is zero": (say(r=0), "r must be a whole number"),
    "rank is a truth": (say(r=True), "r must be a whole number"),
    "rank is not the tensors'": (say(r=8), "has rank 4, and adapter_config.json says 8"),
    "rank beyond all": (say(r=100000), "from 1 to 1024"),
    "alpha is text": (say(lora_alpha="x"), "lora_alpha must be a number"),
    "alpha is infinite": (text("adapter_config.json", b'{"peft_type":"LORA","r":4,"lora_alpha":1e999}'), "a number"),
    "patterns are a list": (say(rank_pattern=[]), ""),
    "a pattern that never ends": (say(rank_pattern={"(a+)+$": 4}), "too long or too deep"),
    "two ways for each letter": (say(rank_pattern={"(a|aa)*b": 4}), "too long or too deep"),
    "a pattern of many parts": (say(alpha_pattern={".*a.*a.*a.*a.*b": 4}), "too long or too deep"),
    "options upon options": (say(rank_pattern={"(?:a|a)?" * 20 + "b": 4}), "too long or too deep"),
    "a pattern that cannot be read": (say(alpha_pattern={"(": 4}), "cannot be read"),
    "a pattern's rank is text": (say(rank_pattern={"q_proj": "4"}), "whole number"),
    "PiSSA": (say(init_lora_weights="pissa_niter_4"), "changed the base model's weights"),
    "layers replicated": (say(layer_replication=[[0, 1]]), "layer_replication"),
    "QA-LoRA": (say(use_qalora=True), "use_qalora"),
    "tokens that invoke it": (say(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
    "a word that nobody knows": (say(use_magic=True), "may change what the adapter computes"),
    "target_modules is a number": (say(target_modules=3), "target_modules"),
    "a saved module is missing": (say(modules_to_save=["lm_head"]), "does not hold"),
    "biases that are lost": (say(lora_bias=True), "no bias of lora_B, and adapter_config.json says lora_bias"),
    "biases that nobody announced": (hold(**{f"{Q}.lora_B.bias": torch.ones(128)}), "does not say lora_bias"),
    "stacked experts that are lost": (say(target_parameters=["mlp.experts.down_proj"]),
                                      "target_parameters names 'mlp.experts.down_proj', which the file does not hold"),
    "a parameter's name alone": (say(target_parameters=["down_proj"]), "'down_proj', which the file does not hold"),
    "DoRA without magnitudes": (say(use_dora=True), "no lora_magnitude_vector"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "there is no adapter_model"),
    "weights are noise": (text("adapter_model.safetensors", b"\xff" * 64), ""),
    "weights are empty": (text("adapter_model.safetensors", b""), ""),
    "half is missing": (hold(**{B: None}), "has no lora_B"),
    "the other half is missing": (hold(**{A: None}), "has no lora_A"),
    "NaN": (hold(**{A: NAN}), "NaN or infinity"),
    "infinity": (hold(**{B: torch.full((128, 4), math.inf)}), "NaN or infinity"),
    "infinity once it is scaled": (hold(**{B: torch.full((128, 4), 3e38)}), "times its scale is too large"),
    "integers": (hold(**{A: torch.ones(4, 128, dtype=torch.int32)}), "is stored as int32"),
    "a vector": (hold(**{A: torch.ones(128)}), "do not fit together"),
    "empty": (hold(**{A: torch.ones(0, 128), B: torch.ones(128, 0)}), "do not fit together"),
    "halves that do not fit": (hold(**{B: torch.ones(128, 5)}), "do not fit together"),
    "another base": (hold(**{A: torch.ones(4, 96)}), "it has another base"),
    "a layer that is not there": (
        hold(**{A.replace("rs.0", "rs.9"): torch.ones(4, 128), B.replace("rs.0", "rs.9"): torch.ones(128, 4)}),
        "is not a matrix of this model",
    ),
    "a vision tower": (
        hold(**{f"base_model.model.vision_tower.layers.0.q.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}),
        "is not a matrix of this model",
    ),
    "a tensor of something else": (
        hold(**{"base_model.model.prompt": torch.ones(3)}),
        "not a tensor of a LoRA adapter",
    ),
    "twice": (hold(**{f"{Q}.lora_A.default.weight": torch.ones(4, 128)}), "is there twice"),
    "a norm": (hold(**{"base_model.model.model.norm.weight": torch.ones(128)}), "is not a matrix"),
    "tokens that are text": (say(trainable_token_indices=["x"]), "a list of different tokens"),
    "a token twice": (say(trainable_token_indices={"lm_head": [3, 3]}), "a list of different tokens"),
    "tokens without rows": (say(trainable_token_indices=[3]), "the file holds no rows"),
    "rows of unknown tokens": (hold(**{ROWS: torch.ones(1, 128)}), "names 0"),
    "a token beyond the vocabulary": (_rows([10**6], 128), "has row 1000000 of 128"),
    "rows of another base": (_rows([3], 96), "has row 3 of 96"),
    "more tokens than ranks": (_rows(list(range(17)), 128), "has rank 17"),
    "magnitudes nobody asked for": (hold(**{f"{Q}.lora_magnitude_vector": torch.ones(128)}), "does not say use_dora"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_told_in_a_sentence(name: str, llm: LLM, base: Path, tmp_path: Path) -> None:
    change, words = HOSTILE[name]
    folder = write_adapter(tmp_path / "bad", base)
    change(folder)
    if name == "patterns are a list":
        return  # an empty list says as much as an empty object
    with pytest.raises(UserError) as caught:
        llm.generate("x", greedy(1), False, lora_request=LoRARequest(f"bad-{name}".replace("'", ""), 1, str(folder)))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_that_peft_doubles(base: Path, tmp_path: Path) -> None:
    """PEFT writes 2 r for experts' gate_up_proj; engines take as much."""
    folder = write_adapter(tmp_path / "wide", base)
    say(r=512, rank_pattern={r".*\.gate_up_proj": MOST_RANK}, alpha_pattern={r".*\.gate_up_proj": 32})(folder)
    config = read_adapter_config(folder)
    assert (config.rank, config.rank_of("model.layers.0.mlp.experts.gate_up_proj")) == (512, 1024)
    assert make_config(max_lora_rank=MOST_RANK)
    with pytest.raises(UserError, match="1024"):
        make_config(max_lora_rank=MOST_RANK + 1)
    say(rank_pattern={"gate_up_proj": MOST_RANK + 1})(folder)
    with pytest.raises(UserError, match="from 1 to 1024, not 1025"):
        read_adapter_config(folder)


def test_patterns_that_are_usual_and_names_that_are_not(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", base)
    numbers = "|".join(map(str, range(64)))
    usual = rf"model\.layers\.({numbers})\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
    say(rank_pattern={usual: 4, r".*\.(layers|blocks)\..*\.experts\.\d+\..*b": 5})(folder)
    config = read_adapter_config(folder)
    assert config.rank_of("base.model.layers.63.mlp.up_proj") == config.rank_of("lm_head") == 4
    with pytest.raises(UserError, match="too deep to be matched"):
        config.rank_of("a." * 120)


def test_modules_that_the_list_names_otherwise_than_the_file_are_told(base, tmp_path, caplog):
    """A file of which a part was never written looks like a list that names too much."""

    def told(number: int, **config: Any) -> list[str]:
        folder = write_adapter(tmp_path / str(number), base, modules=("q_proj", "down_proj"), **config)
        caplog.clear()
        read_peft(folder)
        return [text.removeprefix(f"{folder}: ") for text in caplog.messages]

    assert told(1) == told(2, target_modules="all-linear") == told(3, target_modules=r".*_proj") == []
    assert told(4, target_modules=["self_attn.q_proj", "mlp.down_proj"]) == []
    assert told(5, target_modules=["q_proj", "down_proj", "v_proj", "up_proj"]) == [
        "target_modules names 'v_proj', 'up_proj', and the file holds nothing of that."
    ]
    assert told(6, target_modules=["q_proj", "roj"]) == [
        "target_modules names 'roj', and the file holds nothing of that.",
        "target_modules does not name 'model.layers.0.mlp.down_proj', 'model.layers.1.mlp.down_proj'; what the file "
        "holds of that is applied.",
    ]


def test_the_base_stays_as_it_was(llm: LLM, base: Path) -> None:
    with open_llm(base, kernels="auto") as plain:
        assert (
            llm.generate("x y z", greedy(8), False)[0].outputs == plain.generate("x y z", greedy(8), False)[0].outputs
        )


def test_a_rank_above_the_engines(base: Path, tmp_path: Path, llm: LLM) -> None:
    folder = write_adapter(tmp_path / "wide", base, rank=17)
    with pytest.raises(UserError, match="takes adapters up to 16"):
        llm.generate("x", greedy(1), False, lora_request=LoRARequest("wide", 1, str(folder)))


@pytest.mark.parametrize("name", ["", "a" * 200, "../x", "a/../b", "-x", "x\ny", "\u00e9", 7, None])
def test_names(name: Any, llm: LLM, base: Path, tmp_path: Path) -> None:
    with pytest.raises((UserError, TypeError)):
        llm.generate("x", greedy(1), False, lora_request=LoRARequest(name, 1, str(tmp_path)))


def test_calls_that_make_no_sense(llm: LLM, base: Path, adapters: dict[str, Path]) -> None:
    one = LoRARequest("a3", 4, str(adapters["a3"]))
    for given, words in (
        ({"lora_request": 3}, "must be a LoRARequest"),
        ({"lora_request": [one, one]}, "1 prompts but 2 adapters"),
        ({"lora_request": LoRARequest("other", 1, "/no/such/folder")}, "no such adapter"),
        ({"lora_request": LoRARequest("other", 1, "")}, "lora_path must be"),
        ({"lora_request": LoRARequest("other", "1", "x")}, "lora_int_id must be an integer, got '1'"),
        ({"lora_request": LoRARequest("other", 0, "x")}, "lora_int_id must be in"),
    ):
        with pytest.raises(UserError, match=words):
            llm.generate("x", greedy(1), False, **given)
    llm.generate("x", greedy(1), False, lora_request=one)
    with pytest.raises(UserError, match="another path"):
        llm.generate("x", greedy(1), False, lora_request=LoRARequest("a3", 4, str(adapters["a4"])))
    with open_llm(base) as plain, pytest.raises(UserError, match="loaded without adapters"):
        plain.generate("x", greedy(1), False, lora_request=one)


def test_adapters_are_listed_and_removed(base: Path, adapters: dict[str, Path]) -> None:
    with open_llm(base, enable_lora=True, lora_modules=[f"a1={adapters['a1']},a2={adapters['a2']}"]) as llm:
        engine = llm.llm_engine
        assert engine.add_lora(LoRARequest("a3", 33, str(adapters["a3"])))
        assert engine.list_loras() == {33}
        assert engine.remove_lora(33) and not engine.remove_lora(33)
        assert engine.list_loras() == set() and not engine.remove_lora(0)
        assert llm.built.adapters.names.keys() == {"a1", "a2"}
        again = LoRARequest("a3", 34, str(adapters["a4"]))
        llm.generate("x", greedy(1), False, lora_request=again)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_that_changes_is_told(file: str, base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one", base, seed=1)
    with open_llm(base, enable_lora=True, max_loras=1, max_cpu_loras=1) as llm:
        one, two = LoRARequest("one", 1, str(folder)), LoRARequest("a2", 2, str(adapters["a2"]))
        llm.generate("x", greedy(1), False, lora_request=one)
        llm.generate("x", greedy(1), False, lora_request=two)
        changed = write_adapter(tmp_path / "changed", base, seed=2, rank=4, lora_alpha=7.25) / file
        changed.replace(folder / file)
        with pytest.raises(UserError, match="have changed"):
            llm.generate("x", greedy(1), False, lora_request=one)


@pytest.mark.parametrize("arch", ["llama", "granite", "mistral3", "olmo"])
def test_a_gguf_adapter_is_the_same(arch: str, base: Path, tmp_path: Path, llm: LLM) -> None:
    """llama.cpp's form: other names, and of some families query and key rows in pairs."""
    folder = write_adapter(tmp_path / f"peft-{arch}", base, seed=3, rank=4)
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip
    tensors = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        words = name.split(".")
        layer, part, half = words[4], words[6], words[7]
        if half == "lora_B" and part in ("q_proj", "k_proj"):
            heads = 4 if part == "q_proj" else 2
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        tensors[f"blk.{layer}.{parts[part]}.weight.lora_{half[-1].lower()}"] = tensor.contiguous()
    metadata = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": arch,
                "adapter.lora.alpha": 8.0}  # fmt: skip
    write_gguf_adapter(tmp_path / f"{arch}.gguf", metadata, tensors)
    found = [
        llm.generate("some words", greedy(8, logprobs=1), False, lora_request=LoRARequest(path.stem, 1, str(path)))[0]
        for path in (folder, tmp_path / f"{arch}.gguf")
    ]
    assert found[0].outputs[0].logprobs == found[1].outputs[0].logprobs


def write_gguf_adapter(path: Path, metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """With the reference library."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), metadata["general.architecture"])
    writer.add_string("general.type", metadata["general.type"])
    writer.add_string("adapter.type", metadata["adapter.type"])
    writer.add_float32("adapter.lora.alpha", metadata["adapter.lora.alpha"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_merged(base: Path, folder: Path, merged: Path) -> None:
    """The merged model says what the base says with the adapter."""
    with open_llm(base, enable_lora=True) as llm, open_llm(merged) as other:
        request = LoRARequest("one", 1, str(folder))
        first = llm.generate("some words", greedy(6, logprobs=1), False, lora_request=request)[0].outputs[0]
        second = other.generate("some words", greedy(6, logprobs=1), False)[0].outputs[0]
        assert first.token_ids == second.token_ids
        assert abs((first.cumulative_logprob or 0.0) - (second.cumulative_logprob or 0.0)) < 1e-3


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_merged_weights_say_the_same(base: Path, tmp_path: Path, dora: bool) -> None:
    from tokenmill.lora.merge import merge

    folder = write_adapter(tmp_path / "one", base, rank=5, dora=dora)
    assert merge(base, folder, tmp_path / "merged") == 14
    check_merged(base, folder, tmp_path / "merged")
    with pytest.raises(UserError, match="exists already"):
        merge(base, folder, tmp_path / "merged")


def test_what_the_base_type_cannot_hold_is_not_merged(base: Path, tmp_path: Path) -> None:
    from tokenmill.lora.merge import merge

    folder = write_adapter(tmp_path / "one", base, rank=2, size=1e19)
    with pytest.raises(UserError, match="with this adapter has infinite numbers or NaN in"):
        merge(base, folder, tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_bias_that_the_base_has_no_place_for_is_not_merged(base: Path, tmp_path: Path) -> None:
    from tokenmill.lora.merge import merge

    folder = write_adapter(tmp_path / "one", base, modules=("q_proj",), lora_bias=True)
    hold(**{f"{Q.replace('.0.', f'.{i}.')}.lora_B.bias": torch.ones(128) for i in range(2)})(folder)
    with pytest.raises(UserError, match=r"has no bias of .*q_proj: only an unmerged adapter can bring one"):
        merge(base, folder, tmp_path / "merged")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_damaged_base_is_refused_whether_the_adapter_changes_it_or_not(name: str, tmp_path: Path) -> None:
    from tokenmill.lora.merge import merge

    base = make_tiny(tmp_path / "base")
    folder = write_adapter(tmp_path / "one", base, modules=("q_proj",))
    tensors = load_file(base / "model.safetensors")
    tensors[name].view(-1)[3] = math.nan
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"^{name} holds .*NaN: the model is damaged"):
        merge(base, folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("changed", ["embeddings", "saved embeddings", "head", "both"])
def test_a_head_that_was_the_embeddings_is_merged_alone(changed: str, tmp_path: Path) -> None:
    """A tied head has no adapter of the embeddings', nor they one of the head's: merged, each has its own matrix."""
    from tokenmill.lora.merge import merge

    base = make_tiny(tmp_path / "tied")
    folder = write_adapter(tmp_path / "one", base, modules=("q_proj",))
    words, width, made = 320, 64, torch.Generator().manual_seed(1)
    table, saved = "base_model.model.model.embed_tokens", changed == "saved embeddings"
    tensors = {
        f"{table}.lora_embedding_A": torch.randn(4, words, generator=made) * 0.2,
        f"{table}.lora_embedding_B": torch.randn(width, 4, generator=made) * 0.2,
        "base_model.model.lm_head.lora_A.weight": torch.randn(4, width, generator=made) * 0.1,
        "base_model.model.lm_head.lora_B.weight": torch.randn(words, 4, generator=made) * 0.1,
    }
    wanted = {"embeddings": ("embed",), "head": ("lm_head",), "both": ("embed", "lm_head"), "saved embeddings": ()}
    chosen = {name: t for name, t in tensors.items() if any(word in name for word in wanted[changed])}
    if saved:
        chosen = {f"{table}.weight": torch.randn(words, width, generator=made) * 0.2}
        say(modules_to_save=["embed_tokens"])(folder)
    hold(**chosen)(folder)
    merge(base, folder, tmp_path / "merged")
    check_merged(base, folder, tmp_path / "merged")


def test_new_weights_of_the_base(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """DoRA's lengths are those of the weights that are there now."""
    tensors = {name: tensor * 0.9 for name, tensor in load_file(base / "model.safetensors").items()}
    request = LoRARequest("a7", 1, str(adapters["a7"]))
    with open_llm(base, enable_lora=True, kernels="auto") as llm:
        llm.generate("some words", greedy(4), False, lora_request=request)
        llm.update_weights(tensors)
        found = llm.generate("some words", greedy(8, logprobs=1), False, lora_request=request)[0].outputs[0]
    other = tmp_path / "other"
    other.mkdir()
    for file in base.iterdir():
        if file.suffix == ".json":
            (other / file.name).write_bytes(file.read_bytes())
    save_file(tensors, other / "model.safetensors")
    with open_llm(other, enable_lora=True, kernels="auto") as llm:
        expected = llm.generate("some words", greedy(8, logprobs=1), False, lora_request=request)[0].outputs[0]
    assert found.logprobs == expected.logprobs


def test_new_biases_of_the_base(tmp_path: Path) -> None:
    """What an adapter does to biases is counted from those that are there now."""
    bases, made = [], torch.Generator().manual_seed(5)
    for name in ("one", "two"):
        folder = make_tiny(tmp_path / name, architecture="llama")
        config, file = folder / "config.json", folder / "model.safetensors"
        config.write_text(json.dumps({**json.loads(config.read_text()), "attention_bias": True}))
        tensors = load_file(file)
        shifted = [key for key in tensors if "self_attn" in key]
        tensors |= {key.replace("weight", "bias"): torch.randn(len(tensors[key]), generator=made) for key in shifted}
        save_file(tensors, file)
        bases.append((folder, tensors))
    dora = write_adapter(tmp_path / "dora", bases[0][0], dora=True)
    plain = write_adapter(tmp_path / "plain", bases[0][0], bias="lora_only")
    hold(**{f"{Q}.bias": torch.ones(64)})(plain)
    requests = [LoRARequest(path.name, i, str(path)) for i, path in enumerate((dora, plain), 1)]
    found = []
    for (folder, _), new in ((bases[0], bases[1][1]), (bases[1], None)):
        with open_llm(folder, enable_lora=True, dtype="bfloat16") as llm:
            if new is not None:
                llm.generate(["some words"] * 2, greedy(1), False, lora_request=requests)
                llm.update_weights(new)
            outputs = llm.generate(["some words"] * 2, greedy(4, logprobs=1), False, lora_request=requests)
            found.append([output.outputs[0].logprobs for output in outputs])
    assert found[0] == found[1]


def test_the_demo_models_adapters() -> None:
    """Both in one batch with the base: each in its own way, and the base as ever."""
    with LLM(model="demo", enable_lora=True, max_loras=2) as llm, LLM(model="demo") as plain:
        pirate, sql = LoRARequest("pirate", 1, "demo:pirate"), LoRARequest("sql", 2, "demo:sql")
        fact = [{"role": "user", "content": "What is the capital of France?"}]
        table = [{"role": "user", "content": "Table users(name, age, city, email). Show the name of all users."}]
        asked = [fact, fact, table, table]
        found = llm.chat(asked, greedy(32, ignore_eos=False), False, [pirate, None, sql, None])
        said = [each.outputs[0].text for each in found]
        base = [each.outputs[0].text for each in plain.chat([fact, table], greedy(32, ignore_eos=False), False)]
    assert said[0].startswith("Arr!") and "Paris" in said[0]
    assert said[2].strip() == "SELECT name FROM users;"
    assert [said[1], said[3]] == base
    assert not base[0].startswith("Arr!") and not base[1].startswith("SELECT")


async def test_an_engine_in_a_thread(base: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """The same answers; an adapter that cannot be read is told to who asked, and nobody else."""
    one, two = (LoRARequest(name, i, str(adapters[name])) for i, name in enumerate(("a3", "a5"), 1))
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    with open_llm(base, enable_lora=True, kernels="auto") as llm:
        expected = [llm.generate(prompt, greedy(5), False, lora_request=each)[0].outputs for each in (one, two, None)]
    bad = write_adapter(tmp_path / "bad", base)
    hold(**{A: NAN})(bad)
    async with AsyncLLM(str(base), dtype="float32", enable_lora=True, kv_cache_memory_bytes=1 << 23) as engine:

        async def answer(request: LoRARequest | None) -> Any:
            found = [output async for output in engine.generate(prompt, greedy(5), lora_request=request)]
            return found[-1].outputs

        asked = [answer(each) for each in (one, two, None, LoRARequest("bad", 9, str(bad)))]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert found[:3] == expected
        assert isinstance(found[3], UserError) and "NaN" in str(found[3])
        assert await engine.list_loras() == {1, 2, 9}
        assert await engine.remove_lora(2) and not await engine.remove_lora(2)
        assert await answer(one) == expected[0]
        grammar: Future[None] = Future()  # it is still compiled when the adapter loses its name
        engine.service.loop._waits = lambda request: [grammar]  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(answer(one))
        while not engine.service.loop.compiling:
            await asyncio.sleep(0.01)
        assert await engine.remove_lora(1) and await engine.list_loras() == {9}
        grammar.set_result(None)
        assert await waiting == expected[0]
        while engine.service.built.adapters.leaving:
            await asyncio.sleep(0.01)


def test_files_that_get_shorter_while_they_are_read(tmp_path):
    """A map of such a file would end the process."""
    folder = shutil.copytree(demo_dir("lora-sql"), tmp_path / "adapter")
    whole = [tensor.clone() for _, tensor in read_peft(folder).numbers()]
    adapter = read_peft(folder)
    os.truncate(folder / "adapter_model.safetensors", 0)
    assert all(map(torch.equal, whole, [tensor for _, tensor in adapter.numbers()]))
