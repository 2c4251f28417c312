"""KServe's requests. Owns: tensors of text and their parameters. Must not know: engines, HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError
from tokenmill.server.errors import quoted
from tokenmill.server.fields import MOST_TEXTS, Inside, Label, few

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
TEXT = "text_input"
NAMES = {"prompt": TEXT}
"""The name of the prompt here, for errors."""
_WHOLE = {
    **{f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
_DATATYPES = {"BYTES": str, "BOOL": bool, "FP16": float, "FP32": float, "FP64": float, **dict.fromkeys(_WHOLE, int)}


class Tensor(BaseModel):
    """One input."""

    model_config = LOOSE
    name: Annotated[str, Field(min_length=1, max_length=256)]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], few(8)]
    datatype: Label
    data: Annotated[list[Any], few(MOST_TEXTS)]

    def values(self, place: str) -> list[Any]:
        """All values in one list. Their number and kind must be those that the tensor states."""
        values = list(islice(_flat(self.data), MOST_TEXTS + 1))
        if len(values) > MOST_TEXTS:
            raise ParameterError(f"{self.name} holds more than {MOST_TEXTS} values.", param=place)
        if math.prod(self.shape) != len(values):
            text = f"{self.name} has the shape {self.shape}, and data holds {len(values)} values."
            raise ParameterError(text, param=f"{place}.shape")
        if self.datatype not in _DATATYPES:
            text = f"{self.name} has the datatype {quoted(self.datatype)}; known are {', '.join(_DATATYPES)}."
            raise ParameterError(text, param=f"{place}.datatype")
        if not all(_is_of(value, self.datatype) for value in values):
            text = f"{self.name} holds a value that is not of its datatype {self.datatype}."
            raise ParameterError(text, param=f"{place}.data")
        return values


class Wanted(BaseModel):
    """An output that the client wants."""

    model_config = LOOSE
    name: Annotated[str, Field(min_length=1, max_length=256)]


class InferRequest(BaseModel):
    """POST /v2/models/MODEL/infer: texts, and parameters as fields or as tensors of one value."""

    model_config = LOOSE
    id: str | None = Field(None, max_length=256)
    inputs: Annotated[list[Tensor], few(64, 1)]
    parameters: dict[str, Any] = Field(default_factory=dict)
    outputs: Annotated[list[Wanted], few(64), Inside("kserve.Output")] | None = None

    def read(self) -> tuple[list[str], dict[str, Any]]:
        """The prompts and parameters."""
        prompts: list[str] | None = None
        parameters = dict(self.parameters)
        names = set()
        for number, tensor in enumerate(self.inputs):
            values = tensor.values(f"inputs.{number}")
            if tensor.name in names:
                raise ParameterError(f"inputs hold {quoted(tensor.name)} twice.", param=f"inputs.{number}")
            names.add(tensor.name)
            if tensor.name == TEXT:
                if tensor.datatype != "BYTES" or not values or not all(isinstance(v, str) and v for v in values):
                    raise ParameterError(f"{TEXT} must be of datatype BYTES, with texts.", param=f"inputs.{number}")
                prompts = values
            elif len(values) != 1:
                raise ParameterError(f"{tensor.name} must hold one value.", param=f"inputs.{number}")
            else:
                parameters[tensor.name] = values[0]
        if prompts is None:
            raise ParameterError(f"inputs must hold a tensor called {TEXT}.", param="inputs")
        return prompts, parameters

    def wanted(self, known: Sequence[str]) -> Sequence[str]:
        """The outputs that the client wants: all if it names none."""
        names = [each.name for each in self.outputs or ()]
        for number, name in enumerate(names):
            if name not in known:
                text = f"There is no output {quoted(name)}; known are {', '.join(known)}."
                raise ParameterError(text, param=f"outputs.{number}")
        return names or known


class GenerateRequest(BaseModel):
    """POST /v2/models/MODEL/generate and generate_stream."""

    model_config = LOOSE
    id: str | None = Field(None, max_length=256)
    text_input: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] = Field(default_factory=dict)

    def read(self) -> tuple[str, dict[str, Any]]:
        """The prompt and parameters."""
        return self.text_input, dict(self.parameters)


def _is_of(value: Any, datatype: str) -> bool:
    kind = _DATATYPES[datatype]
    if datatype in _WHOLE:
        low, high = _WHOLE[datatype]
        return type(value) is int and low <= value <= high
    return type(value) is int or type(value) is float if kind is float else type(value) is kind


def _flat(data: list[Any]) -> Iterator[Any]:
    """Nested lists are allowed for higher ranks, and are flattened."""
    open_lists = [iter(data)]
    while open_lists:
        for part in open_lists[-1]:
            if isinstance(part, list):
                open_lists.append(iter(part))
                break
            yield part
        else:
            open_lists.pop()
