"""The request bodies: every supported field, and the fields that do not change the answer. All
other fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from pegboard.errors import RequestError, brief
from pegboard_chat.request_body import MAX_PATH, decode_body
from pegboard_chat.request_limits import check_items
from pegboard_chat.sampling_fields import Count, Fields, Int32, Objects, Texts


class ToolChoice(Fields):
    """any: the model must use a tool. tool: it must use the tool called `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """Turns thinking on or off in the chat template. budget_tokens is not enforced. display is
    ignored: thinking is always shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized"] | None = None


class OutputConfig(Fields):
    """effort is passed to the chat template. format: {"type": "json_schema", "schema": …}."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class PromptFields(Fields):
    """The fields that become the prompt. `conversation` checks messages, system and tools.
    context_management has no effect: it asks for a shorter prompt where one is too long, and agents
    send it always."""

    model: Annotated[str, Field(min_length=1)]
    messages: Objects
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class MessagesRequest(PromptFields):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool = False
    stop_sequences: Texts | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Int32 = 0


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


M = TypeVar("M", bound=BaseModel)


def parse_body(body: bytes, model: type[M]) -> M:
    """Returns the body as a checked `model`. Raises RequestError naming the wrong field, such as
    `messages.0.content`."""
    given = {name: value for name, value in decode_body(body).items() if value is not None}
    check_items(given)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(step) for step in first["loc"])[:MAX_PATH]
        if first["type"] == "extra_forbidden":
            raise RequestError(f"{path}: this field is not supported", parameter=path) from error
        raise RequestError(
            f"{path}: {first['msg']}, got {brief(first['input'])}", parameter=path
        ) from error


def wrong(path: str, expected: str, got: Any) -> RequestError:
    return RequestError(f"{path}: expected {expected}, got {brief(got)}", parameter=path)
