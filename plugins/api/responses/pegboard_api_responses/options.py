"""Options of the api `responses`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ResponsesOptions(BaseModel):
    """Limits for stored responses and for built-in tools. Responses are stored in the memory of the
    API process. They are used by `previous_response_id`, `background` and retrieval."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_stored: Annotated[
        int, Field(ge=0, description="Responses kept; the oldest is removed first; 0 = none")
    ] = 1024
    max_stored_bytes: Annotated[
        int, Field(ge=0, description="Approximate size of the stored conversations, in bytes")
    ] = 64 * 1024 * 1024
    max_tool_calls: Annotated[
        int,
        Field(
            ge=0,
            description=(
                "Calls of built-in tools in one response; a request's max_tool_calls can only "
                "lower it"
            ),
        ),
    ] = 64
    tool_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds that a call of a built-in tool may take")
    ] = 120.0
    max_tool_output_chars: Annotated[
        int,
        Field(
            ge=1,
            description=(
                "Characters of a built-in tool's result that the model reads; the rest is cut off"
            ),
        ),
    ] = 100_000
