"""Models that cannot be shared out as the options say are refused before a rank is started; others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.models.family_cases import ALL

from tokenmill.core.config import make_config
from tokenmill.core.errors import UserError
from tokenmill.engine.load import sharing
from tokenmill.engine.running import build
from tokenmill.testing.tiny import make_tiny


class StartedError(Exception):
    """Ranks would be started now."""


@pytest.fixture(autouse=True)
def unstarted(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(config: Any) -> None:
        raise StartedError

    monkeypatch.setattr(build, "start_ranks", start)


def begin(folder: Path, **options: Any) -> None:
    build.build_engine(make_config(model=str(folder), skip_tokenizer_init=True, **options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor_parallel_size": 3}, "4 heads or columns cannot be split over 3 ranks"),
        ({"tensor_parallel_size": 8}, "this model has only 4 attention heads to share out"),
        ({"pipeline_parallel_size": 3}, "this model has only 2 layers to share out"),
        ({"tensor_parallel_size": 3, "pipeline_parallel_size": 2}, "cannot be split over 3 ranks"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "no experts to distribute"),
        ({"tensor_parallel_size": 3, "load_format": "dummy"}, "cannot be split over 3 ranks"),
        ({"tensor_parallel_size": 2, "load_format": "dummy",
          "hf_overrides": {"num_attention_heads": 5, "num_key_value_heads": 5}}, "cannot be split over 2 ranks"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_divide_is_refused_before_ranks_start(options, says, tmp_path):
    with pytest.raises(UserError, match=says):
        begin(make_tiny(tmp_path), **options)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gemma4-0", {"pipeline_parallel_size": 2}, "Gemma 4 cannot be split in stages"),
        ("qwen3_moe-0", {"tensor_parallel_size": 4, "enable_expert_parallel": True, "enable_eplb": True,
                         "eplb_config": {"num_redundant_experts": 1}}, "do not divide by 4 ranks"),
        ("bloom-0", {"tensor_parallel_size": 4}, "6 heads or columns cannot be split over 4 ranks"),
    ],
)  # fmt: skip
def test_families_say_what_they_cannot(name, options, says, tmp_path):
    ALL[name].make(tmp_path)
    with pytest.raises(UserError, match=says):
        begin(tmp_path, **options)


def test_each_rank_needs_an_expert(tmp_path):
    ALL["qwen3_moe-0"].make(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 3, "num_local_experts": 3}))
    with pytest.raises(StartedError):
        begin(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True, load_format="dummy")
    with pytest.raises(UserError, match="3 experts cannot be distributed over 4 ranks"):
        begin(tmp_path, tensor_parallel_size=4, enable_expert_parallel=True, load_format="dummy")


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2},
     {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "load_format": "dummy"},
     {"tensor_parallel_size": 2, "quantization": "int4"}],
    ids=str,
)  # fmt: skip
def test_what_divides_passes(options, tmp_path):
    with pytest.raises(StartedError):
        begin(make_tiny(tmp_path), **options)


def test_what_cannot_be_built_is_left_to_ranks(tmp_path, monkeypatch):
    def fail(*given: Any, **more: Any) -> None:
        raise RuntimeError("meta tensors cannot do that")

    monkeypatch.setattr(sharing, "build_model", fail)
    with pytest.raises(StartedError):
        begin(make_tiny(tmp_path), tensor_parallel_size=3)
