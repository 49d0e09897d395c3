"""Options of the logits processor `ban`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class BanOptions(BaseModel):
    """The banned tokens. Both lists are used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_ids: tuple[TokenId, ...] = Field((), description="ids of banned tokens")
    texts: tuple[Text, ...] = Field(
        (), description="every token whose text contains one of these is banned"
    )
