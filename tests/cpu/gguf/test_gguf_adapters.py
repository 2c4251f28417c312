"""Adapters and GGUF files. llama.cpp adds scale * b @ a to the tensors of the file: so do we, whatever they are called
and however the converter ordered them, and a model from a folder gives the same. PEFT's adapters of such a base are
those of the class."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.cpu.gguf.gguf_hybrids_helpers import CONFIGS as HYBRIDS
from tests.cpu.gguf.gguf_hybrids_helpers import write as write_hybrid
from tests.cpu.gguf.gguf_layers_helpers import CASES as LAYERS
from tests.cpu.gguf.gguf_layers_helpers import FULL, models
from tests.cpu.gguf.gguf_layers_helpers import write as write_layers
from tests.cpu.gguf.gguf_mixtures_helpers import CASES as MIXTURES
from tests.cpu.gguf.gguf_mixtures_helpers import written as mixture
from tests.cpu.gguf.gguf_models_helpers import Unrounded
from tests.cpu.gguf.gguf_older_helpers import CASES as OLDER
from tests.cpu.gguf.gguf_older_helpers import written as older
from tests.cpu.kernels.paged_batch import PagedBatch
from tests.cpu.models.parity import make, theirs
from torch import Tensor

from tokenmill.checkpoint.folder import open_checkpoint, read_config
from tokenmill.checkpoint.gguf_model import GgufModel
from tokenmill.core.errors import ModelError
from tokenmill.lora.sites import Sites
from tokenmill.lora.store import LoraStore, read_adapter
from tokenmill.models.registry import build_model

TOKENS = [(7 * i) % 90 + 3 for i in range(24)]
ALPHA, RANK = 8.0, 3
USUAL = ("glm4moe", "deepseek2-v3", "granitehybrid-moe", "gpt2-untied", "bloom", "falcon-40b", "llama4", "qwen35")
EVERY = (*LAYERS, *OLDER, *MIXTURES, *HYBRIDS)
UNCHANGED = ("conv", "norm", "attn_k_b", "attn_v_b", "nextn", "altup", "position", "per_layer_token")
"""Parts of names of tensors that adapters cannot change."""


def written(name: str, folder: Path) -> tuple[Any, Path]:
    """Transformers' model, and the file."""
    if name in LAYERS:
        reference, config, tensors = models(name, folder)
        write_layers(folder / "m.gguf", LAYERS[name][0], config, tensors)
    elif name in HYBRIDS:
        reference, config, tensors = make(HYBRIDS[name], folder)
        write_hybrid(folder / "m.gguf", name, config, tensors)
    else:
        return older(name, folder) if name in OLDER else mixture(name, folder)
    return reference, folder / "m.gguf"


class Adapted:
    """A model that takes adapters, from a GGUF file or a folder."""

    def __init__(self, path: Path) -> None:
        source = GgufModel(path) if path.suffix == ".gguf" else None
        config = read_config(path) if source is None else source.config
        checkpoint = open_checkpoint(path) if source is None else source.open_checkpoint()
        self.kernels, cpu = Unrounded(), torch.device("cpu")
        sites = Sites(1, 16, torch.float32, cpu, config)
        self.model = build_model(
            config, checkpoint, dtype=torch.float32, device="cpu", kernels=self.kernels, adapters=sites
        )
        self.store = LoraStore(sites, self.kernels)

    def logits(self, adapter: Path | None = None) -> Tensor:
        """Of TOKENS, with an adapter or none."""
        if adapter is not None:
            self.store.command({"op": "read", "id": 1, "path": str(adapter)})
            state = self.store.command({"op": "state", "ids": [1], "wait": True})
            if state["failed"]:
                raise ModelError(state["failed"][1])
            self.store.load([(1, 1)])
        batch = PagedBatch(self.model.spec.kv_specs, self.kernels, states=self.model.spec.states)
        step = batch.step([("a", len(TOKENS))])
        assert step.rows is not None
        slots = torch.full((len(TOKENS),), int(adapter is not None), dtype=torch.int32)
        step = replace(step, rows=replace(step.rows, adapters=slots))
        return self.model.logits(self.model.forward(torch.tensor(TOKENS), step), step).float()


def change(path: Path, adapter: Path, wanted: Callable[[str, np.ndarray], bool]) -> dict[str, np.ndarray]:
    """Write an adapter of these matrices of a file; -> what becomes of them."""
    reader, random = gguf.GGUFReader(str(path)), np.random.default_rng(1)
    arch = reader.fields["general.architecture"].contents()
    out = gguf.GGUFWriter(str(adapter), arch)
    out.add_string("general.type", "adapter")
    out.add_string("adapter.type", "lora")
    out.add_float32("adapter.lora.alpha", ALPHA)
    changed = {}
    for tensor in reader.tensors:
        weight = np.array(tensor.data, dtype=np.float32)
        never = weight.ndim < 2 or not tensor.name.endswith(".weight") or any(part in tensor.name for part in UNCHANGED)
        if never or not wanted(tensor.name, weight):
            continue
        shapes = (*weight.shape[:-2], RANK, weight.shape[-1]), (*weight.shape[:-1], RANK)
        down, up = (random.standard_normal(shape).astype(np.float32) * 0.1 for shape in shapes)
        changed[tensor.name] = weight + ALPHA / RANK * (up @ down)
        if tensor.name == "token_embd.weight":  # stored the other way round
            down, up = up, np.ascontiguousarray(down.T)
        out.add_tensor(f"{tensor.name}.lora_a", down)
        out.add_tensor(f"{tensor.name}.lora_b", up)
    finish(out)
    return changed


