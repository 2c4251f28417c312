"""Every native test runs on each instruction set that this machine has, unless it says otherwise."""

from __future__ import annotations

import importlib.util

import pytest

BUILT = importlib.util.find_spec("tokenmill._native") is not None
collect_ignore_glob = [] if BUILT else ["test_[!b]*.py"]

if BUILT:
    from tokenmill import _native as native

    @pytest.fixture(params=native.isas(), autouse=True)
    def isa(request):
        """Force one instruction set; the machine's best one afterwards."""
        native.set_isa(request.param)
        yield request.param
        native.set_isa(native.isas()[-1])


@pytest.fixture
def threads():
    """A function that sets the thread count; restored afterwards."""
    before = native.threads()
    yield native.set_threads
    native.set_threads(before)


@pytest.fixture
def kernels():
    from tokenmill.kernels.cpu import CpuKernels

    return CpuKernels()
