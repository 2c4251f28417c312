"""Cases of families where Transformers is older than ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cpu.models.config_types_helpers import LACKING

OLDER = """
import transformers
from tests.cpu.models import config_types_helpers as types

class Older:
    def __getattr__(self, name):
        if name in ("InternLM3Config", "GptOssConfig", "Mistral4Config"):
            raise AttributeError(name)
        return getattr(transformers, name)

types.transformers = Older()
from tests.cpu.models import families_helpers, family_cases, foreign_configs
assert sorted(types.LACKING) == ["GptOssConfig", "InternLM3Config", "Mistral4Config"], types.LACKING
assert "llama" in family_cases.FAMILIES and "internlm3" not in family_cases.FAMILIES
assert "qwen2" in families_helpers.CASES and "gpt-oss" not in families_helpers.CASES
assert foreign_configs.tiny("diffllama").model_type == "diffllama"
"""


def test_every_class_is_here():
    assert LACKING == []


def test_an_older_transformers_leaves_its_cases_out():
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(root)]!r}\n{OLDER}"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
