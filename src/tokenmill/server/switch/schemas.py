"""Requests about whole models. Owns: their fields and bounds. Must not know: what is loaded."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class ModelRequest(BaseModel):
    """POST /models/load and /models/unload."""

    model_config = STRICT
    model: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
