"""Sets of numbers as the grammar engine enforces them. Owns: borders, steps and gaps in the few keywords that it has.

What has no such form is refused. Must not know: other types, how sets are worked out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from math import inf
from typing import Any, NoReturn

from tokenmill.structured.limits import refuse
from tokenmill.structured.shapes import Number, meet_numbers

LARGEST = 1 << 53
MAX_LISTED = 1000
MAX_GAPS = 24
MAX_STEP = 10_000

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NumberForms:
    """Writes numbers. `refuse` names the place."""

    refuse: Callable[[str], NoReturn]

    def write(self, n: Number, types: list[str], listed: list[Any], options: list[Plain]) -> None:
        if n == Number():
            types.append("number")
        elif n.lo is not None and n.lo == n.hi:
            listed.append(self.exact(n.lo))
        elif n.kind == "integer" and n.skips:
            listed += self.integers(n)
        elif n.skips or n.kind == "fraction":
            options += self._between(n)
        else:
            made: Plain = {"type": "integer" if n.kind == "integer" else "number"}
            n = _step_inside(n)
            lo, hi = n.lo, n.hi
            # Beyond 2^53 the engine counts inexactly: a narrower border is safe, a wider one is not.
            hi = None if hi is None else min(hi, Fraction(LARGEST))
            lo = None if lo is None else max(lo, Fraction(-LARGEST))
            if lo is not None:
                made["exclusiveMinimum" if n.lo_open and lo == n.lo else "minimum"] = self.exact(lo)
            if hi is not None:
                made["exclusiveMaximum" if n.hi_open and hi == n.hi else "maximum"] = self.exact(hi)
            if n.step is not None:
                odd = n.step.numerator
                while odd % 2 == 0 or odd % 5 == 0:
                    odd //= 2 if odd % 2 == 0 else 5
                if odd > MAX_STEP:  # remainders are states of an automaton
                    self.refuse(f"multipleOf has more than {MAX_STEP} remainders to follow")
                made["multipleOf"] = self.exact(n.step)
            options.append(made)

    def integers(self, n: Number) -> list[int]:
        """All integers of the set, or only those near zero: a narrower set is safe."""
        lo = -MAX_LISTED // 2 if n.lo is None else int(n.lo)
        hi = max(lo, 0) + MAX_LISTED // 2 if n.hi is None else int(n.hi)
        lo = max(lo, hi - MAX_LISTED) if n.lo is None else lo
        step = n.step or Fraction(1)
        return [
            i
            for i in range(lo, min(hi, lo + MAX_LISTED) + 1)
            if (i / step).denominator == 1 and all((i / s).denominator > 1 for s in n.skips)
        ]

    def _between(self, n: Number) -> list[Plain]:
        """Numbers between neighbouring integers or multiples, near zero: a narrower set is safe."""
        grids = [*n.skips, *([Fraction(1)] if n.kind == "fraction" else [])]
        if len(grids) != 1 or n.step is not None:
            self.refuse("multiples of one number that are not multiples of another cannot be told apart")
        first = -MAX_GAPS // 2
        if n.hi is not None:
            first = min(first, n.hi // grids[0] - MAX_GAPS)
        if n.lo is not None:
            first = max(first, n.lo // grids[0])
        found: list[Plain] = []
        for k in range(first, first + MAX_GAPS + 1):
            gap = Number(lo=k * grids[0], lo_open=True, hi=(k + 1) * grids[0], hi_open=True)
            part = meet_numbers(gap, Number(lo=n.lo, lo_open=n.lo_open, hi=n.hi, hi_open=n.hi_open))
            if part is not None:
                self.write(part, [], [], found)
        return found

    def exact(self, value: Fraction) -> int | float:
        if value.denominator == 1 and abs(value) <= LARGEST:
            return int(value)
        near = float(value) if abs(value) <= LARGEST else inf
        if near == inf or abs(near) < 1e-9 or Fraction(Decimal(repr(near))) != value or not _is_read(near):
            self.refuse("it holds a number that is too large or too long to be compared exactly")
        return near


def _is_read(number: float) -> bool:
    """Does the engine read this very number? It takes the digits as a whole number, which it rounds, and shifts the
    point, which rounds again: of 17 digits it may make a neighbour."""
    _, digits, shift = Decimal(repr(abs(number))).as_tuple()
    whole, power = float(int("".join(map(str, digits)))), float(f"1e{abs(int(shift))}")
    return (whole * power if int(shift) > 0 else whole / power) == abs(number)


def _step_inside(n: Number) -> Number:
    """Where an open whole border and the other one lie between the same two integers, the engine takes the border
    itself in: it moves inside by less than any written number would (a narrower set is safe)."""
    if n.kind == "integer" or n.lo is None or n.hi is None or n.step is not None or n.hi - n.lo >= 1:
        return n
    places = max(len(str(_decimal(b)).partition(".")[2]) for b in (n.lo, n.hi))
    tiny = Fraction(1, 10 ** min(9, places + 6))
    low = n.lo_open and n.lo >= 0 and n.lo.denominator == 1
    high = n.hi_open and n.hi <= 0 and n.hi.denominator == 1
    if (low or high) and n.hi - n.lo <= tiny:
        refuse("the borders of a number lie too close to each other to be compared exactly.")
    if low:
        return replace(n, lo=n.lo + tiny, lo_open=False)
    return replace(n, hi=n.hi - tiny, hi_open=False) if high else n


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)
