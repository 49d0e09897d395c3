"""The body of POST /v1/responses: all supported fields, and the known fields that are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pegboard_chat.sampling_fields import Count, Fields, Objects, SamplingFields

LogprobCount = Annotated[int, Field(ge=-1, le=2**31 - 1)]

LOGPROBS = "message.output_text.logprobs"


class ReasoningFields(Fields):
    """effort is passed to the chat template. summary: only "auto" and null are accepted, because
    the reasoning is never summarized."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextFields(Fields):
    """format: {"type": "text" | "json_object" | "json_schema", …}. A json_schema also has a name
    and a schema."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(Fields):
    """Only false is accepted, because deltas are never padded."""

    include_obfuscation: Literal[False] | None = None


class PromptFields(Fields):
    """The fields that become the prompt. `history.read_input` checks input, `tools.read_tools`
    checks tools, and `request.chat_request` checks tool_choice."""

    model: str | None = None
    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None

    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class InputTokensRequest(PromptFields):
    """The body of POST /v1/responses/input_tokens."""


class ResponsesRequest(PromptFields, SamplingFields):
    """The body of POST /v1/responses. The output of the code interpreter is always shown, whether
    or not `include` asks for it."""

    store: bool = True
    background: bool = False
    stream_options: ResponsesStreamOptions | None = None

    max_tool_calls: Count | None = None
    include_reasoning: bool = True
    include: list[
        Literal[
            "message.output_text.logprobs",
            "reasoning.encrypted_content",
            "code_interpreter_call.outputs",
        ]
    ] = Field(default_factory=list)

    max_output_tokens: Count | None = None
    top_logprobs: LogprobCount | None = None

    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    service_tier: Literal["auto", "default"] = "auto"
