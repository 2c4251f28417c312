"""Which layers a trace leaves out: equal ones behind equal ones, and none of which anything is not understood."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from tokenmill.compute.forward import KVSpec, NormSpec
from tokenmill.engine.load.ahead_layers import Looks, Passed, equal_layers_once, needed
from tokenmill.models.decoder import Decoder


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        ("a", [0]),
        ("aaaaaaaa", [0, 1, 7]),
        ("abababab", [0, 1, 2, 7]),
        ("baaaaaaa", [0, 1, 2, 7]),
        ("aaabaaabaaab", [0, 1, 2, 3, 4, 11]),
        ("aaaaac", [0, 1, 4, 5]),
        ("abcdef", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_every_layer_is_seen_behind_every_other(layers: str, kept: list[int]) -> None:
    looks = [ord(name) for name in layers]
    found = sorted(needed(looks))
    assert found == kept
    pairs = set(pairwise(looks))
    assert {(looks[i], looks[i + 1]) for i in found if i + 1 in found} == pairs, "and right behind it"
    assert found[-1] == len(layers) - 1


def norm(size: int = 8, dtype: torch.dtype = torch.float32, **more: Any) -> NormSpec:
    return NormSpec(torch.ones(size, dtype=dtype, device="meta"), 1e-5, **more)


class Held:
    """As an object of the package that holds what it is given."""

    __module__ = "tokenmill.layers.made_up"

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Foreign:
    """Of somebody else's."""


def test_numbers_of_layers_and_names_are_no_difference() -> None:
    looks = Looks()
    one, other = (
        Held(
            layer=n, state=n, names=(f"model.layers.{n}.q_proj",), norm=norm(), call=partial(max, 3), near=lambda: True
        )
        for n in range(2)
    )
    one.me, other.me = one, other
    assert looks.of(one) == looks.of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (norm(8), norm(9)),
        (norm(), norm(dtype=torch.float16)),
        (norm(), norm(offset=1.0)),
        (Held(at="attention"), Held(at="mlp")),
        (Held(window=1), Held(window=2)),
        (Held(window=1), Held(window=True)),
        (Held(window=1), Held(window=1.0)),
        (Held(window=0), Held(window=None)),
        (KVSpec("full", 1, 16, 16), KVSpec("full", 2, 16, 16)),
        (Held(parts=[1, 2]), Held(parts=(1, 2))),
        (Held(parts={"a": 1}), Held(parts={"b": 1})),
        (Held(layer=norm(8)), Held(layer=norm(9))),
        (partial(max, 1), partial(max, 2)),
        (torch.empty(4, 6, device="meta"), torch.empty(6, 4, device="meta").T),
        (Foreign(), Foreign()),
    ],
)
def test_whatever_may_be_launched_otherwise_is_a_difference(one: Any, other: Any) -> None:
    looks = Looks()
    assert looks.of(one) == looks.of(one)
    assert looks.of(one) != looks.of(other)
    assert looks.of(Held(deep=[one])) != looks.of(Held(deep=[other]))


def test_models_leave_layers_out_and_are_whole_again_for_others() -> None:
    before = Decoder.forward

    def made() -> tuple[Decoder, list[int]]:
        decoder, ran = Decoder.__new__(Decoder), list[int]()
        decoder.first, decoder.taps, decoder.is_first, decoder.norm = 0, (), False, None
        decoder.layers = [Layer(n, ran) for n in range(6)]  # type: ignore[misc]
        return decoder, ran

    class Layer:
        __module__ = "tokenmill.layers.made_up"

        def __init__(self, layer: int, ran: list[int]) -> None:
            self.layer, self.ran = layer, ran

        def __call__(self, x: torch.Tensor, ctx: Any) -> torch.Tensor:
            self.ran.append(self.layer)
            return x + 1

    ctx: Any = Held(taps=None)
    with equal_layers_once():
        for decoder, ran in (made(), made()):
            looked = Looks()
            assert len({looked.of(layer) for layer in decoder.layers}) == 1
            for _ in range(2):
                assert decoder.forward(torch.zeros(1), ctx).item() == 3.0
                assert ran == [0, 1, 5]
                ran.clear()
            assert [isinstance(layer, Passed) for layer in decoder.layers] == [False, False, True, True, True, False]
    assert Decoder.forward is before
    decoder, _ = made()
    assert decoder.forward(torch.zeros(1), ctx).item() == 6.0