def finish(out: Any) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def rewritten(path: Path, target: Path, changed: Mapping[str, np.ndarray]) -> Path:
    """The same file with these tensors."""
    reader = gguf.GGUFReader(str(path))
    out = gguf.GGUFWriter(str(target), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            out.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        out.add_tensor(tensor.name, changed.get(tensor.name, np.array(tensor.data)))
    finish(out)
    return target


def check(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", EVERY if FULL else USUAL)
def test_every_matrix_of_a_file(name: str, tmp_path: Path) -> None:
    _, path = written(name, tmp_path)
    stored = {tensor.name for tensor in gguf.GGUFReader(str(path)).tensors}

    def wanted(tensor: str, weight: np.ndarray) -> bool:
        if tensor == "token_embd.weight" and "output.weight" not in stored:
            return False  # a head would change with it
        return not (name.startswith("dbrx") and weight.ndim > 2)

    changed = change(path, tmp_path / "a.gguf", wanted)
    base = Adapted(path)
    plain, found = base.logits(), base.logits(tmp_path / "a.gguf")
    expected = Adapted(rewritten(path, tmp_path / "changed.gguf", changed)).logits()
    assert (expected - plain).abs().max() > 0.1
    check(found, expected)


@pytest.mark.parametrize("name", ["bloom", "falcon-40b", "gpt2", "deepseek2-v3", "nemotron_h", *HYBRIDS])
def test_a_folder_takes_them_as_well(name: str, tmp_path: Path) -> None:
    _, path = written(name, tmp_path)
    change(path, tmp_path / "a.gguf", lambda tensor, _: True)
    check(Adapted(tmp_path).logits(tmp_path / "a.gguf"), Adapted(path).logits(tmp_path / "a.gguf"))


@pytest.mark.parametrize("kind", ["low rank", "DoRA and whole"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_value_heads_lie_in_another_order_in_files(name: str, kind: str, tmp_path: Path) -> None:
    """A PEFT folder for the class, on a base in a GGUF file."""
    peft = pytest.importorskip("peft")
    reference, path = written(name, tmp_path)
    plain = theirs(reference, TOKENS)
    inner = [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    said: dict[str, Any] = {"target_modules": inner}
    if kind != "low rank":
        said = {"target_modules": inner[:2], "use_dora": True, "modules_to_save": ["linear_attn.out_proj"]}
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(reference, peft.LoraConfig(r=RANK, lora_alpha=6, init_lora_weights=False, **said))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        made.save_pretrained(tmp_path / "adapter")
    expected = theirs(made.eval(), TOKENS)
    assert (expected - plain).abs().max() > 0.1
    check(Adapted(path).logits(tmp_path / "adapter"), expected)


def test_weights_that_hold_multipliers(tmp_path: Path) -> None:
    """Those of Falcon-H1's files do, and nothing says which: neither form of adapters fits the other form of bases."""
    _, path = written("falcon-h1", tmp_path)
    change(path, tmp_path / "a.gguf", lambda tensor, _: "ffn_down" in tensor)
    Adapted(path).logits(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match="a base in a folder takes PEFT folders only"):
        Adapted(tmp_path).logits(tmp_path / "a.gguf")
    folder, at = tmp_path / "adapter", "base_model.model.model.layers.0.feed_forward.down_proj"
    folder.mkdir()
    save_file({f"{at}.lora_{one}.weight": torch.ones(shape) for one, shape in (("A", (1, 96)), ("B", (64, 1)))},
              folder / "adapter_model.safetensors")  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    Adapted(tmp_path).logits(folder)
    with pytest.raises(ModelError, match="a base in a GGUF file takes GGUF adapters only"):
        Adapted(path).logits(folder)


def test_what_a_file_says_of_another_model_is_refused(tmp_path: Path) -> None:
    _, path = written("glm4moe", tmp_path)
    change(path, tmp_path / "a.gguf", lambda tensor, _: "ffn_up_exps" in tensor)
    _, other = written("glm4", tmp_path / "other")
    with pytest.raises(ModelError, match=r"experts\.0\.up_proj is not a matrix of this model"):
        Adapted(other).logits(tmp_path / "a.gguf")
    change(other, tmp_path / "b.gguf", lambda tensor, _: tensor == "blk.3.ffn_up.weight")
    with pytest.raises(ModelError, match=r"it has another base|is not a matrix of this model"):
        Adapted(path).logits(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("nemotron_h", {"num_attention_heads": "4", "num_key_value_heads": "4"}, "are not pairs of"),
        ("qwen35", {"linear_num_key_heads": 4, "linear_num_value_heads": 31}, "31 value heads"),
        ("qwen35", {"linear_num_value_heads": "32"}, "linear_num_value_heads"),
    ],
)
def test_a_config_that_nobody_has_read_yet(name: str, config: dict[str, Any], why: str, tmp_path: Path) -> None:
    """As of the base of a merge."""
    _, path = written(name, tmp_path)
    change(path, tmp_path / "a.gguf", lambda _, weight: weight.ndim == 2)
    with pytest.raises(ModelError, match=why):
        read_adapter(tmp_path / "a.gguf", config)
