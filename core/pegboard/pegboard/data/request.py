"""A request and its results as the front and the engine exchange them. This file does not import
numpy, because the API process does not load it."""

from __future__ import annotations

from typing import Any

import msgspec

from pegboard.data.media import MediaItem
from pegboard.data.pooling_params import PoolingParams
from pegboard.data.prompt_embeds import PromptEmbeds
from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import RequestError


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter in a local folder. An engine knows it by `lora_int_id` and `lora_path`.

    lora_int_id: at least 1. base_model_name: the model that it was made for, which is only shown.
    load_inplace: read the files again, even if the adapter is loaded. digest: a hash of the
    adapter, which the engine sets when it has read it; it is part of the block hashes. Raises
    RequestError for a wrong value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    digest: str = ""

    def __post_init__(self) -> None:
        for name, text in (("lora_name", self.lora_name), ("lora_path", self.lora_path)):
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"{name} of a LoRARequest must be a string that is not empty, got {text!r:.60}",
                    parameter=name,
                )
        number = self.lora_int_id
        if type(number) is not int or not 0 < number < 2**63:
            raise RequestError(
                f"lora_int_id must be an integer from 1 to 2⁶³ - 1, got {number!r:.60}",
                parameter="lora_int_id",
            )


class EngineRequest(msgspec.Struct, kw_only=True):
    """A request, sent from A to E. The engine expands `params.n` > 1 into n completions with
    indices 0 … n-1. client: who asks; clients take turns where one could hold up the others.
    prompt_embeds: spans of the prompt that are embeddings, in order. Their prompt_token_ids are
    zeros, one for each row. token_inputs: other inputs of the model, by the name under
    which models declare them: one number for each token of the prompt. A name that the model does
    not declare has no effect. pooling: the prompt becomes a vector, and no token is sampled. media:
    the images, audio and videos in the prompt, in the order of their positions."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    lora: LoRARequest | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    client: str = ""
    prompt_embeds: tuple[PromptEmbeds, ...] = ()
    token_inputs: dict[str, list[int]] = {}
    pooling: PoolingParams | None = None
    media: tuple[MediaItem, ...] = ()


class PositionLogprobs(msgspec.Struct):
    """Logprobs of one position, sent from E to A: the chosen token first, then the most likely
    tokens."""

    token_ids: list[int]
    values: list[float]
    rank: int


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tokens and other results of one completion in one step, sent from E to A.

    finish_reason: None, "stop", "length", "abort" or "error". num_cached_tokens is set in the first
    delta only. error: the reason when finish_reason is "error". error_parameter: the field that is
    wrong, if the request itself is wrong (a grammar that does not compile). ends_whole:
    finish_reason is "stop", but the last token is not a stop token and belongs to the text.
    prompt_logprobs: an encoded list[PositionLogprobs], or empty. It can be long, so it is decoded
    where there is time. embedding: the float32 values that a pooling request asked for.
    embedding_shape: theirs.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    error_parameter: str | None = None
    ends_whole: bool = False
    embedding: bytes = b""
    embedding_shape: tuple[int, ...] | None = None
