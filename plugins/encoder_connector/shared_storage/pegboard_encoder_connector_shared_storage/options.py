"""Options of the encoder connector `shared_storage`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SharedStorageOptions(BaseModel):
    """Where the rows are, and what this engine does with them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_storage_path: Path = Field(
        description="folder of the rows; it is made if it does not exist"
    )
    role: Literal["ec_producer", "ec_consumer", "ec_both"] = Field(
        "ec_both", description="ec_producer only saves, ec_consumer only loads, ec_both does both"
    )
