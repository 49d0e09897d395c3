"""Shared code of chat and text completions: ids, the outputs of all prompts, the head of the
object, usage, and the stream of chunks."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pegboard.data.output import CompletionOutput, RequestOutput
from pegboard.errors import PegboardError, RequestError
from pegboard.interfaces.api import EngineClient, RequestOptions
from pegboard_api_openai.fields import GenerationFields
from pegboard_chat.off_loop import off_loop
from pegboard_chat.openai_format import LOWEST, Step
from pegboard_server.json_api import error_event, in_pieces
from pegboard_server.streaming import EventStream, chain, first_of, while_connected

if TYPE_CHECKING:
    from pegboard.data.request import LoRARequest

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""The outputs of all prompts of one HTTP request, each with the index of its prompt."""


AT_ONCE = 8
"""How many prompts of one HTTP request are started before other requests get a turn."""


async def merge(streams: Sequence[AsyncIterator[RequestOutput]]) -> Outputs:
    """Yield the outputs of all streams in the order in which they arrive. The first exception ends
    all streams. Closing the result closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for output in only:
                yield 0, output
        return
    news: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(
        maxsize=len(streams)
    )
    tasks: list[asyncio.Task[None]] = []
    num_running = len(streams)
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(_pump(index, stream, news)))
            if index % AT_ONCE == AT_ONCE - 1:
                # each task tokenizes its prompt first, so a thousand would hold up the event loop
                await asyncio.sleep(0)
        while num_running:
            index, item = await news.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncIterator[RequestOutput], news: "asyncio.Queue[Any]"
) -> None:
    try:
        async with aclosing(stream) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                await news.put((index, output))
        await news.put((index, None))
    except Exception as error:  # noqa: BLE001  carried to the consumer, who raises it
        await news.put((index, error))


async def last_outputs(outputs: Outputs, num_prompts: int) -> list[RequestOutput]:
    """Returns the final output of every prompt. Raises PegboardError when a prompt has none."""
    last: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            last[index] = output
    if len(last) < num_prompts:
        raise PegboardError(f"the engine answered {len(last)} of {num_prompts} prompts")
    return [last[index] for index in range(num_prompts)]


encode = msgspec.json.Encoder().encode

FIELDS = {"extra_args": "vllm_xargs"}
"""Parameters of SamplingParams that are fields of another name over HTTP."""

MANY_CHARS = 4096
"""A choice with a longer text in one event is encoded in pieces."""

DONE = b"data: [DONE]\n\n"


class AnswerIds:
    """The ids of one answer. Its response id comes from X-Request-Id, else from the body's
    request_id, else from the server. A client may use the same id for two requests at once, so the
    engine gets a client's id with a random suffix. lora: the adapter that the request names."""

    def __init__(
        self, prefix: str, http: Request, given: str | None, lora: "LoRARequest | None" = None
    ) -> None:
        chosen = http.headers.get("x-request-id") or given
        self.response_id = (
            f"{prefix}-{chosen or getattr(http.state, 'request_id', None) or uuid.uuid4().hex}"
        )
        self._lora = lora
        self._engine_id = (
            f"{self.response_id}-{uuid.uuid4().hex[:8]}" if chosen else self.response_id
        )

    def options(self, priority: int, prompt_index: int | None = None) -> RequestOptions:
        """The options of the prompt at `prompt_index`. Pass None when there is only one prompt."""
        suffix = "" if prompt_index is None else f"-{prompt_index}"
        return RequestOptions(
            request_id=self._engine_id + suffix,
            response_id=self.response_id,
            priority=priority,
            lora=self._lora,
        )


