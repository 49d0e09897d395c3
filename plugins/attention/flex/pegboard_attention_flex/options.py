"""Options of the backend `flex`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FlexOptions(BaseModel):
    """How flex_attention is called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compile: bool = Field(
        False,
        description="compile it with torch.compile, which needs a compiler and takes a while; "
        "without, it holds the scores of all keys in memory",
    )
