"""The request bodies: every field we act on. A field that is not here is refused by name (see `body`).

Types are strict: "5" is no integer. Ranges are checked by SamplingParams; the bounds here keep numbers inside the integers of
the engine and the work of one request finite.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_N = 1024
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = list[Annotated[int, Field(ge=0, le=2**31 - 1)]]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
LogprobCount = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the usage. continuous_usage_stats: usage so far in every chunk."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(BaseModel):
    """What chat and text completions share. None = not given; the default then is the model's, else SamplingParams'."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int32 | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: LogprobCount | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Int32 | None = None

    echo: bool = False
    priority: Int32 = 0
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,256}$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    # OpenAI's bookkeeping: says nothing about the answer, so it is taken and changes nothing.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions. messages are checked by `messages.read_messages`."""

    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: LogprobCount | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CompletionRequest(GenerationFields):
    """POST /v1/completions. prompt is checked by `prompts.read_prompts`. max_tokens null: as long as the context allows."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    logprobs: LogprobCount | None = None
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool = True


NO_BEAMS = "beam search is not served over HTTP"
NO_STRUCTURE = "structured output is not available in this server"
NO_EXTRAS = "no plugin of this server takes extra arguments"

# Fields of OpenAI or vLLM that we know and do not act on: name → (values that ask for nothing, why it is refused).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((False,), NO_BEAMS),
    "length_penalty": ((1, 1.0), NO_BEAMS),
    "best_of": ((1,), "ask for n completions and choose yourself"),
    "suffix": (("",), "the text after the completion cannot be given"),
    "structured_outputs": ((), NO_STRUCTURE),
    "guided_json": ((), NO_STRUCTURE),
    "guided_regex": ((), NO_STRUCTURE),
    "guided_choice": ((), NO_STRUCTURE),
    "guided_grammar": ((), NO_STRUCTURE),
    "logits_processors": (([],), "requests cannot bring code"),
    "vllm_xargs": (({},), NO_EXTRAS),
    "kv_transfer_params": (({},), NO_EXTRAS),
    "mm_processor_kwargs": (({},), "the model takes text only"),
    "prompt_embeds": ((), "send text or token ids as prompt"),
    "modalities": ((["text"],), "the model writes text only"),
    "audio": ((), "the model writes text only"),
    "functions": (([],), "send tools instead"),
    "function_call": (("none",), "send tools instead"),
    "parallel_tool_calls": ((True,), "no tool parser is configured"),
    "include_reasoning": ((True,), "no reasoning parser is configured"),
    "reasoning_effort": ((), "send what the chat template understands in chat_template_kwargs"),
    "thinking_token_budget": ((), "no reasoning parser is configured"),
    "verbosity": (("medium",), "the model has no such control"),
    "prediction": ((), "predicted output is not used"),
    "web_search_options": ((), "the server does not search the web"),
}
