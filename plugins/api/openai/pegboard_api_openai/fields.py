"""The request bodies: every supported field. `parse_body` refuses all other fields by name. Types are strict: "5" is not an
integer. SamplingParams checks ranges. The bounds here are vLLM's, or they keep numbers inside the range of the engine's
integers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = list[Annotated[int, Field(ge=0, le=2**31 - 1)]]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
LogprobCount = Annotated[int, Field(ge=-1, le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(BaseModel):
    """include_usage: send a last chunk with the usage. continuous_usage_stats: report the usage so far in every chunk."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(BaseModel):
    """Fields of both chat and text completions. None means not given: then the model's default applies, else that of
    SamplingParams."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    n: Int32 = 1
    use_beam_search: bool = False
    length_penalty: float = 1.0
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int32 | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None

    echo: bool = False
    priority: Int32 = 0
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None

    # The structure of the answer; `sampling.structure` checks these fields.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    # OpenAI's bookkeeping: accepted and ignored, because it does not concern the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TemplateFields(BaseModel):
    """The fields that the chat template turns into a prompt. `openai_format.read_messages` checks messages."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class ChatRequest(TemplateFields, GenerationFields):
    """POST /v1/chat/completions."""

    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `completions.read_prompts` checks prompt."""

    prompt: Any = None
    max_tokens: Int32 = 16
    logprobs: Int32 | None = None
    add_special_tokens: bool = True
