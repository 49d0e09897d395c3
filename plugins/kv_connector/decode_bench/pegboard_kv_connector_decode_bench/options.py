"""Options of the KV connector `decode_bench`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DecodeBenchOptions(BaseModel):
    """What the blocks are filled with."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    fill_mean: float = Field(0.015, description="mean of the numbers")
    fill_std: float = Field(
        0.0, ge=0, description="their standard deviation; 0 = all are fill_mean"
    )
