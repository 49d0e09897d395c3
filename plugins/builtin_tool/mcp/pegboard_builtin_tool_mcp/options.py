"""Options of the built-in tool `mcp`."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator


class McpOptions(BaseModel):
    """The tool servers. The setting `tool_server` becomes `servers`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    servers: tuple[str, ...] = Field(
        (),
        description=(
            "host:port (SSE at /sse), or a URL (SSE if it ends with /sse, otherwise streamable "
            "HTTP); commas separate"
        ),
    )
    connect_timeout_s: float = Field(
        10.0, gt=0, description="Seconds within which a server must answer a connection"
    )

    @field_validator("servers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Splits vLLM's form "a:1,b:2"."""
        words = [value] if isinstance(value, str) else value
        if isinstance(words, list | tuple):
            return tuple(
                part.strip() for word in words for part in str(word).split(",") if part.strip()
            )
        return value

    @field_validator("servers")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for server in value:
            url_of(server)
        return value


def url_of(server: str) -> str:
    """Returns the URL of a server. Raises ValueError."""
    url = server if "://" in server else f"http://{server}/sse"
    try:
        parts = urlsplit(url)
        is_good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and ("://" in server or parts.port is not None)
        )
    except ValueError:  # not a valid port
        is_good = False
    if not is_good:
        raise ValueError(
            f"{server!r} is not an address: expected host:port, [IPv6]:port or a URL that begins "
            "with http:// or https://"
        )
    return url
