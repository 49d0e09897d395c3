"""Options of the metrics sink `zmq`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

SCHEMES = ("tcp://", "ipc://", "inproc://")


def _address(value: str) -> str:
    if not value.startswith(SCHEMES) or value in SCHEMES:
        raise ValueError(
            "expected an address that starts with tcp://, ipc:// or inproc://, such as tcp://*:5557"
        )
    return value


Address = Annotated[str, AfterValidator(_address)]


class ZmqOptions(BaseModel):
    """The names and defaults are those of vLLM's KVEventsConfig."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: Address = Field(
        "tcp://*:5557",
        description=(
            "Address of the events: with * or ::, and for ipc and inproc, the engine binds it; "
            "else connects. Engine i of data parallel adds i to the port"
        ),
    )
    replay_endpoint: Address | None = Field(
        None, description="Address where subscribers ask for earlier batches; default: none"
    )
    buffer_steps: int = Field(
        10_000, ge=1, description="Number of latest batches that can be asked for again"
    )
    hwm: int = Field(
        100_000,
        ge=1,
        description="Batches that ZeroMQ keeps for each slow subscriber; further ones are lost",
    )
    max_queue_size: int = Field(
        100_000,
        ge=1,
        description="Batches that may wait for the sending thread; the oldest are dropped",
    )
    topic: str = Field("", description="First frame of every message, which subscribers filter by")
    int_block_hashes: bool = Field(
        True,
        description="Send the last 64 bits of a block's hash as an integer instead of its bytes",
    )
