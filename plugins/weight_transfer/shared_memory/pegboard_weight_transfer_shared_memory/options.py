"""Options of the weight transfer `shared_memory`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

PREFIX = "pegboard-weights-"


class SharedMemoryOptions(BaseModel):
    """Which segments the engine reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: str = Field(
        PREFIX,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="segments that clients may name begin with this",
    )
