"""Vectors are pooled as a model's files say; what is not built refuses vectors by name, and texts go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.pooling_files import folder_vectors, gguf_vectors
from tokenmill.core.errors import ParameterError
from tokenmill.core.pooled import AS_STATED, Vectors
from tokenmill.core.request import Request
from tokenmill.engine.running.wire import Ready
from tokenmill.server.engines.ready_message import learn_admission

MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def write(folder: Path, modules: list[tuple[str, str]] | None, modes: tuple[str, ...] | str) -> None:
    """The files of sentence-transformers."""
    if modules is not None:
        said = [{"idx": i, "name": str(i), "path": where, "type": f"sentence_transformers.models.{kind}"}
                for i, (kind, where) in enumerate(modules)]  # fmt: skip
        (folder / "modules.json").write_text(json.dumps(said))
    config: dict[str, Any] = {"word_embedding_dimension": 32, "include_prompt": True}
    config |= {"pooling_mode": modes} if isinstance(modes, str) else {f"pooling_mode_{m}": m in modes for m in MODES}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(config))


USUAL = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


@pytest.mark.parametrize(
    ("modules", "modes", "vectors"),
    [
        (USUAL, ("lasttoken",), Vectors()),
        (USUAL, ("mean_tokens",), Vectors(pooling="mean")),
        (None, ("mean_tokens",), Vectors(pooling="mean")),
        (USUAL[:2], ("mean_sqrt_len_tokens",), Vectors(pooling="mean")),
        (USUAL, "lasttoken", Vectors()),
        (USUAL, "mean", Vectors(pooling="mean")),
        (USUAL[:1], ("cls_token",), Vectors()),
        (USUAL, ("cls_token",), Vectors(unbuilt="1_Pooling/config.json says cls_token")),
        (USUAL, ("max_tokens", "mean_tokens"),
         Vectors(unbuilt="1_Pooling/config.json says mean_tokens and max_tokens")),
        (USUAL, (), Vectors(unbuilt="1_Pooling/config.json says no mode")),
        ([*USUAL[:2], ("Dense", "2_Dense"), USUAL[2]], ("mean_tokens",),
         Vectors(layers="modules.json lists Dense (2_Dense)")),
        ([*USUAL[:2], ("LayerNorm", "x")], ("mean_tokens",), Vectors(layers="modules.json lists LayerNorm (x)")),
    ],
)  # fmt: skip
def test_modules_of_sentence_transformers(modules: Any, modes: Any, vectors: Vectors, tmp_path: Path) -> None:
    write(tmp_path, modules, modes)
    assert folder_vectors(tmp_path) == vectors


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("modules.json", "[{}]", "must be a list of objects"),
        ("modules.json", "[" * 3000, "must be a list of objects"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../other"}]', "leads out of the folder"),
        ("1_Pooling/config.json", "[]", "must hold a JSON object"),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case"),
    ],
)
def test_files_that_cannot_be_followed_refuse_vectors_alone(name: str, data: str, says: str, tmp_path: Path) -> None:
    write(tmp_path, USUAL, ("mean_tokens",))
    (tmp_path / name).write_text(data)
    assert says in folder_vectors(tmp_path).layers


def test_a_folder_without_such_files_and_keys_of_gguf_files(tmp_path: Path) -> None:
    assert folder_vectors(tmp_path) == Vectors()
    kind = "qwen3.pooling_type"
    for value, vectors in (
        (None, Vectors()), (-1, Vectors()), (3, Vectors()), (1, Vectors(pooling="mean")),
        (0, Vectors(unbuilt=f"{kind} is 0 (none)")), (2, Vectors(unbuilt=f"{kind} is 2 (cls)")),
        (4, Vectors(unbuilt=f"{kind} is 4 (rank)")), ("x", Vectors(unbuilt=f"{kind} is x")),
    ):  # fmt: skip
        said = {} if value is None else {kind: value}
        assert gguf_vectors({"general.architecture": "qwen3", **said}) == vectors
    assert "dense_2" in gguf_vectors({"general.architecture": "gemma3", "gemma3.dense_2_feat_in": 8}).layers


def test_engine_and_server_follow_the_files(tiny: Path, tmp_path: Path) -> None:
    folder, ids = shutil.copytree(tiny, tmp_path / "model"), {"prompt_token_ids": [3, 1, 4, 1, 5]}
    write(folder, USUAL, ("mean_tokens",))
    options = {"model": str(folder), "device": "cpu", "dtype": "float32", "max_model_len": 64}
    with LLM(**options) as llm:
        first, mean, last = (llm.embed([ids], False, pooling=way)[0].embedding for way in (None, "mean", "last"))
        assert first == mean != last
    write(folder, USUAL, ("cls_token",))
    with LLM(**options) as llm:
        with pytest.raises(ParameterError, match="way to pool is not built: 1_Pooling/config"):
            llm.embed([ids], False)
        assert llm.embed([ids], False, pooling="last")[0].embedding == last
    write(folder, [*USUAL, ("Dense", "3_Dense")], ("mean_tokens",))
    with LLM(**options) as llm:
        with pytest.raises(ParameterError, match=r"vectors cannot be made here: modules.json lists Dense \(3_Dense\)"):
            llm.embed([ids], False, pooling="last")
        assert llm.generate([ids], SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs
    facts = {"vocab_size": 67, "max_model_len": 64, "max_rows": 4, "vectors": {"pooling": "mean"}}
    admission = learn_admission(Ready(facts=facts, eos_ids=[], generation={}, tokenizer=None), None)
    request = Request(id="a", prompt_ids=[1, 2], params=SamplingParams(max_tokens=1))
    assert admission.check(request, 0, AS_STATED).embed == "mean"
