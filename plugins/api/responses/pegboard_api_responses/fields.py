"""The body of POST /v1/responses: all supported fields, and the known fields that are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = list[Annotated[int, Field(ge=0, le=2**31 - 1)]]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
LogprobCount = Annotated[int, Field(ge=-1, le=2**31 - 1)]

LOGPROBS = "message.output_text.logprobs"


class ReasoningFields(BaseModel):
    """effort is passed to the chat template. summary: only "auto" and null are accepted, because the reasoning is never
    summarized."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextFields(BaseModel):
    """format: {"type": "text" | "json_object" | "json_schema", …}. A json_schema also has a name and a schema."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(BaseModel):
    """Only false is accepted, because deltas are never padded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(BaseModel):
    """The fields of the body. `history.read_input` checks input, `tools.read_tools` checks tools, and `request.chat_request`
    checks tool_choice. The output of the code interpreter is always shown, whether or not `include` asks for it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    max_tool_calls: Count | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include_reasoning: bool = True
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content", "code_interpreter_call.outputs"]] = (
        Field(default_factory=list)
    )

    max_output_tokens: Count | None = None
    top_logprobs: LogprobCount | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    temperature: float | None = None
    top_p: float | None = None

    # vLLM's additions
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    priority: Int32 = 0
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    # OpenAI's bookkeeping: returned in the response, otherwise ignored.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] = "auto"
