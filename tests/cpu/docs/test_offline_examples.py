"""The offline examples are vLLM's well-known ones: they use its names alone, and run on a tiny model."""

from __future__ import annotations

import ast
import json
import re
import runpy
import string
from pathlib import Path

import pytest

from tokenmill.testing.tiny import make_tiny

EXAMPLES = Path(__file__).parents[3] / "examples" / "offline"
FILES = sorted(EXAMPLES.glob("*.py"))
OF_VLLM = {
    *("LLM", "LLMEngine", "SamplingParams", "PoolingParams", "BeamSearchParams", "StructuredOutputsParams"),
    *("EngineArgs", "AsyncEngineArgs", "AsyncLLMEngine", "RequestOutput", "RequestOutputKind", "TextPrompt"),
    *("TokensPrompt", "EmbeddingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput"),
    *("BeamSearchOutput", "LoRARequest", "Counter", "Gauge", "Histogram", "Metric", "Vector"),
}
"""Names that vLLM has, too, in its package or where it documents them."""


OF_DEMO = ("draft_model", "multi_lora")
"""Those that show what the demo model's files can do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), hidden=32, heads=4, kv_heads=2)
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": 317}))
    return str(folder)


def check_finished(outputs, count):
    assert len(outputs) == count
    assert all(out.finish_reason in ("length", "stop") for output in outputs for out in output.outputs)


def check_tools(messages):
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(messages[1]["content"]).keys() == {"city"}


def check_structures(texts):
    choice, address, car, query = texts
    assert choice in ("good", "bad") and re.fullmatch(r"[a-z]{1,8}@[a-z]{1,8}\.com", address)
    assert json.loads(car)["kind"] in ("sedan", "suv", "truck")
    assert re.fullmatch("SELECT (name|age) FROM (people|cars)", query)


def check_processed(outputs):
    assert len(set(outputs[0].outputs[0].token_ids)) == 1 and outputs[0].outputs[0].text == "aaaaa"
    assert outputs[1].outputs[0].text != "aaaaa"


def check_cached(outputs):
    check_finished(outputs, 3)
    assert all(output.num_cached_tokens >= 16 for output in outputs)


def check_vectors(outputs):
    assert [o.outputs.hidden_size for o in outputs] == [32] * 3 + [16] * 3
    assert all(sum(x * x for x in o.outputs.embedding) == pytest.approx(1.0) for o in outputs)


def check_prompts(outputs):
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1


def check_metrics(found):
    values = {metric.name: getattr(metric, "value", None) for metric in found}
    assert values["vllm:generation_tokens"] > 2 and values["vllm:num_requests_running"] == 0
    assert len(values) == len(found)


CHECKS = {
    "basic": lambda found: check_finished(found, 3),
    "chat": lambda found: check_finished(found, 5),
    "chat_with_tools": check_tools,
    "embedding": check_vectors,
    "classification": lambda found: [pytest.approx(1.0) == sum(o.outputs.probs) for o in found] == [True] * 2,
    "scoring": lambda found: [0.0 <= abs(o.outputs.score) <= 1.0 for o in found] == [True] * 4,
    "structured_outputs": check_structures,
    "beam_search": lambda found: [len(o.sequences) for o in found] == [3, 3],
    "prefix_caching": check_cached,
    "logits_processors": check_processed,
    "prompt_dicts": check_prompts,
    "metrics": check_metrics,
    "llm_engine": lambda found: sorted(len(o.outputs) for o in found) == [1, 1, 2],
    "async_llm": lambda found: len(found) == 2 and all(found),
    "draft_model": lambda found: len(found) == 3 and found[0] == found[1] == found[2],
    "multi_lora": lambda found: found[1].outputs[0].text.startswith("Arr!") and check_finished(found, 6),
    "rollouts": lambda found: len(found) == 3 and len(set(found)) > 1,
}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_an_example_runs(file, model, monkeypatch, tmp_path):
    for name, value in {"MAX_NUM_SEQS": "8", "MAX_MODEL_LEN": "512", "KV_CACHE_MEMORY_BYTES": str(1 << 22)}.items():
        monkeypatch.setenv(f"TOKENMILL_{name}", value)
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(file))["main"]("demo" if file.stem in OF_DEMO else model)
    assert CHECKS[file.stem](found) in (None, True)


def test_only_the_import_differs():
    for file in FILES:
        tree = ast.parse(file.read_text())
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "tokenmill" in node.module]
        assert [node.module for node in froms] == ["tokenmill"], file.name
        assert {alias.name for node in froms for alias in node.names} <= OF_VLLM, file.name
        assert set(file.stem) <= {*string.ascii_lowercase, "_"}
    assert {file.stem for file in FILES} == CHECKS.keys()
