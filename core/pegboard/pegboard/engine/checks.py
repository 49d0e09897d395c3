"""The checks of new requests that need the engine's limits. The front has done all others."""

from __future__ import annotations

from pegboard.config.limits import Limits
from pegboard.data.request import EngineRequest
from pegboard.engine.prompt_embeds import check_embeds
from pegboard.engine.whole_spans import check_whole
from pegboard.errors import RequestError


def check_request(
    request: EngineRequest, limits: Limits, *, has_priority: bool, embedding_size: int
) -> None:
    """Raise RequestError, which names the field, if the request cannot be served under `limits`.
    has_priority: the scheduling policy honours `priority`. embedding_size: the width of prompt
    embeddings. The engine checks grammars."""
    _check_prompt(request, limits)
    check_whole(request, limits)
    if request.prompt_embeds:
        check_embeds(request.prompt_embeds, embedding_size, len(request.prompt_token_ids))
    if request.priority and not has_priority:
        raise RequestError(
            (
                f"priority {request.priority} needs a scheduling policy that honours it; choose "
                "one with scheduling_policy"
            ),
            parameter="priority",
        )
    if request.lora is not None and not limits.max_loras:
        raise RequestError(
            f"adapter {request.lora.lora_name!r}: LoRA is off; start with enable_lora",
            parameter="model",
        )
    n = request.params.n
    most = limits.max_num_queued_reqs
    if n > most:
        raise RequestError(
            f"n must be at most {most}, the number of completions that may wait, got {n}",
            parameter="n",
        )


def _check_prompt(request: EngineRequest, limits: Limits) -> None:
    num_tokens = len(request.prompt_token_ids)
    if not num_tokens:
        raise RequestError("the prompt is empty: at least one token is needed", parameter="prompt")
    longest = limits.max_model_len - (request.pooling is None)  # room for one output token
    if num_tokens > longest:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, and the maximum model length is "
            f"{limits.max_model_len} tokens for prompt and output together: at most {longest} "
            "prompt tokens are possible; shorten it or use truncate_prompt_tokens",
            parameter="prompt",
        )
    if not limits.enable_chunked_prefill and num_tokens > limits.max_num_batched_tokens:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, and a step takes "
            f"max_num_batched_tokens={limits.max_num_batched_tokens}; shorten it, or enable "
            "chunked prefill",
            parameter="prompt",
        )
    end = limits.vocab_size
    if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= end:
        bad = next(token for token in request.prompt_token_ids if not 0 <= token < end)
        raise RequestError(
            f"token id {bad} is out of vocabulary: ids go from 0 to {end - 1}",
            parameter="prompt",
        )
