"""The request bodies: every field we act on, and those that say nothing about the answer. Others are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ToolChoice(Fields):
    """type: any = some tool must be used; tool = the one called `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """What the chat template is told. budget_tokens is not enforced; display: thinking is always shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized"] | None = None


class OutputConfig(Fields):
    """effort goes to the chat template. format: {"type": "json_schema", "schema": …}."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class PromptFields(Fields):
    """What becomes the prompt. messages and system are checked by `history`, tools by `tools`."""

    model: Annotated[str, Field(min_length=1)]
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class MessagesRequest(PromptFields):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Int32 = 0


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""
