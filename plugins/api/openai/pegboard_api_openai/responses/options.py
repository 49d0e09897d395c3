"""Options of the api `responses`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ResponsesOptions(BaseModel):
    """What is kept for `previous_response_id`, `background` and retrieval, in the memory of the API process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_stored: Annotated[int, Field(ge=0, description="Responses kept, the oldest goes first; 0 = none")] = 1024
    max_stored_bytes: Annotated[int, Field(ge=0, description="Bytes of their conversations, about")] = 64 * 1024 * 1024
