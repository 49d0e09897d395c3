"""Options of the draft plugin `suffix`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SuffixOptions(BaseModel):
    """The names and defaults are vLLM's, which has no `suffix_decoding_max_cached_mib`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    suffix_decoding_max_tree_depth: int = Field(
        24, ge=2, description="number of a request's last tokens to compare with earlier text"
    )
    suffix_decoding_max_cached_requests: int = Field(
        10_000,
        ge=0,
        description=(
            "number of finished requests whose answers are kept for all requests; 0 keeps none"
        ),
    )
    suffix_decoding_max_cached_mib: int = Field(
        256, ge=0, description="memory for these answers, in MiB"
    )
    suffix_decoding_max_spec_factor: float = Field(
        1.0,
        gt=0,
        description="most draft tokens for each token that agrees with earlier text",
    )
    suffix_decoding_min_token_prob: float = Field(
        0.1,
        ge=0,
        le=1,
        description=(
            "no draft token that is right, with all before it, less often than this in earlier text"
        ),
    )
