"""Requests about stored chats. Owns: their fields and bounds. Must not know: what is stored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tokenmill.server.fields import Metadata


class UpdateRequest(BaseModel):
    """POST /v1/chat/completions/{completion_id}."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    metadata: Metadata | None = Field(...)