class Usage:
    """Counts tokens. with_details: also report the number of cached prompt tokens."""

    def __init__(self, *, with_details: bool) -> None:
        self._with_details = with_details
        self._prompts: dict[int, tuple[int, int | None]] = {}
        self._num_completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count the new tokens of an output. The prompt is counted once."""
        if prompt_index not in self._prompts:
            self._prompts[prompt_index] = (
                len(output.prompt_token_ids or ()),
                output.num_cached_tokens,
            )
        for completion in output.outputs:
            self._num_completion_tokens += len(completion.token_ids)

    def num_prompt_tokens(self, prompt_index: int) -> int:
        return self._prompts[prompt_index][0]

    def total(self) -> dict[str, Any]:
        num_prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompts.values())
        usage = usage_of(num_prompt_tokens, self._num_completion_tokens)
        cached = [num_cached for _, num_cached in self._prompts.values() if num_cached is not None]
        if self._with_details and cached:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        return usage


def usage_of(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    total = num_prompt_tokens + num_completion_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": total,
        "completion_tokens": num_completion_tokens,
    }


class ChunkWriter:
    """Builds the events of one stream. The part that all chunks share is encoded once."""

    def __init__(
        self, request: GenerationFields, head: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        options = request.stream_options
        forced = bool(settings.get("enable_force_include_usage"))
        self.include_usage = forced or bool(options and options.include_usage)
        self.continuous = forced or bool(
            options and options.include_usage and options.continuous_usage_stats
        )
        self._start = b"data: " + encode(head)[:-1] + b',"choices":['

    def chunk(
        self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None = None, **more: Any
    ) -> bytes:
        """A chunk with one choice. more: further fields of the chunk."""
        if usage is not None:
            more["usage"] = usage
        end = b"]," + encode(more)[1:] if more else b"]}"
        # the echo of a prompt, with its logprobs
        is_long = len(choice.get("text") or "") > MANY_CHARS
        return self._start + (in_pieces if is_long else encode)(choice) + end + b"\n\n"

    def usage_chunk(self, usage: Mapping[str, Any]) -> bytes:
        """The last chunk: it has no choices, and the usage of the whole request."""
        return self._start + b'],"usage":' + encode(usage) + b"}\n\n"


class Answer(ABC):
    """The answer to one request, as one object (`whole`) or as events. A subclass defines the form
    of a choice."""

    kind: str
    chunk_kind: str

    def __init__(
        self,
        request: GenerationFields,
        response_id: str,
        model: str,
        client: EngineClient,
        settings: Mapping[str, Any],
    ) -> None:
        self.client = client
        self.settings = settings
        self._fields = request
        asked = request.return_tokens_as_token_ids
        self.names_ids = (
            bool(settings.get("return_tokens_as_token_ids")) if asked is None else asked
        )
        self._head = {
            "id": response_id,
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._usage = Usage(with_details=bool(settings.get("enable_prompt_tokens_details")))
        self._num_tokens: Counter[int] = Counter()

    async def respond(self, http: Request, outputs: Outputs, num_prompts: int) -> Response:
        """Returns the response: after the first output when it is streamed, otherwise after all
        outputs."""
        try:
            if self._fields.stream:
                first = await while_connected(http.receive, first_of(outputs))
                return EventStream(
                    self.events(chain(first, outputs)), outputs, error_event, end=DONE
                )
            finals = await while_connected(http.receive, last_outputs(outputs, num_prompts))
        except RequestError as error:
            error.parameter = FIELDS.get(error.parameter or "", error.parameter)
            raise
        body = await off_loop(_num_bytes(finals), lambda: in_pieces(self.whole(finals)))
        return Response(body, media_type="application/json")

    def whole(self, finals: Sequence[RequestOutput]) -> dict[str, Any]:
        """The final outputs of all prompts as one object."""
        choices: list[dict[str, Any]] = []
        for prompt_index, output in enumerate(finals):
            self.prepare(output)
            self._usage.add(prompt_index, output)
            choices += self.choices(prompt_index, output)
        return {
            **self._head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {"prompt_tokens_details": None, **self._usage.total()},
            "kv_transfer_params": finals[0].kv_transfer_params,
        }

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Yields chunks. The chunks of one output are sent together."""
        writer = ChunkWriter(self._fields, {**self._head, "object": self.chunk_kind}, self.settings)
        async for prompt_index, output in outputs:
            self.prepare(output)
            self._usage.add(prompt_index, output)
            event = await off_loop(
                _num_bytes([output]), partial(self._event, writer, prompt_index, output)
            )
            if event:
                yield event
        if writer.include_usage:
            yield writer.usage_chunk(self._usage.total())

    def _event(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput) -> bytes:
        return b"".join(self.chunks(writer, prompt_index, output))

    def prepare(self, output: RequestOutput) -> None:
        """Check or change an output before it is written."""

    @abstractmethod
    def choices(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of one prompt's final output, in order."""

    @abstractmethod
    def chunks(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """The chunks of one output of a stream."""

    def count(self, index: int, completion: CompletionOutput) -> None:
        """Count the new tokens of the choice `index`, for `usage_so_far`."""
        self._num_tokens[index] += len(completion.token_ids)

    def usage_so_far(
        self, writer: ChunkWriter, prompt_index: int, index: int
    ) -> dict[str, Any] | None:
        """The usage of one choice so far. Returns None unless every chunk must report usage."""
        if not writer.continuous:
            return None
        return usage_of(self._usage.num_prompt_tokens(prompt_index), self._num_tokens[index])

    def says_nothing(
        self, writer: ChunkWriter, text: str, completion: CompletionOutput, *, with_logprobs: bool
    ) -> bool:
        """True when the output adds nothing to the stream: it has no text, and the request does not
        ask for its tokens."""
        if text or completion.finish_reason is not None:
            return False
        tells_tokens = with_logprobs or self._fields.return_token_ids or writer.continuous
        return not (tells_tokens and completion.token_ids)


def _num_bytes(outputs: Sequence[RequestOutput]) -> int:
    """About how many bytes the logprobs of the outputs take as JSON."""
    positions = (
        len(output.prompt_logprobs or ()) + sum(len(one.logprobs or ()) for one in output.outputs)
        for output in outputs
    )
    return 1000 * sum(positions)


def prompt_logprobs(steps: Sequence[Step | None] | None) -> list[dict[str, Any] | None] | None:
    """Logprobs in vLLM's shape: {token id: {logprob, rank, decoded_token}} for each prompt token;
    null for the first."""
    if steps is None:
        return None
    return [
        {
            str(token): {
                "logprob": max(entry.logprob, LOWEST),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in step.items()
        }
        if step
        else None
        for step in steps
    ]
