"""The text part of a model that also takes images or audio, in the form that quantising needs. Owns: its names, and the
stored ones.

The image and audio parts stay unchanged. Must not know: methods, files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.compute.model import Checkpoint
from tokenmill.models.registry import read, text_alone
from tokenmill.models.text_names import text_names
from tokenmill.models.text_part import outer_of


@dataclass(frozen=True, slots=True)
class TextTensors:
    """The part that is quantised: config, and tensors under the family's names. names: those names -> the stored ones,
    where they differ."""

    config: dict[str, Any]
    ckpt: Checkpoint
    names: Mapping[str, str] = field(default_factory=dict)

    def stored(self, name: str) -> str:
        """The stored name of a tensor, of a module, or of a tensor beside a weight."""
        at = name
        while at:
            if at in self.names:
                return self.names[at] + name[len(at) :]
            if f"{at}.weight" in self.names:
                return self.names[f"{at}.weight"].removesuffix(".weight") + name[len(at) :]
            at = at.rpartition(".")[0]
        return name


def part_of(config: dict[str, Any], ckpt: Checkpoint) -> TextTensors:
    """The text part of a model that also takes images or audio. Any other model is returned as it is."""
    if outer_of(config) is None:
        return TextTensors(config, ckpt)
    inner = read(config)
    return TextTensors(inner, text_alone(inner, ckpt), text_names(ckpt.names())[0])


def other_parts(config: Mapping[str, Any], names: Iterable[str]) -> frozenset[str]:
    """The tensors of the image and audio parts."""
    return frozenset(() if outer_of(config) is None else text_names(names)[1])
