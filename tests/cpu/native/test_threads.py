"""The pool: callers from several threads, changes of the thread count, and children after fork."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from tokenmill import _native as native
from tokenmill.kernels.cpu import CpuKernels


@pytest.fixture(scope="module", params=[None], autouse=True)
def isa():
    """The pool does not care for instruction sets: once is enough."""
    return None


def product(kernels, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1024, 512, generator=generator)
    return kernels.product(torch.randn(40, 512, generator=generator), weight)


def test_callers_from_several_threads_get_what_one_gets(kernels, threads):
    threads(3)
    wanted = [product(kernels, seed) for seed in range(4)]
    failures: list[str] = []

    def call(seed: int) -> None:
        for _ in range(20):
            if not torch.equal(product(kernels, seed), wanted[seed]):
                failures.append(f"seed {seed}")

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for count in (1, 4, 2, 5):
        threads(count)
    for caller in callers:
        caller.join()
    assert not failures


@pytest.mark.parametrize("rows", [1, 9])
def test_ranges_that_do_not_divide_and_threads_without_one(kernels, threads, rows):
    """A thread takes from the ranges of others when its own is done: nothing is lost or done twice."""
    for tiles in (1, 2, 3, 5, 40):
        weight = torch.randn(64 * tiles, 1024, generator=torch.Generator().manual_seed(tiles))
        x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(0))
        threads(1)
        wanted = kernels.product(x, weight)
        for count in (2, 3, 7):
            threads(count)
            for _ in range(5):
                assert torch.equal(kernels.product(x, weight), wanted), f"{tiles} tiles, {count} threads"


def test_the_default_is_what_the_process_may_use(threads):
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= native.thread_limit() <= allowed
    threads(0)
    assert native.threads() == native.thread_limit()
    threads(3)
    assert native.threads() == 3


def test_kernels_take_as_many_threads_as_torch_was_told(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    CpuKernels()
    assert native.threads() == 1
    CpuKernels(threads=3)
    assert native.threads() == 3
    torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_makes_its_own_pool(kernels, threads):
    threads(2)
    wanted = product(kernels, 1).numpy().tobytes()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that waits for threads it does not have ends here
        # Bytes, because torch's own thread pool does not survive a fork.
        os._exit(0 if product(kernels, 1).numpy().tobytes() == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="no instruction set"):
        native.set_isa("mmx")
