"""The shorter way from a call to its launch tells apart whatever Triton does, and hands over the same arguments."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels.triton import quick


def kernel(x, y, n, m, eps, SIZE: tl.constexpr, KIND: tl.constexpr = 0):
    """Never run."""


FUNCTION = JITFunction(kernel, do_not_specialize=["m"])
BINDER = create_function_from_signature(FUNCTION.signature, FUNCTION.params, CUDABackend(GPUTarget("cuda", 90, 32)))
STORE = {kind: torch.zeros(64, dtype=kind) for kind in (torch.bfloat16, torch.float32, torch.int32, torch.int64)}
WHOLE = (0, 1, 2, 15, 16, 17, 32, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), 2**40, 2**63, 2**63 + 16)


def anything(rng):
    """An argument that kernels get: tensors at any place, whole numbers of any size, others."""
    tensor = STORE[rng.choice([*STORE])][rng.choice([0, 1, 2, 4, 8, 16]) :]
    described = STORE[torch.bfloat16].view(8, 8)
    return rng.choice([
        tensor, tensor, rng.choice(WHOLE), rng.choice(WHOLE), None, True, False, 0.0, 1.0,
        TensorDescriptor(described, [8, 8], [8, 1], [rng.choice([2, 4]), 8]),
    ])  # fmt: skip


def constant(rng):
    return rng.choice([0, 1, True, False, 0.0, 1.0, 16, None, "silu", torch.bfloat16])


def calls(count):
    rng = random.Random(5)
    for _ in range(count):
        given = {
            "x": anything(rng), "y": anything(rng), "n": anything(rng), "m": rng.choice(WHOLE), "eps": anything(rng),
            "SIZE": constant(rng), "KIND": constant(rng), "num_warps": rng.choice([1, 4]),
        }  # fmt: skip
        yield given if rng.random() < 0.8 else {k: v for k, v in given.items() if k != "KIND"}


def known_to_triton(given):
    """What Triton compiles for: its specialisation, types of constants included."""
    _, special, options = BINDER(**given)
    return repr([(kind, type(value), value) for kind, value in special]), repr(sorted(options.items()))


def test_what_triton_tells_apart_is_told_apart():
    seen: dict[object, object] = {}
    kinds = set()
    for given in calls(4000):
        names = (2, *list(given)[2:])
        form = quick.form_of(FUNCTION, names)
        types = tuple(map(type, given.values()))
        key, _ = form.way(types)[0](0, *given.values())
        key = types, *key
        kinds.add(known_to_triton(given))
        assert seen.setdefault((names, *key), known_to_triton(given)) == known_to_triton(given)
    assert len(kinds) > 1000, "the calls differ"
    assert len(seen) < 1.2 * len(kinds), "and no kernel is looked up under many names"


@pytest.fixture
def launches(monkeypatch):
    """What Triton's way and the short one hand to a launcher of a GPU that is not there."""
    found: list[tuple[str, tuple]] = []

    def launch(*args):
        found.append(("short", args))

    def run(self, *args, grid, warmup, **kwargs):
        bound, special, _ = BINDER(*args, **kwargs)
        found.append(("triton", tuple(bound.values())))
        launcher = SimpleNamespace(
            global_scratch_size=run.asks, profile_scratch_size=0, launch=launch, launch_cooperative_grid=False,
            launch_pdl=True,
        )  # fmt: skip
        return SimpleNamespace(run=launcher, function=7, packed_metadata="packed", special=special)

    run.asks = 0
    monkeypatch.setattr(quick, "_triton", run)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    return SimpleNamespace(found=found, run=run)


def call(function, grid, *args, **kwargs):
    return quick._run(function, *args, grid=grid, warmup=False, **kwargs)


def test_the_launcher_gets_what_it_would_have_got(launches):
    function = JITFunction(kernel, do_not_specialize=["m"])
    x = STORE[torch.bfloat16]
    first = call(function, (5, 3), x, None, 17, eps=0.5, m=9, SIZE=16, num_warps=4)
    again = call(function, (5, 3), x, None, 17, eps=0.25, m=10, SIZE=16, num_warps=4)
    assert first is again and [how for how, _ in launches.found] == ["triton", "short"]
    sent = launches.found[1][1]
    assert sent[:13] == (5, 3, 1, 99, 7, False, True, None, None, "packed", None, None, None)
    assert sent[13:] == (x.data_ptr(), None, 17, 10, 0.25, None, None), "by parameters, constants left out"
    for grid in ((5,), (5, 3, 2)):
        call(function, grid, x, None, 17, eps=0.25, m=10, SIZE=16, num_warps=4)
        assert launches.found[-1][1][:3] == (*grid, 1, 1)[:3]


def test_another_kind_is_compiled_first(launches):
    function = JITFunction(kernel, do_not_specialize=["m"])
    x = STORE[torch.bfloat16]
    plain = {"eps": 0.5, "m": 9, "SIZE": 16}
    for given in (
        (x, None, 17), (x[1:], None, 17), (x, x, 17), (x, None, 1), (x, None, 16), (x, None, 2**33),
        (STORE[torch.float32], None, 17),
    ):  # fmt: skip
        before = len(launches.found)
        call(function, (1,), *given, **plain)
        call(function, (1,), *given, **plain)
        assert [how for how, _ in launches.found[before:]] == ["triton", "short"]
    for more in ({"SIZE": 32}, {"SIZE": True}, {"num_warps": 8}):
        before = len(launches.found)
        call(function, (1,), x, None, 17, **plain | more)
        assert [how for how, _ in launches.found[before:]] == ["triton"]


def test_what_cannot_take_the_short_way_takes_tritons(launches):
    function = JITFunction(kernel, do_not_specialize=["m"])
    x, plain = STORE[torch.bfloat16], {"eps": 0.5, "m": 9}
    ways = [
        ((1,), {"SIZE": [1]}), (lambda bound: (1,), {"SIZE": 1}), ((1,), {"SIZE": 1, "y": (x, x)}),
    ]  # fmt: skip
    for grid, more in ways:
        given = plain | {"y": None} | more
        for _ in range(3):
            call(function, grid, x, n=17, **given)
    assert {how for how, _ in launches.found} == {"triton"}
    launches.run.asks = 512
    for _ in range(3):
        call(function, (1,), x, x, 17, **plain, SIZE=2)
    assert {how for how, _ in launches.found} == {"triton"}, "memory that a launch asks for is Triton's business"


def test_it_is_put_in_place_and_taken_away():
    own = JITFunction.run
    quick.install(wanted=True)
    assert JITFunction.run is (quick._run if triton.__version__.startswith(quick.VERSION) else own)
    quick.install(wanted=True)
    quick.install(wanted=False)
    assert JITFunction.run is own
