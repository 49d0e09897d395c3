"""Judges a request before it enters the engine. Every refusal is a RequestError that names the field."""

from __future__ import annotations

from pegboard.config.limits import Limits
from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.grammar.grammars import Grammars
from pegboard.errors import ConfigError, RequestError
from pegboard.plugins.names import to_install


class RequestCheck:
    """has_priority: the scheduling policy honours `priority`."""

    def __init__(self, limits: Limits, grammars: Grammars | None, *, has_priority: bool) -> None:
        self._limits = limits
        self._grammars = grammars
        self._has_priority = has_priority

    def __call__(self, request: EngineRequest) -> None:
        """Raise RequestError when the request cannot be served."""
        self._check_prompt(request)
        self._check_media(request)
        if request.priority and not self._has_priority:
            raise RequestError(
                f"priority {request.priority} needs a scheduling policy that honours it; start with scheduling_policy='priority'",
                parameter="priority",
            )
        if request.lora is not None and not self._limits.max_loras:
            raise RequestError(
                f"adapter {request.lora.name!r}: LoRA is off; start with max_loras of at least 1", parameter="model"
            )
        wanted = request.params.structured_outputs if isinstance(request.params, SamplingParams) else None
        if wanted is not None:
            if self._grammars is None:
                raise RequestError(
                    f"{wanted.parameter} needs a structured output plugin, and none is active; {to_install('structured_output')}",
                    parameter=wanted.parameter,
                )
            self._grammars.check(wanted)

    def _check_prompt(self, request: EngineRequest) -> None:
        limits, num_tokens = self._limits, len(request.prompt_token_ids)
        if not num_tokens:
            raise RequestError("the prompt is empty: at least one token is needed", parameter="prompt")
        longest = limits.max_model_len - isinstance(request.params, SamplingParams)  # room for one output token
        if num_tokens > longest:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and the maximum model length is {limits.max_model_len} tokens for prompt "
                f"and output together: at most {longest} prompt tokens are possible; shorten it or use truncate_prompt_tokens",
                parameter="prompt",
            )
        if not limits.enable_chunked_prefill and num_tokens > limits.max_num_batched_tokens:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and a step takes max_num_batched_tokens={limits.max_num_batched_tokens}; "
                "shorten it, or enable chunked prefill",
                parameter="prompt",
            )
        if request.prompt_embeds is not None:
            if request.prompt_embeds.shape[0] != num_tokens:
                raise RequestError(
                    f"prompt_embeds has {request.prompt_embeds.shape[0]} rows for {num_tokens} prompt tokens",
                    parameter="prompt_embeds",
                )
            return
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= limits.vocab_size:
            bad = next(token for token in request.prompt_token_ids if not 0 <= token < limits.vocab_size)
            raise RequestError(
                f"token id {bad} is out of vocabulary: ids go from 0 to {limits.vocab_size - 1}", parameter="prompt"
            )

    def _check_media(self, request: EngineRequest) -> None:
        limits = self._limits
        most = min(limits.encoder_cache_tokens, limits.max_encoder_tokens)
        if limits.never_split_media:
            most = min(most, limits.max_num_batched_tokens)
        for index, item in enumerate(request.media):
            if item.num_tokens > most:
                raise RequestError(
                    f"media item {index} has {item.num_tokens} tokens; at most {most} are possible", parameter="media"
                )


def check_limits(limits: Limits, *, media_at_once: bool) -> None:
    """Raise ConfigError for limits that only make sense together with the model's KV plan."""
    if media_at_once and limits.never_split_media:
        raise ConfigError("never_split_media has no meaning for an encoder-decoder model: its media are not part of the prompt")
