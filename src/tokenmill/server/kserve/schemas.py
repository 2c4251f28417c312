"""KServe's requests. Owns: tensors of text and their parameters. Must not know: engines, HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError
from tokenmill.server.fields import MOST_TEXTS, Inside, Label, few

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
TEXT = "text_input"


class Tensor(BaseModel):
    """One input."""

    model_config = LOOSE
    name: Annotated[str, Field(min_length=1, max_length=256)]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], few(8)]
    datatype: Label
    data: Annotated[list[Any], few(MOST_TEXTS)]


class Wanted(BaseModel):
    """One output that is asked for."""

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
        """-> prompts, and parameters."""
        prompts: list[str] | None = None
        parameters = dict(self.parameters)
        for number, tensor in enumerate(self.inputs):
            values = list(islice(_flat(tensor.data), MOST_TEXTS + 1))
            if len(values) > MOST_TEXTS:
                raise ParameterError(f"{tensor.name} holds more than {MOST_TEXTS} values.", param=f"inputs.{number}")
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


class GenerateRequest(BaseModel):
    """POST /v2/models/MODEL/generate and generate_stream."""

    model_config = LOOSE
    id: str | None = Field(None, max_length=256)
    text_input: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] = Field(default_factory=dict)

    def read(self) -> tuple[str, dict[str, Any]]:
        """-> prompt, and parameters."""
        return self.text_input, dict(self.parameters)


def _flat(data: list[Any]) -> Iterator[Any]:
    """Nested lists are allowed for higher ranks."""
    open_lists = [iter(data)]
    while open_lists:
        for part in open_lists[-1]:
            if isinstance(part, list):
                open_lists.append(iter(part))
                break
            yield part
        else:
            open_lists.pop()
