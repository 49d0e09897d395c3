"""Options of the logits processor `repetition`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RepetitionOptions(BaseModel):
    """What counts as a repetition. The names are those of vLLM's `repetition_detection`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_pattern_size: int = Field(
        1, ge=1, description="tokens of the shortest pattern that is looked for"
    )
    max_pattern_size: int = Field(64, ge=1, le=4096, description="tokens of the longest one")
    min_count: int = Field(
        8, ge=2, le=1024, description="how many times in a row a pattern must end the output"
    )

    @model_validator(mode="after")
    def _in_order(self) -> RepetitionOptions:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"min_pattern_size {self.min_pattern_size} is larger than max_pattern_size "
                f"{self.max_pattern_size}"
            )
        return self
