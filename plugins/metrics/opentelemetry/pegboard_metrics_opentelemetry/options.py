"""Options of the metrics sink `opentelemetry`."""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

Detail = Literal["model", "worker", "all"]
Protocol = Literal["grpc", "http/protobuf"]

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""OpenTelemetry's variable for the protocol. Its library reads its other variables itself (headers,
service name, …)."""


class OpenTelemetryOptions(BaseModel):
    """The destination of traces. vLLM's settings `otlp_traces_endpoint` and
    `collect_detailed_traces` become `endpoint` and `collect`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str | None = Field(
        None, description="URL of an OTLP collector, such as grpc://localhost:4317 (required)"
    )
    protocol: Protocol | None = Field(
        None, description=f"grpc or http/protobuf; default what {PROTOCOL_VARIABLE} says, else grpc"
    )
    collect: tuple[Detail, ...] = Field(
        (), description="Details to add: model (its forward), worker (whole steps) or all"
    )
    max_queue_size: int = Field(
        2048, ge=1, description="Spans kept while the collector is slow; more are dropped"
    )
    timeout_s: float = Field(10.0, gt=0, description="How long one export may take")

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "grpc://none-yet")
        if parts.scheme not in ("grpc", "http", "https") or not parts.hostname:
            raise ValueError(
                "expected a URL that starts with grpc://, http:// or https:// and names a host"
            )
        return value

    @field_validator("collect", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Splits vLLM's form "model,worker"."""
        words = [value] if isinstance(value, str) else value
        if isinstance(words, list | tuple):
            return tuple(part for word in words for part in str(word).split(","))
        return value

    @property
    def chosen_protocol(self) -> Protocol:
        """Returns the protocol. Raises ValueError when the environment names an unknown one."""
        if self.protocol is not None:
            return self.protocol
        named = os.environ.get(PROTOCOL_VARIABLE, "grpc")
        if named == "grpc":
            return "grpc"
        if named == "http/protobuf":
            return "http/protobuf"
        raise ValueError(f"{PROTOCOL_VARIABLE}: expected grpc or http/protobuf, got {named!r}")

    def wants(self, detail: Literal["model", "worker"]) -> bool:
        """True if this detail was requested."""
        return detail in self.collect or "all" in self.collect
