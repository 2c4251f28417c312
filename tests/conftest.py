"""Settings of every test process: quiet threads, because several test processes share few cores; and Triton's
interpreter where there is no GPU (it must be chosen before anything imports triton). And a profile of Hypothesis whose
cases are the same each time, as torch's random numbers are with it: `make test` judges a change, not luck; plain
`pytest` goes on looking for new cases."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import zlib

import pytest

from tokenmill.core.config import calm_threads

calm_threads()
if not pathlib.Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
with contextlib.suppress(ImportError):  # a machine that only runs tests/gpu may lack it
    from hypothesis import settings

    settings.register_profile("settled", derandomize=True, database=None)


@pytest.fixture(autouse=True)
def settled_numbers(request: pytest.FixtureRequest) -> None:
    """With the settled profile each test's random tensors are its own and always the same."""
    torch = sys.modules.get("torch")
    if torch is not None and request.config.getoption("--hypothesis-profile", default=None) == "settled":
        torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
