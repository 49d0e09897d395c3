"""The classes of requests and answers that vLLM's parsers use
(`vllm.entrypoints.openai.protocol`)."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def random_tool_call_id() -> str:
    """Return an id that no other call has."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


class RequestFields(BaseModel):
    """Fields that are declared, and any others."""

    model_config = ConfigDict(extra="allow")


class FunctionCall(RequestFields):
    """The name and the arguments, as JSON text, of a call."""

    name: str
    arguments: str


class ToolCall(RequestFields):
    """One call."""

    id: str = Field(default_factory=random_tool_call_id)
    type: str = "function"
    function: FunctionCall


class DeltaFunctionCall(RequestFields):
    """What is new of a function."""

    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(RequestFields):
    """What is new of a call."""

    id: str | None = None
    type: str | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(RequestFields):
    """What is new of a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class ExtractedToolCallInformation(RequestFields):
    """What a tool parser finds in a whole answer."""

    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class ChatCompletionToolsParam(RequestFields):
    """A tool of a request."""

    type: str = "function"
    function: Any = None


class ChatCompletionRequest(RequestFields):
    """The parts of a request that a parser can see here."""

    messages: list[Any] = Field(default_factory=list)
    tools: list[ChatCompletionToolsParam] | None = None
    tool_choice: Any = "auto"
    chat_template_kwargs: dict[str, Any] | None = None
    skip_special_tokens: bool = True
    include_reasoning: bool = True
    stream: bool = False
