"""Matrices whose codes of 4 bits are entries of a table: products in the interpreter against the dense numbers, and the
machine instructions that a GPU finds entries with, one by one."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import triton
from tests.cpu.triton.bounds import Bounds
from tests.cpu.triton.triton_codes_helpers import TABLES, stored
from tests.cpu.triton.triton_narrow_helpers import REFERENCE, exact, met, relative

from tokenmill.compute.forward import NormSpec
from tokenmill.compute.matrix import StoredMatrix
from tokenmill.kernels.grid import whole_entries
from tokenmill.kernels.triton.kernels import TritonKernels
from tokenmill.kernels.triton.quantised import codes, narrow_stream
from tokenmill.kernels.triton.quantised.narrow import PACKERS, NarrowMatrix
from tokenmill.kernels.triton.quantised.narrow_gemv import narrow_gemv, spread_rows
from tokenmill.kernels.triton.quantised.narrow_round import widened

KINDS = ["fp4/16", "fp4/32", "nf4/64", "bnb/128", "nf4/256", "few/32", "nf4"]


def packed(m: StoredMatrix) -> NarrowMatrix:
    found = TritonKernels().pack(m)
    assert found is not None and found.bits == 4 and found.table
    assert found.data.nbytes == m.shape[0] * -(-m.shape[1] // 128) * 64, "half a byte a weight"
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_table_keeps_its_numbers(kind):
    m = stored(kind, 40, 512)
    weight, dense = packed(m), m.dense()
    ids = torch.tensor([7, 0, 7, 39])
    found = weight.rows(ids, torch.float32)
    assert kind != "fp4/32" or torch.equal(found, dense[ids])
    entries, unit = whole_entries(m.part("table"))
    lost = float((entries * unit - m.part("table")).abs().max())
    most = m.part("scales").max() * (lost + 2**-11 * m.part("table").abs().max())  # scales in half precision
    assert ((found - dense[ids]).abs() <= most * 1.01).all()
    assert torch.equal(widened(weight, torch.float32, pdl=False), weight.rows(torch.arange(40), torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("act", "fused"), [(None, False), ("silu_mul", True)])
@pytest.mark.parametrize("inner", [256, 288])
def test_one_row(kind, act, fused, inner):
    if inner == 288 and kind not in ("fp4/16", "fp4/32", "few/32"):
        pytest.skip("groups fill rows")
    weight = packed(stored(kind, 20, inner, bias=fused))
    x = torch.randn(1, inner)
    norm = NormSpec(torch.rand(inner) + 0.5, 1e-5, offset=0.25) if fused else None
    residual = torch.randn(1, 10) if fused else None
    found = narrow_gemv(x, weight, norm, act, residual, pdl=False, config=(4, 64 if fused else 16, 1, 0))
    rounded, errors = met(spread_rows(x, weight.data.shape[1] // 2, 2, norm, pdl=False), 2, inner)
    assert ((rounded - (x if norm is None else REFERENCE.norm(x, norm))[0]).abs() <= errors * 1.001 + 1e-9).all()
    assert relative(found, exact(rounded[None], weight, None, act, residual)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 33, 100])
@pytest.mark.parametrize("inner", [256, 544])
def test_products(kind, rows, inner):
    """Whatever kernel takes them, against the matrix that was stored."""
    if inner == 544 and kind not in ("fp4/16", "fp4/32", "few/32", "nf4"):
        pytest.skip("groups fill rows")
    m = stored(kind, 44, inner, bias=True)
    kernels, x, residual = TritonKernels(), torch.randn(rows, inner), torch.randn(rows, 44)
    found = kernels.product(x, packed(m), residual=residual)
    expected = REFERENCE.product(x, m, m.bias) + residual
    assert relative(found, expected) < (0.02 if rows == 1 else 0.01)
    assert not any(counted["fallbacks"] for counted in kernels.counters().values())


@pytest.mark.parametrize(("kind", "inner"), [("fp4/16", 144), ("fp4/32", 160), ("nf4/64", 320)])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_kernels_stay_within_their_tensors(kind, inner, rows):
    m = stored(kind, 20, inner)
    kernels, weight, x = TritonKernels(), packed(m), torch.randn(rows, inner)
    with Bounds().watching() as bounds:
        found = kernels.product(x, weight)
    assert bounds.launches and relative(found, exact(x, weight, None, None, None)) < 0.02


def test_tables_without_a_form():
    m = stored("nf4", 8, 64)
    for table in (torch.linspace(-1.0, 1.0, 32), torch.zeros(16)):  # five bits; nothing but zeros
        parts = tuple((name, table if name == "table" else part) for name, part in m.parts)
        assert TritonKernels().pack(StoredMatrix("table", m.shape, parts, m.dense)) is None


def test_scales_that_half_precision_cannot_hold():
    m = stored("nf4/64", 8, 128)
    parts = tuple((name, part * 1e-6 if name == "scales" else part) for name, part in m.parts)
    weight = packed(StoredMatrix("table", m.shape, parts, m.dense))
    assert weight.scales.dtype == torch.bfloat16
    assert relative(weight.rows(torch.arange(8), torch.float32), m.dense() * 1e-6) < 0.006


# What follows runs the instructions of inline assembly, which the interpreter cannot: the few that are used, on
# registers of 32 bits, as NVIDIA's "PTX ISA" says.


def prmt(a: int, b: int, choice: int) -> int:
    """Four bytes of a (0 to 3) and b (4 to 7)."""
    every = a | b << 32
    out = 0
    for i in range(4):
        which = choice >> 4 * i & 15
        assert which < 8, "signs are not spread"
        out |= (every >> 8 * which & 255) << 8 * i
    return out


def lop3(a: int, b: int, c: int, lut: int) -> int:
    """Any function of three bits, 32 times."""
    return sum((lut >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def fma2(a: int, b: int, c: int, kind: torch.dtype) -> int:
    """Two products and sums in half precision, rounded once."""
    first, second, third = (torch.tensor([v], dtype=torch.uint32).view(kind).double() for v in (a, b, c))
    return int((first * second + third).to(kind).view(torch.uint32))


def execute(asm: str, inputs: dict[int, int]) -> dict[int, int]:
    """$n in, $n out."""
    registers = {f"${n}": value for n, value in inputs.items()}
    operations = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
        "shr.u32": lambda a, n: a >> n,
        "prmt.b32": prmt,
        "lop3.b32": lop3,
        "mul.rn.bf16x2": lambda a, b: fma2(a, b, 0x80008000, torch.bfloat16),
        "mul.rn.f16x2": lambda a, b: fma2(a, b, 0x80008000, torch.float16),
        "fma.rn.bf16x2": lambda a, b, c: fma2(a, b, c, torch.bfloat16),
        "fma.rn.f16x2": lambda a, b, c: fma2(a, b, c, torch.float16),
    }
    for line in asm.strip("{ }").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        name, rest = line.strip().split(maxsplit=1)
        target, *sources = re.split(r",\s*", rest)
        registers[target] = operations[name](*(registers[s] if s in registers else int(s, 0) for s in sources))
    return {int(n[1:]): value for n, value in registers.items() if n[0] == "$" and int(n[1:]) not in inputs}


def words() -> list[int]:
    """Words in which every code stands at every place."""
    some = [int(torch.randint(0, 1 << 32, ())) for _ in range(40)]
    return some + [0x11111111 * code for code in range(16)] + [0x01234567, 0x89ABCDEF]


def numbers_of(word: int, table: int) -> list[int]:
    return [codes.entries_of(table)[word >> 4 * i & 15] for i in range(8)]


def table_named(name: str) -> int:
    return codes.table_of(whole_entries(torch.tensor(TABLES[name]))[0])


def test_tables_as_one_number():
    assert codes.entries_of(codes.FLOATS.value) == [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
    assert table_named("fp4") == codes.FLOATS.value
    assert codes.entries_of(table_named("few"))[:5] == [-3, 0, 1, 5, 0]


@pytest.mark.parametrize("name", TABLES)
def test_instructions_that_find_bytes(name):
    table = table_named(name)
    for word in words():
        even, odd = execute(codes._bytes_asm(table), {2: word}).values()
        found = [(half >> 8 * i & 255 ^ 128) - 128 for i in range(4) for half in (even, odd)]
        assert found == numbers_of(word, table)


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("name", TABLES)
def test_instructions_that_find_planes(name, half):
    table, kind = table_named(name), torch.bfloat16 if half == "bf16" else torch.float16
    for word in words():
        found = execute(codes._planes_asm(table, half), {4: word})
        each = torch.tensor([found[plane] for plane in range(4)], dtype=torch.uint32).view(kind)
        assert each.view(4, 2).T.flatten().tolist() == numbers_of(word, table)


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_instructions_that_move_bits_of_floats(half):
    kind = torch.bfloat16 if half == "bf16" else torch.float16
    for word in words():
        every = numbers_of(word, codes.FLOATS.value)
        for plane in range(4):
            found = execute(codes.float_asm(4 * plane, half), {1: word})[0]
            pair = torch.tensor([found], dtype=torch.uint32).view(kind)
            assert pair.tolist() == [every[plane], every[4 + plane]]


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("zero", [-8, 0, 3, 8])
def test_instructions_that_find_integers(half, zero):
    kind = torch.bfloat16 if half == "bf16" else torch.float16
    most = codes.more_than_code(triton.language.bfloat16 if half == "bf16" else triton.language.float16)
    less = torch.full((2,), -most - zero, dtype=kind).view(torch.uint32)
    for word in words():
        for plane in range(4):
            found = execute(codes.integer_asm(4 * plane, half), {1: word, 2: int(less)})[0]
            pair = torch.tensor([found], dtype=torch.uint32).view(kind)
            assert pair.tolist() == [(word >> 4 * place & 15) - 8 - zero for place in (plane, 4 + plane)]


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("table", [0, codes.FLOATS.value])
def test_instructions_that_scale_what_they_find(half, table):
    kind = torch.bfloat16 if half == "bf16" else torch.float16
    scales = torch.tensor([0.0123, -1.7], dtype=kind)
    steps = int(scales.view(torch.uint32))
    for word in words():
        every = numbers_of(word, table) if table else [(word >> 4 * i & 15) - 8 for i in range(8)]
        for plane in range(4):
            if table:
                found = execute(narrow_stream._times(codes.float_asm(4 * plane, half), 2, half), {1: word, 2: steps})
            else:
                less = -136.0 if half == "bf16" else -1032.0
                given = {1: word, 2: int(torch.full((2,), less, dtype=kind).view(torch.uint32)), 3: steps}
                found = execute(narrow_stream._times(codes.integer_asm(4 * plane, half), 3, half), given)
            pair = torch.tensor([found[0]], dtype=torch.uint32).view(kind)
            assert torch.equal(pair, torch.tensor([every[plane], every[4 + plane]], dtype=kind) * scales)


def test_a_form_of_its_own_needs_no_more_than_a_line_in_the_table(monkeypatch):
    """docs/add-a-weight-format.md: what packs it is asked, and its product is its own."""
    made = SimpleNamespace(product=lambda x: x @ torch.ones(4, 8).T)
    monkeypatch.setitem(PACKERS, "of its own", lambda m: made)
    kernels = TritonKernels()
    assert kernels.pack(StoredMatrix("of its own", (4, 8), (), lambda: torch.ones(4, 8))) is made
    assert kernels.product(torch.ones(2, 8), made).tolist() == [[8.0] * 4] * 2
