"""Turns the token ids of one request into outputs: incremental text, stop strings, logprobs, output
kinds.

It runs in the process that needs the text: the API process, or the caller's process for `LLM`.
Deltas are fed as they arrive. `take` returns everything that is new since the last output, so a
slow consumer gets fewer and larger outputs, and no queue grows. It does not know the engine. When a
stop string ends a completion early, its caller sends the abort.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from pegboard.data.logprobs import FlatLogprobs, TokenTexts, row_of
from pegboard.data.output import CompletionOutput, RequestOutput, RequestStats
from pegboard.data.request import EngineRequest, PositionLogprobs, RequestDelta
from pegboard.data.sampling_params import RequestOutputKind, SamplingParams
from pegboard.errors import PegboardError, RequestError, expect
from pegboard.interfaces.tokenizer import TextStream, Tokenizer

_decode = msgspec.msgpack.Decoder(list[PositionLogprobs]).decode


class OutputStream:
    """All n completions of one request. has_news: there is something new to take. is_finished: all
    completions have ended. error: why the engine gave up the request; a RequestError if a field of
    the request is wrong. prompt: the text of the prompt, if it was given as text. stream_interval:
    number of tokens to gather before an output that is neither the first nor the last.
    """

    def __init__(
        self,
        request: EngineRequest,
        tokenizer: Tokenizer | None,
        texts: TokenTexts | None = None,
        *,
        prompt: str | None = None,
        stream_interval: int = 1,
    ) -> None:
        params = request.params
        self.request_id = request.request_id
        self.params = params
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.lora_request = request.lora
        self.has_news = False
        self.error: PegboardError | None = None
        self.num_cached_tokens: int | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self.embedding = b""
        self.embedding_shape: tuple[int, ...] | None = None
        self.stats = RequestStats(arrival_time=request.arrival_s or time.time())
        self.texts = texts if params.detokenize else None
        self.completions = [
            Completion(index, params, self._text_stream(tokenizer), self.texts)
            for index in range(params.n)
        ]
        self.prompt_logprobs: Any = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = FlatLogprobs() if params.flat_logprobs else []
            self.prompt_logprobs.append(None)
        self.late = msgspec.Raw()
        """Logprobs of the prompt that have arrived and are not in `prompt_logprobs` yet,
        encoded."""
        self._num_running = params.n
        self._interval = stream_interval

    def _text_stream(self, tokenizer: Tokenizer | None) -> TextStream | None:
        if not self.params.detokenize or tokenizer is None:
            return None
        stream = tokenizer.stream(
            self.prompt_token_ids, skip_special_tokens=self.params.skip_special_tokens
        )
        is_tight = (
            not self.params.spaces_between_special_tokens and not self.params.skip_special_tokens
        )
        return TightSpecials(stream, tokenizer) if is_tight else stream

    @property
    def is_finished(self) -> bool:
        return self._num_running == 0

    def key(self, index: int) -> str:
        """Return the engine's name of one completion (see
        `pegboard.engine.requests.Request.key`)."""
        return self.request_id if self.params.n == 1 else f"{index}_{self.request_id}"

    def feed(self, delta: RequestDelta) -> bool:
        """Apply a delta of one completion. Return True if a stop string has ended the completion,
        so that the caller must tell the engine to abort its `key`."""
        completion = self.completions[delta.index]
        if completion.finish_reason is not None:  # the engine continued until the abort reached it
            return False
        if delta.num_cached_tokens is not None and self.num_cached_tokens is None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.kv_transfer_params is not None:
            self.kv_transfer_params = delta.kv_transfer_params
        if delta.prompt_logprobs and self.prompt_logprobs is not None and delta.index == 0:
            self.late = delta.prompt_logprobs
        self.embedding = delta.embedding
        self.embedding_shape = delta.embedding_shape
        before = len(completion.token_ids)
        is_hit = completion.feed(delta)
        if num_new := len(completion.token_ids) - before:
            stats = self.stats
            stats.last_token_ts = time.time()
            stats.first_token_ts = stats.first_token_ts or stats.last_token_ts
            stats.num_generation_tokens += num_new
        if completion.finish_reason is not None:
            self._num_running -= 1
            if delta.error is not None and self.error is None:
                field = delta.error_parameter
                self.error = (
                    RequestError(delta.error, parameter=field)
                    if field
                    else PegboardError(delta.error)
                )
        self._judge_news(completion)
        return is_hit and delta.finish_reason is None

    def _judge_news(self, completion: "Completion") -> None:
        if self.params.output_kind is RequestOutputKind.FINAL_ONLY:
            self.has_news = self.is_finished
            return
        num_waiting = len(completion.token_ids) - completion.num_given_tokens
        due = num_waiting >= (self._interval if completion.num_given_tokens else 1)
        self.has_news = self.has_news or due or completion.finish_reason is not None

    def add_late(self) -> None:
        """Add the prompt's logprobs that have arrived. 8,192 positions with 20 each take 0.5 s, so
        this may be called in a thread."""
        late = self.late
        self.late = msgspec.Raw()
        _extend(self.prompt_logprobs, _decode(late), self.texts)

    def take(self) -> RequestOutput | None:
        """Return an output as `params.output_kind` says, or None if there is nothing new."""
        if not self.has_news:
            return None
        self.has_news = False
        if self.late:
            self.add_late()
        prompt_logprobs = self.prompt_logprobs
        if self.params.output_kind is RequestOutputKind.DELTA:
            outputs = [
                completion.delta() for completion in self.completions if completion.is_changed
            ]
            self.prompt_logprobs = None  # they are sent only once
        else:
            outputs = [completion.whole() for completion in self.completions]
        for output in outputs:
            output.lora_request = self.lora_request
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            self.is_finished,
            prompt_logprobs,
            self.stats,
            self.lora_request,
            self.num_cached_tokens,
            self.kv_transfer_params,
            self.embedding,
            self.embedding_shape,
        )


class TightSpecials:
    """A text stream without the space that some decoders put before every token: a special token
    after another special token becomes only its text."""

    def __init__(self, stream: TextStream, tokenizer: Tokenizer) -> None:
        self._stream = stream
        self._tokenizer = tokenizer
        self._special = tokenizer.vocabulary().special_token_ids
        self._follows_special = False

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for token in token_ids:
            piece = self._stream.push((token,))
            is_special = token in self._special
            if is_special and self._follows_special:
                piece = self._tokenizer.decode((token,), skip_special_tokens=False)
            self._follows_special = is_special
            pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        return self._stream.flush()


class Completion:
    """One completion as it grows. `text` is its whole text; `num_given_*` say how much of it
    earlier outputs contained."""

    __slots__ = (
        "index",
        "params",
        "text",
        "token_ids",
        "logprobs",
        "cumulative_logprob",
        "finish_reason",
        "stop_reason",
        "num_given_chars",
        "num_given_tokens",
        "_stream",
        "_texts",
        "_stop",
        "_min_tokens",
        "_hold_back",
        "_has_given_end",
    )

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        stream: TextStream | None,
        texts: TokenTexts | None,
    ) -> None:
        self.index = index
        self.params = params
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: Any = None
        self.cumulative_logprob: float | None = None
        if params.logprobs is not None:
            self.logprobs = FlatLogprobs() if params.flat_logprobs else []
            self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_given_chars = 0
        self.num_given_tokens = 0
        self._stream = stream
        self._texts = texts
        self._stop: Sequence[str] = params.stop or () if stream is not None else ()
        self._min_tokens = params.min_tokens
        self._hold_back = params.text_hold_back
        self._has_given_end = False

    def feed(self, delta: RequestDelta) -> bool:
        """Apply a delta. Return True if a stop string has ended the completion. The token that
        completed the stop string is kept, and later tokens of the same delta are dropped."""
        token_ids = delta.token_ids
        shown = token_ids
        if delta.finish_reason == "stop" and not (
            self.params.include_stop_str_in_output or delta.ends_whole
        ):
            shown = token_ids[:-1]  # a token ended it: its id is kept, but not its text
        hit = None
        if self._stop:
            hit = self._feed_and_search(token_ids, shown)
        else:
            self.token_ids += token_ids
            if shown and self._stream is not None:
                self._grow(expect(self._stream.push(shown), str, self._stream, "push"))
        if hit is None and delta.finish_reason is not None and self._stream is not None:
            # as in vLLM, the beginning of a character is not shown
            hit = self._grow(self._stream.flush().rstrip("\ufffd"))
        if delta.logprobs is not None and self.logprobs is not None:
            positions = delta.logprobs[: len(self.token_ids) - len(self.logprobs)]
            _extend(self.logprobs, positions, self._texts)
            self.cumulative_logprob += sum(position.values[0] for position in positions)  # type: ignore[operator]
        if hit is not None:
            self.finish_reason = "stop"
            self.stop_reason = hit
            return True
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        return False

    def _feed_and_search(self, token_ids: list[int], shown: list[int]) -> str | None:
        """Feed the tokens one at a time, so that the cut does not depend on how tokens were grouped
        into deltas. Return the stop string that was found, if any."""
        assert self._stream is not None
        for position, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if (
                position < len(shown)
                and (hit := self._grow(self._stream.push((token_id,)))) is not None
            ):
                return hit
        return None

    def _grow(self, piece: str) -> str | None:
        """Append text. If it completes a stop string, cut the text there and return the stop
        string."""
        if not piece:
            return None
        text = self.text
        self.text = ""  # the only reference is local, so += appends in place
        text += piece
        self.text = text
        for stop in self._stop if len(self.token_ids) > self._min_tokens else ():
            start = text.find(stop, max(0, len(text) - len(piece) - len(stop) + 1))
            if start >= 0:
                self.text = text[
                    : start + len(stop) if self.params.include_stop_str_in_output else start
                ]
                return stop
        return None

    @property
    def is_changed(self) -> bool:
        """Whether `delta` would return anything new."""
        return len(self.token_ids) > self.num_given_tokens or (
            self.finish_reason is not None and not self._has_given_end
        )

    def whole(self) -> CompletionOutput:
        """Return everything so far, except text that may still become part of a stop string."""
        logprobs = (
            self.logprobs
            if self.logprobs is None or self.finish_reason is not None
            else self.logprobs[:]
        )
        return self._output(0, self.token_ids[:], logprobs)

    def delta(self) -> CompletionOutput:
        """Return everything that is new since the last output."""
        start = self.num_given_tokens
        logprobs = None if self.logprobs is None else self.logprobs[start:]
        return self._output(self.num_given_chars, self.token_ids[start:], logprobs)

    def _output(self, start: int, token_ids: list[int], logprobs: Any) -> CompletionOutput:
        end = len(self.text)
        reason = self.finish_reason
        if reason is None:
            end = max(end - self._hold_back, self.num_given_chars)
        self.num_given_chars, self.num_given_tokens = end, len(self.token_ids)
        self._has_given_end = reason is not None
        text = self.text[start:end]
        return CompletionOutput(
            self.index, text, token_ids, self.cumulative_logprob, logprobs, reason, self.stop_reason
        )


def _extend(
    container: Any, positions: Sequence[PositionLogprobs], texts: TokenTexts | None
) -> None:
    if isinstance(container, FlatLogprobs):
        for position in positions:
            container.append_position(position, texts)
    else:
        container.extend(row_of(position, texts) for position in positions)
