"""Options of the weight transfer `torch`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

TIMEOUT_S = 60.0


class TorchOptions(BaseModel):
    """How long the engine waits for a trainer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_s: float = Field(
        TIMEOUT_S,
        gt=0,
        le=3600,
        description="seconds that the trainer may take to come, and to send a tensor",
    )
