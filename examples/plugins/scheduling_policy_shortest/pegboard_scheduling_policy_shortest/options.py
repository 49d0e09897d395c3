"""Options of the scheduling policy `shortest`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ShortestOptions(BaseModel):
    """How long a long prompt may have to wait for shorter ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_wait_s: float = Field(
        5.0, ge=0, description="seconds after which a request goes before all shorter ones"
    )
