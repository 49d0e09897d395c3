"""The turns of one response: the model writes, the server runs the built-in tools that it calls,
and the model continues."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import PegboardError, RequestError
from pegboard.interfaces.api import RequestOptions
from pegboard_api_responses.fields import ResponsesRequest
from pegboard_api_responses.history import as_messages, conversation
from pegboard_api_responses.open_items import StreamEvent
from pegboard_api_responses.response import ResponseAnswer
from pegboard_api_responses.tools import Tools
from pegboard_chat.chats import ChatRequest, Chats, ParsedOutput
from pegboard_server.streaming import chain, first_of

if TYPE_CHECKING:
    from pegboard.data.request import LoRARequest

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The inputs that stay the same in all turns. messages: the conversation before this response.
    num_bytes: the size of the request and of the stored response before it. lora: the adapter that
    the request names."""

    chats: Chats
    request: ResponsesRequest
    messages: Messages
    tools: Tools
    num_bytes: int
    lora: "LoRARequest | None" = None


class Turns:
    """Writes one response. Call `start`, optionally `wait`, then read `events` to its end; call
    `aclose` in any case. input_items: all items before the response, to be listed."""

    def __init__(
        self,
        plan: Plan,
        answer: ResponseAnswer,
        params: SamplingParams,
        chat_request: ChatRequest,
        input_items: Sequence[Mapping[str, Any]],
    ) -> None:
        self.answer = answer
        self.input_items = input_items
        self._plan = plan
        self._params = params
        self._chat_request = chat_request
        self._outputs: AsyncGenerator[ParsedOutput, None] | None = None
        self._first: ParsedOutput | None = None
        self._is_first_turn = True
        self._is_withdrawn = False

    @property
    def num_bytes(self) -> int:
        """About how many bytes the request and the response have as JSON."""
        return self._plan.num_bytes + self.answer.num_bytes

    def conversation(self) -> Messages:
        """All messages so far, without instructions."""
        return [*self._plan.messages, *as_messages(self.answer.items.written)]

    async def start(self) -> None:
        """Render the prompt of the first turn and start generating."""
        self._outputs = await self._generate(self._chat_request, self._params)

    async def wait(self) -> None:
        """Wait for the first output. An error that is raised before the response begins can still
        get its proper status."""
        assert self._outputs is not None, "started"
        self._first = await first_of(self._outputs)

    async def aclose(self) -> None:
        """Abort the running request and end the tools' sessions. A second call does nothing."""
        if self._outputs is not None:
            await self._outputs.aclose()
        await self._plan.tools.close()

    async def events(self) -> AsyncGenerator[list[StreamEvent], None]:
        """Yields events as they arrive, those of one output together. A streamed response reports
        errors as events. Otherwise PegboardError is raised; only when tools have already run, the
        response reports it."""
        yield self.answer.begin()
        try:
            while True:
                news: list[StreamEvent] = []
                async for output in self._turn():
                    news = self.answer.read(output)
                    if self.answer.finish_reason is None:
                        yield news
                goes_on = self._goes_on()
                pending = self.answer.items.pending
                if pending:
                    yield news
                    news = []
                while pending:
                    done = await self._plan.tools.run(pending[0])
                    yield pending.pop(0).answer(done)
                if not goes_on:
                    yield [*news, self.answer.end()]
                    return
                yield news
                if not await self._next_turn():
                    yield [self.answer.end("length")]
                    return
        except PegboardError as error:
            if not self._plan.request.stream and (
                self._is_first_turn or not isinstance(error, RequestError)
            ):
                raise
            yield [self.answer.fail(error)]
        finally:
            await self.aclose()

    async def _turn(self) -> AsyncGenerator[ParsedOutput, None]:
        assert self._outputs is not None, "started"
        first = self._first
        self._first = None
        async for output in self._outputs if first is None else chain(first, self._outputs):
            yield output

    def _goes_on(self) -> bool:
        """True if the next turn should follow: the model waits for results of the server's tools,
        and for none of the client's. Ignored calls are answered once. After that, the built-in
        functions are removed from the request."""
        items = self.answer.items
        waits = bool(items.pending) or (items.num_ignored > 0 and not self._is_withdrawn)
        return waits and self.answer.finish_reason == "stop" and not items.num_client_calls

    async def _next_turn(self) -> bool:
        """Start the next turn. Returns False when no tokens are left for it."""
        plan = self._plan
        answer = self.answer
        limit = self._params.max_tokens
        left = None if limit is None else limit - answer.num_output_tokens
        if left is not None and left < 1:
            return False
        self._is_first_turn = False
        self._is_withdrawn = answer.items.num_ignored > 0
        shapes = plan.tools.of_client() if self._is_withdrawn else plan.tools.shapes
        chat = replace(
            self._chat_request.chat,
            messages=conversation(plan.request.instructions, (), self.conversation()),
            tools=shapes or None,
            add_generation_prompt=True,
            continue_final_message=False,
        )
        # A forced call has been made, so from now on the model chooses.
        later = replace(self._chat_request, chat=chat, tools=None, tool_choice=None, function=None)
        answer.next_turn()
        self._outputs = await self._generate(later, self._params.clone(max_tokens=left))
        return True

    async def _generate(
        self, request: ChatRequest, params: SamplingParams
    ) -> AsyncGenerator[ParsedOutput, None]:
        name = f"{self.answer.name}-{uuid.uuid4().hex[:8]}"
        plan = self._plan
        shown = self.answer.name
        options = RequestOptions(
            request_id=name, response_id=shown, priority=plan.request.priority, lora=plan.lora
        )
        return await self._plan.chats.answer(request, params, options)
