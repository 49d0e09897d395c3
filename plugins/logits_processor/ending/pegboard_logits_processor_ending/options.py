"""Options of the logits processor `ending`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EndingOptions(BaseModel):
    """How much likelier the end becomes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    strength: float = Field(
        20.0, gt=0, le=1000, description="what is added to the logit of the end at the last token"
    )
