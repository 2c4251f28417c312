"""Leaving out repeated layers of a trace that needs each kernel once and no numbers. Owns: which layers of a model are
equal, and skipping them in its forward passes.

A layer is skipped if an equal layer has already run behind an equal predecessor. The predecessor matters because a
layer's launches may depend on what reads the stream before it, and because each group of layers lays out its part of a
step once. Layers that cannot be compared count as different: the trace is then longer, but complete. Must not know:
families, kernels.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Iterator
from typing import Any

import torch

from tokenmill.models.decoder import Decoder

PLACES = ("layer", "state")
"""Attributes that say where a layer's share of a pool lies."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Looks:
    """Numbers layers by their kind: layers get the same number if they launch the same kernels."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}
        self.known: dict[int, tuple[Any, int]] = {}
        """Numbers by object id, with the object itself, so that its id is not reused. Layers share many objects."""

    def of(self, value: Any) -> int:
        """The number of a layer, or of anything in it."""
        if isinstance(value, str):  # a tensor's name tells which layer it is of
            return self._number(("text", _NUMBER.sub("", value)))
        if value is None or isinstance(value, (int, float, complex, bytes, torch.dtype, torch.device)):
            return self._number((type(value), value))
        found = self.known.get(id(value))
        if found is None:
            self.known[id(value)] = value, self._number(("within", type(value)))  # where it holds itself
            found = self.known[id(value)] = value, self._number((type(value), *self._parts(value)))
        return found[1]

    def _number(self, look: Any) -> int:
        return self.numbers.setdefault(look, len(self.numbers))

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield from (value.dtype, tuple(value.shape), value.stride())
        elif isinstance(value, (tuple, list)):
            yield from map(self.of, value)
        elif isinstance(value, dict):
            yield from ((self.of(key), self.of(part)) for key, part in value.items())
        elif isinstance(value, types.FunctionType):
            yield id(value.__code__)
            yield from (self.of(part) for part in (value.__defaults__, value.__kwdefaults__))
            yield from (self.of(cell.cell_contents) for cell in value.__closure__ or ())
        elif isinstance(value, types.MethodType):
            yield from (self.of(value.__func__), self.of(value.__self__))
        elif isinstance(value, functools.partial):
            yield from map(self.of, (value.func, value.args, value.keywords))
        elif names := _attributes(value):
            for name in names:
                part = getattr(value, name, None)
                yield name, None if name in PLACES and isinstance(part, int) else self.of(part)
        else:
            yield id(value)


def _attributes(value: Any) -> list[str]:
    """The attributes of an object of this package; foreign objects are not looked into."""
    if not type(value).__module__.startswith("tokenmill."):
        return []
    names = set(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names.update([slots] if isinstance(slots, str) else slots)
    return sorted(names - {"__weakref__", "__dict__"})


class Passed:
    """Takes the place of a layer that is left out."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Any, ctx: Any) -> Any:
        """Return the stream unchanged."""
        return x


def needed(looks: list[int]) -> set[int]:
    """The layers that show every layer behind every other that there is, and the last one."""
    kept, seen = {len(looks) - 1}, set[tuple[int, int]]()
    for place, look in enumerate(looks):
        pair = looks[place - 1] if place else -1, look
        if pair not in seen:
            seen.add(pair)
            kept |= {max(0, place - 1), place}
    return kept


@contextlib.contextmanager
def equal_layers_once() -> Iterator[None]:
    """Within this context models leave out layers that launch nothing new. Each decides this at its first computation,
    when it is still whole."""
    whole, met = Decoder.forward, list[Decoder]()

    def forward(decoder: Decoder, tokens: Any, ctx: Any) -> Any:
        if not any(decoder is other for other in met):
            met.append(decoder)
            looks = Looks()
            kept = needed([looks.of(layer) for layer in decoder.layers])
            decoder.layers = [layer if i in kept else Passed(layer) for i, layer in enumerate(decoder.layers)]
        return whole(decoder, tokens, ctx)

    Decoder.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Decoder.forward = whole  # type: ignore[method-assign]
