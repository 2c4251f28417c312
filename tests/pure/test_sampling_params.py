"""SamplingParams take or refuse whatever they are given, in one short sentence."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from tokenmill.core.errors import ParameterError
from tokenmill.core.request import SamplingParams

np = pytest.importorskip("numpy")
ODD: list[Any] = [
    *(True, "", b"x", 10**400, -(10**400), 10**5000, float("nan"), float("inf"), -0.0, [], {}, (), [1], 1j, object()),
    *(
        2**63,
        2**64,
        ["\ud800"],
        [""],
        ["x"] * 100,
        range(3),
        {1: 1},
        {"1": 1},
        {1: "a"},
        {1: float("nan")},
        {1: 10**400},
    ),
    *([[1]], [None], [True], {"a"}, np.array([1, 2]), np.array(["a"]), Decimal("0.5"), Fraction(1, 2), [10**5000]),
]


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_any_value_is_taken_or_refused(name: str) -> None:
    for value in ODD:
        try:
            SamplingParams(**{name: value})
        except ParameterError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, value


def test_numbers_of_arrays_are_numbers() -> None:
    torch = pytest.importorskip("torch")
    found = SamplingParams(temperature=np.float32(0.5), n=np.int64(2), seed=np.array(3), top_p=torch.tensor(0.5))
    assert (found.temperature, found.n, found.seed, found.top_p) == (0.5, 2, 3, 0.5)
    assert {type(found.temperature), type(found.n), type(found.seed)} == {float, int}


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_a_character_is_in_no_text(name: str) -> None:
    with pytest.raises(ParameterError, match=f"{name} holds half a character"):
        SamplingParams(**{name: ["a", "b\udc00"]})
    assert SamplingParams(**{name: ["\U0001f600"]})
