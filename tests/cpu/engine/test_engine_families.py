"""Every family against Transformers, through the whole engine, in six modes.

The plain run is compared with Transformers (every prompt and output logprob); every other mode must give the plain
run's bytes, which is more than Transformers' tolerance asks for.
"""

from __future__ import annotations

import pytest
from tests.cpu.engine.engine_families_helpers import ALL, APART, HERE, NEW, Family, five_modes, own_process

TURNS = ("phi3-long",)
"""Transformers turns a whole sequence of these by its length, at 64: every answer must end behind that."""


@pytest.mark.parametrize(("name", "backend"), HERE)
def test_family_in_five_modes_here(name, backend, tmp_path):
    five_modes(Family(ALL[name], tmp_path, 64 if name in TURNS else NEW), backend)


@pytest.mark.parametrize("name", APART)
def test_family_in_a_process_of_its_own(name, tmp_path):
    own_process(Family(ALL[name], tmp_path))
