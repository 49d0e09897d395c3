"""Log lines for generation requests, in vLLM's words: what came, and what was answered."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from pegboard.config.schema import ServerConfig
from pegboard.data.output import RequestOutput
from pegboard.data.sampling_params import RequestOutputKind
from pegboard.interfaces.api import EngineClient
from pegboard.log import get_logger

log = get_logger(__name__)


def logged(client: EngineClient, config: ServerConfig) -> EngineClient:
    """`client` as api plugins should see it: itself, or one that logs, if `config` says so."""
    return cast(EngineClient, RequestLog(client, config)) if config.enable_log_requests else client


class RequestLog:
    """An engine client that logs every request: parameters at INFO, the prompt at DEBUG only, because it is the user's. What was
    generated follows with `enable_log_outputs`. Everything else is the client's own."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._max_len = config.max_log_len
        self._logs_outputs = config.enable_log_outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, params: Any, request: Any) -> AsyncIterator[RequestOutput]:
        """As the client's, logged."""
        self._note(prompt, params, request)
        is_delta = params.output_kind is RequestOutputKind.DELTA
        return self._followed(self._client.generate(prompt, params, request), request.request_id, is_delta)

    def beam_search(self, prompt: Any, params: Any, request: Any) -> AsyncIterator[RequestOutput]:
        """As the client's, logged."""
        self._note(prompt, params, request)
        return self._followed(self._client.beam_search(prompt, params, request), request.request_id, False)

    def _note(self, prompt: Any, params: Any, request: Any) -> None:
        log.info("Received request %s: params: %s, lora_request: %s", request.request_id, params, request.lora)
        if log.isEnabledFor(logging.DEBUG):
            text, ids = self._cut(prompt.text), self._cut(prompt.token_ids)
            log.debug("Request %s: prompt: %r, prompt_token_ids: %s", request.request_id, text, ids)

    def _cut(self, value: Any) -> Any:
        return value if value is None or self._max_len is None else value[: self._max_len]

    async def _followed(
        self, outputs: AsyncIterator[RequestOutput], request_id: str, is_delta: bool
    ) -> AsyncIterator[RequestOutput]:
        """The outputs, and at the end of each completion its text."""
        texts: dict[int, str] = {}
        async with aclosing(cast(Any, outputs)) as stream:
            async for output in stream:
                if self._logs_outputs:
                    self._gather(output, texts, request_id, is_delta)
                yield output

    def _gather(self, output: RequestOutput, texts: dict[int, str], request_id: str, is_delta: bool) -> None:
        for completion in output.outputs:
            before = texts.get(completion.index, "") if is_delta else ""
            texts[completion.index] = before + completion.text
            if completion.finish_reason is not None:
                text = self._cut(texts.pop(completion.index))
                reason = completion.finish_reason
                log.info(
                    "Generated response %s: index: %d, output: %r, finish_reason: %s", request_id, completion.index, text, reason
                )
