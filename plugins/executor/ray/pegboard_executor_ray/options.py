"""Options of the executor plugin `ray`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RayOptions(BaseModel):
    """Which Ray runs the ranks, and how it places them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str | None = Field(
        default=None,
        min_length=1,
        description="address of a running cluster, host:port or auto; default: RAY_ADDRESS, or a "
        "Ray of this machine that the engine starts and stops",
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="strategy of the placement group: ranks on few nodes, or on many",
    )
    placement_timeout_s: float = Field(
        default=60.0, gt=0, description="seconds to wait until the cluster has room for all ranks"
    )
