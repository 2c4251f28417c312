"""Requests about adapters. Owns: their fields and bounds. Must not know: what is loaded."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter. load_inplace: replace the adapter of this name; model: the model that it adapts
    (default: the first one)."""

    model_config = STRICT
    lora_name: Name
    lora_path: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    load_inplace: bool = False
    model: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = STRICT
    lora_name: Name
