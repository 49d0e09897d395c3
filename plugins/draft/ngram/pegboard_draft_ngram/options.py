"""Options of the draft plugin `ngram`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_LENGTH = 5


class NGramOptions(BaseModel):
    """The lengths of the n-grams that are looked up. The names and defaults are vLLM's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt_lookup_min: int | None = Field(
        None, ge=1, description="shortest n-gram; default: prompt_lookup_max, or 5"
    )
    prompt_lookup_max: int | None = Field(
        None, ge=1, description="longest n-gram; default: prompt_lookup_min, or 5"
    )

    @model_validator(mode="after")
    def _in_order(self) -> NGramOptions:
        if self.shortest > self.longest:
            raise ValueError(
                f"prompt_lookup_min {self.shortest} is larger than prompt_lookup_max {self.longest}"
            )
        return self

    @property
    def shortest(self) -> int:
        """The length of the shortest n-gram."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LENGTH

    @property
    def longest(self) -> int:
        """The length of the longest n-gram."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LENGTH
