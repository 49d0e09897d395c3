"""Options of the logits processor."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PerRequestOptions(BaseModel):
    """Which function is called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    make: str = Field(
        pattern=r"^[\w.]+:[\w.]+$",
        description=(
            "module:function that gets a request's parameters and returns a function or None"
        ),
    )
