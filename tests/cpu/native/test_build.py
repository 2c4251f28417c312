"""The native module exists wherever it can be built; elsewhere the native tests are skipped aloud."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from tokenmill.kernels import ReferenceKernels, make_kernels


@pytest.fixture(autouse=True)
def isa():
    """Not about instruction sets."""


def test_a_machine_with_a_compiler_has_the_native_module():
    if importlib.util.find_spec("tokenmill._native") is None:
        if shutil.which("c++") is None:
            pytest.skip("no C++ compiler here: kernels run on torch, the native tests are left out")
        pytest.fail("csrc did not compile, or was not rebuilt: pip install -v -e . shows why")
    from tokenmill import _native

    assert _native.isas()[0] == "scalar", "only this machine's kernels are compiled: make setup-tests"
    assert type(make_kernels("cpu")) is not ReferenceKernels
