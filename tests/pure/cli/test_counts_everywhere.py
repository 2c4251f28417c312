"""32k stands for a number wherever an option is given: as a flag, in a YAML file, in the environment."""

from __future__ import annotations

import pytest

from tokenmill.core.config import make_config
from tokenmill.core.config_file import read_config_file
from tokenmill.core.errors import ParameterError
from tokenmill.core.text_values import read_count


@pytest.mark.parametrize(("text", "count"), [
    ("32", 32), (" 7 ", 7), ("-1", -1), ("32k", 32_000), ("32K", 32_768), ("2M", 2 << 20), ("1.5k", 1_500),
    ("2GB", 2 * 10**9), ("2GiB", 2 << 30), ("abc", None), ("", None), ("3 k", None), ("1e3", None), ("0x10", None),
])  # fmt: skip
def test_a_count_in_words(text, count):
    assert read_count(text) == count


def test_of_a_file_and_of_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "options.yaml"
    file.write_text("max-model-len: 2k\nmax_num_batched_tokens: 1K\nmodel: 32k\nmax-body-bytes: 2MB\n")
    engine, server = read_config_file(file)
    assert engine == {"max_model_len": 2_000, "max_num_batched_tokens": 1024, "model": "32k"}
    assert server == {"max_body_bytes": 2_000_000}
    monkeypatch.setenv("TOKENMILL_MAX_MODEL_LEN", "4k")
    assert make_config().model.max_model_len == 4_000


@pytest.mark.parametrize(("name", "text", "wanted"), [
    ("MAX_MODEL_LEN", "many", "a whole number"), ("GPU_MEMORY_UTILIZATION", "half", "a number"),
    ("ENFORCE_EAGER", "maybe", "true or false"), ("SPECULATIVE_CONFIG", "{", "JSON"),
])  # fmt: skip
def test_what_the_environment_should_have_said(name, text, wanted, monkeypatch):
    monkeypatch.setenv(f"TOKENMILL_{name}", text)
    with pytest.raises(ParameterError, match=f"TOKENMILL_{name} must be {wanted}.*{text!r}"):
        make_config()


def test_more_threads_than_cores_are_told(tmp_path):
    from tokenmill import LLM
    from tokenmill.core.cores import usable_cores

    with LLM("demo", max_model_len=64, threads=usable_cores() + 3) as llm:
        assert any("threads for" in reason for reason in llm.built.facts.reasons)
