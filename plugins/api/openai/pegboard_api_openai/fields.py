"""The request bodies: every supported field. `parse_body` refuses all other fields by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pegboard_chat.sampling_fields import Fields, Int32, Objects, SamplingFields, Texts, TokenIds


class StreamOptions(Fields):
    """include_usage: send a last chunk with the usage. continuous_usage_stats: with include_usage,
    every chunk also reports the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(SamplingFields):
    """Fields of both chat and text completions."""

    stream_options: StreamOptions | None = None

    n: Int32 = 1
    use_beam_search: bool = False
    length_penalty: float = 1.0
    min_tokens: Int32 | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    prompt_logprobs: Int32 | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None

    echo: bool = False
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    # The structure of the answer; `sampling.structure` checks these fields.
    response_format: dict[str, Any] | None = None

    # Accepted only with the values that change nothing.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class TemplateFields(Fields):
    """The fields that the chat template turns into a prompt. `openai_format.read_messages` checks
    messages."""

    messages: Objects
    tools: Objects | None = None
    documents: Objects | None = None
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
    functions: Objects | None = None  # the form before tools; the answer then has a function_call
    function_call: str | dict[str, Any] | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt_field.read_prompts` checks prompt, `prompt_embeds.read_embeds`
    the base64 of prompt_embeds."""

    prompt: Any = None
    prompt_embeds: str | Texts | None = None
    max_tokens: Int32 = 16
    logprobs: Int32 | None = None
    add_special_tokens: bool = True


class TokenSampling(GenerationFields):
    """Sampling parameters in a TokenRequest. `generate.token_params` refuses the fields that are
    not."""

    max_tokens: Int32 | None = None
    logprobs: Int32 | None = None


class TokenRequest(Fields):
    """POST /inference/v1/generate."""

    token_ids: TokenIds
    sampling_params: TokenSampling
    model: str | None = None
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    stream: bool = False
    cache_salt: str | None = None
    priority: Int32 = 0
    kv_transfer_params: dict[str, Any] | None = None
