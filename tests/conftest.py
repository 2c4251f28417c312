"""Settings of every test process: quiet threads, because several test processes share few cores; and Triton's
interpreter where there is no GPU (it must be chosen before anything imports triton). The collector does not look again
and again at modules and tests that stay to the end. And a profile of Hypothesis whose
cases are the same each time, as torch's random numbers are with it: `make test` judges a change, not luck; plain
`pytest` goes on looking for new cases."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pathlib
import sys
import tempfile
import zlib
from collections.abc import Iterator

import pytest

from tokenmill.core.config import calm_threads

calm_threads()
# A person's stored models are no part of a test.
os.environ["TOKENMILL_HOME"] = str(pathlib.Path(tempfile.gettempdir()) / f"tokenmill-tests-{os.getpid()}")
if not pathlib.Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
with contextlib.suppress(ImportError):  # a machine that only runs tests/gpu may lack it
    from hypothesis import settings

    settings.register_profile("settled", derandomize=True, database=None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that collecting makes is garbage; left to the collector it is a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000)  # tests that make an application or a model allocate that much at once


@pytest.fixture(autouse=True)
def settled_numbers(request: pytest.FixtureRequest) -> None:
    """With the settled profile each test's random tensors are its own and always the same."""
    torch = sys.modules.get("torch")
    if torch is not None and request.config.getoption("--hypothesis-profile", default=None) == "settled":
        seed = zlib.crc32(request.node.nodeid.encode())
        torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack for each device that is not there
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@pytest.fixture(autouse=True, scope="module")
def commands_made_once() -> None:
    """Typer reads every verb's signature anew for each line that a test calls, which takes longer than the line."""
    testing = sys.modules.get("typer.testing")
    if testing is not None and not hasattr(testing._get_command, "cache_info"):
        testing._get_command = functools.cache(testing._get_command)
