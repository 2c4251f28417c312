"""KServe's requests. Owns: tensors of text and their parameters. Must not know: engines, HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.core.errors import ParameterError

LOOSE = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
TEXT = "text_input"


class Tensor(BaseModel):
    """One input."""

    model_config = LOOSE
    name: Annotated[str, Field(min_length=1, max_length=256)]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]
    datatype: str
    data: list[Any]
    parameters: dict[str, Any] | None = None


class InferRequest(BaseModel):
    """POST /v2/models/MODEL/infer: texts, and parameters as fields or as tensors of one value."""

    model_config = LOOSE
    id: str | None = Field(None, max_length=256)
    inputs: Annotated[list[Tensor], Field(min_length=1, max_length=64)]
    parameters: dict[str, Any] = Field(default_factory=dict)
    outputs: list[dict[str, Any]] | None = None

    def read(self) -> tuple[list[str], dict[str, Any]]:
        """-> prompts, and parameters."""
        prompts: list[str] | None = None
        parameters = dict(self.parameters)
        for number, tensor in enumerate(self.inputs):
            values = _flat(tensor.data)
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


def fields(prompts: str | list[str], parameters: dict[str, Any]) -> dict[str, Any]:
    """As fields of a completion."""
    kept = {name: value for name, value in parameters.items() if name not in ("stream", "prompt", "model", "echo")}
    for theirs in ("max_new_tokens", "max_output_tokens"):
        if theirs in kept:
            kept.setdefault("max_tokens", kept.pop(theirs))
    return {"prompt": prompts, **kept}


def _flat(data: list[Any]) -> list[Any]:
    """Nested lists are allowed for higher ranks."""
    return [value for part in data for value in (_flat(part) if isinstance(part, list) else [part])]
