"""Options of the API `label`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LabelOptions(BaseModel):
    """What requests may ask for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_labels: int = Field(64, ge=2, description="how many labels a request may have")
