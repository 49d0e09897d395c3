"""The `response` object and its usage."""

from __future__ import annotations

import time
from typing import Any

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import Overloaded, RequestError
from pegboard.interfaces.output_parser import Reasoning
from pegboard_api_responses.fields import ResponsesRequest
from pegboard_api_responses.items import Items
from pegboard_api_responses.open_items import StreamEvent
from pegboard_chat.chats import ParsedOutput
from pegboard_chat.openai_format import TokenNames, chat_logprobs


class ResponseAnswer:
    """One response while it is being written. It reads outputs and returns the events of the
    stream; the whole object is available at any time.

    It is written in turns: when the model has called tools that the server runs (`items.pending`),
    another turn follows. finish_reason is the reason why the output of this turn has ended, or None
    while it continues.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        name: str,
        model: str,
        params: SamplingParams,
        has_tools: bool,
        names: TokenNames,
        items: Items,
    ) -> None:
        self.name = name
        self.items = items
        self.finish_reason: str | None = None
        self.num_output_tokens = 0
        self._request = request
        self._names = names
        self._num_top = params.logprobs
        self._num_input_tokens = self._num_cached_tokens = self._num_reasoning_tokens = 0
        self._counted = (0, 0)
        self._status = "queued" if request.background else "in_progress"
        self._more: dict[str, Any] = {"error": None, "incomplete_details": None}
        self._fixed = self._described(model, params, has_tools)

    def _described(self, model: str, params: SamplingParams, has_tools: bool) -> dict[str, Any]:
        request = self._request
        given_choice = request.tool_choice if request.tool_choice is not None else "auto"
        return {
            "id": self.name,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": request.background,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {
                "effort": request.reasoning.effort if request.reasoning else None,
                "summary": None,
            },
            "safety_identifier": request.safety_identifier,
            "service_tier": request.service_tier,
            "store": request.store,
            "temperature": params.temperature,
            "text": {
                "format": (request.text and request.text.format) or {"type": "text"},
                "verbosity": "medium",
            },
            "tool_choice": given_choice if has_tools else "none",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "truncation": request.truncation,
            "user": request.user,
        }

    @property
    def num_bytes(self) -> int:
        """About how many bytes the output has as JSON."""
        return self.num_output_tokens * (10 if self._num_top is None else 100 * (2 + self._num_top))

    @property
    def is_ended(self) -> bool:
        return self._status not in ("queued", "in_progress")

    def whole(self) -> dict[str, Any]:
        """The object as it is now. `output` includes the item that is being written."""
        usage = {
            "input_tokens": self._num_input_tokens,
            "input_tokens_details": {
                "cached_tokens": self._num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": self._num_input_tokens + self.num_output_tokens,
        }
        output = [dict(item) for item in self.items.items]
        usage_now = usage if self.is_ended and self._num_input_tokens else None
        return {
            **self._fixed,
            **self._more,
            "status": self._status,
            "output": output,
            "usage": usage_now,
        }

    def begin(self) -> list[StreamEvent]:
        """Returns the first events."""
        self._status = "in_progress"
        return [
            {"type": f"response.{name}", "response": self.whole()}
            for name in ("created", "in_progress")
        ]

    def read(self, output: ParsedOutput) -> list[StreamEvent]:
        """Returns the events of one output."""
        (completion,) = output.outputs
        events = output.events[completion.index]
        before_input, before_cached = self._counted
        self._num_input_tokens = before_input + len(output.prompt_token_ids or ())
        self._num_cached_tokens = before_cached + (output.num_cached_tokens or 0)
        self.num_output_tokens += len(completion.token_ids)
        if any(isinstance(event, Reasoning) for event in events):
            self._num_reasoning_tokens += len(completion.token_ids)
        logprobs = None
        if self._num_top is not None:
            logprobs = chat_logprobs(
                completion.token_ids, completion.logprobs, self._num_top, self._names
            )["content"]
        news = self.items.read(events, logprobs)
        if completion.finish_reason is not None:
            self.finish_reason = completion.finish_reason
            news += self.items.finish(is_complete=completion.finish_reason == "stop")
        return news

    def next_turn(self) -> None:
        """Prepare for the output of another turn."""
        self.finish_reason = None
        self._counted = (self._num_input_tokens, self._num_cached_tokens)

    def end(self, finish_reason: str | None = None) -> StreamEvent:
        """End the response. finish_reason replaces that of the last output."""
        reason = finish_reason or self.finish_reason
        if reason == "stop":
            return self._end("completed")
        self._more["incomplete_details"] = {
            "reason": "max_output_tokens" if reason == "length" else "content_filter"
        }
        return self._end("incomplete")

    def fail(self, error: Exception) -> StreamEvent:
        """End the response with an error."""
        code = "server_error"
        if isinstance(error, RequestError):
            code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "invalid_prompt"
        self._more["error"] = {"code": code, "message": str(error)}
        return self._end("failed")

    def cancel(self) -> None:
        """End the response as cancelled."""
        self.items.finish(is_complete=False)
        self._end("cancelled")

    def _end(self, status: str) -> StreamEvent:
        self._status = status
        return {"type": f"response.{status}", "response": self.whole()}
