"""Every family of the table through the whole engine against Transformers, in the modes of test_engine_families.

TOKENMILL_FAMILIES=1 runs every twist on every backend; without it the first twist of each family
that test_engine_families lacks runs once.
"""

from __future__ import annotations

import os

import pytest
from tests.cpu.engine.engine_families_helpers import ONE_OF_EACH, Family, five_modes, own_process
from tests.cpu.engine.engines import BACKENDS
from tests.cpu.models.family_cases import ALL, FAMILIES

FULL = os.environ.get("TOKENMILL_FAMILIES") == "1"
OFTEN = [f"{name}-0" for name in FAMILIES if name.replace("_", "-") not in ONE_OF_EACH or FULL]
APART = ("qwen2_moe-0",)


@pytest.mark.parametrize("backend", BACKENDS if FULL else BACKENDS[-1:])
@pytest.mark.parametrize("name", ALL if FULL else OFTEN)
def test_family_in_five_modes_here(name, backend, tmp_path):
    five_modes(Family(ALL[name], tmp_path, new=48 if FULL else 20), backend)


@pytest.mark.parametrize("name", OFTEN if FULL else APART)
def test_family_in_a_process_of_its_own(name, tmp_path):
    own_process(Family(ALL[name], tmp_path, new=48 if FULL else 20))
