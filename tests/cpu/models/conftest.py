"""Runs model tests on every backend of this machine."""

import importlib

import pytest


@pytest.fixture(params=["reference", "native"])
def backend(request):
    """A set of kernels: plain torch, and the native ones where they were built."""
    if request.param == "reference":
        return importlib.import_module("tokenmill.kernels.reference").ReferenceKernels()
    pytest.importorskip("tokenmill._native", reason="the native kernels were not built")
    return importlib.import_module("tokenmill.kernels.cpu").CpuKernels()
