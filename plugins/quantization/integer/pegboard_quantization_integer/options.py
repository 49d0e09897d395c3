"""Options of the method `rtn`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RtnOptions(BaseModel):
    """bits: bits per weight of linear layers. Embeddings and the output head always have 8, in
    groups of 32. group_size: columns that share a scale, a multiple of 32."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: int = Field(default=8, ge=2, le=8)
    group_size: int = Field(default=32, gt=0, multiple_of=32)
