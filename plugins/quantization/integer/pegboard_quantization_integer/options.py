"""Options of the method `rtn`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class RtnOptions(BaseModel):
    """bits: bits per weight of linear layers. Embeddings and the output head always have 8."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: Literal[4, 8] = 8
