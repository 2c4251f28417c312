"""Text parts of models that also see, through the whole engine, against Transformers."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tests.cpu.engine.engine_families_helpers import Family, five_modes
from tests.cpu.engine.engines import BACKENDS
from tests.cpu.models.text_part_cases import CASES, Seeing

FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"


@pytest.mark.parametrize("name", CASES if FULL else ("gemma3",))
def test_in_five_modes(name: str, tmp_path: Any) -> None:
    five_modes(Family(Seeing(name), tmp_path), BACKENDS[-1])
