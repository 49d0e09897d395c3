"""The turns of one response: the model writes, the server runs the built-in tools it calls, and the model goes on."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.data.output import RequestOutput
from pegboard.data.sampling_params import SamplingParams
from pegboard.errors import PegboardError, RequestError
from pegboard.interfaces.api import EngineClient, ParsedOutput, Parsing, Prompt, RequestOptions
from pegboard.interfaces.tokenizer import Chat
from pegboard_api_openai.connection import Outputs, chain, first_output, merge, refuse_failed
from pegboard_api_openai.rendering import render
from pegboard_api_openai.responses.fields import ResponsesRequest
from pegboard_api_openai.responses.history import as_messages, conversation, is_unfinished
from pegboard_api_openai.responses.open_items import StreamEvent
from pegboard_api_openai.responses.request import later_parsing
from pegboard_api_openai.responses.response import ResponseAnswer
from pegboard_api_openai.responses.tools import Tools

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays the same in all turns. messages: the conversation before this response. auto: calls are read where the choice is
    the model's. template_kwargs: the template's switches."""

    client: EngineClient
    request: ResponsesRequest
    messages: Messages
    tools: Tools
    template_kwargs: Mapping[str, Any]
    auto: bool


class Turns:
    """Writes one response: `start`, perhaps `wait`, then `events` to its end; `aclose` in any case."""

    def __init__(self, plan: Plan, answer: ResponseAnswer, params: SamplingParams, parsing: Parsing) -> None:
        self.answer = answer
        self._plan = plan
        self._params = params
        self._parsing = parsing
        self._outputs: Outputs | None = None
        self._first: tuple[int, RequestOutput] | None = None
        self._is_first_turn = True
        self._is_withdrawn = False

    def conversation(self) -> Messages:
        """With what is written so far, without instructions."""
        return [*self._plan.messages, *as_messages(self.answer.items.written)]

    async def start(self, shapes: Sequence[Mapping[str, Any]] | None) -> None:
        """Write the prompt. shapes: the tools that the template shows."""
        continues = is_unfinished(self._plan.request.input)
        self._outputs = await self._generate(self._plan.messages, shapes, self._params, self._parsing, continues=continues)

    async def wait(self) -> None:
        """For the first output: before the response begins, an error still has its proper status."""
        assert self._outputs is not None, "started"
        self._first = await first_output(self._outputs)

    async def aclose(self) -> None:
        """Abort what runs, and end the tools' sessions. Again is fine."""
        if self._outputs is not None:
            await self._outputs.aclose()
        await self._plan.tools.close()

    async def events(self) -> AsyncGenerator[list[StreamEvent], None]:
        """Events as they come, those of one output together. A stream tells what goes wrong; without one PegboardError is raised,
        unless tools have run already: then the response tells."""
        yield self.answer.begin()
        try:
            while True:
                news: list[StreamEvent] = []
                async for output in self._turn():
                    news = self.answer.read(output)
                    if self.answer.finish_reason is None:
                        yield news
                goes_on, pending = self._goes_on(), self.answer.items.pending
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
            if not self._plan.request.stream and (self._is_first_turn or not isinstance(error, RequestError)):
                raise
            yield [self.answer.fail(error)]
        finally:
            await self.aclose()

    async def _turn(self) -> AsyncGenerator[ParsedOutput, None]:
        assert self._outputs is not None, "started"
        first, self._first = self._first, None
        async for _, output in self._outputs if first is None else chain(first, self._outputs):
            assert isinstance(output, ParsedOutput), "responses are parsed"
            refuse_failed(output)
            yield output

    def _goes_on(self) -> bool:
        """The model waits for something, and all of it comes from the server. A call that was ignored is answered once; then the
        functions are withdrawn."""
        items = self.answer.items
        waits = bool(items.pending) or (items.num_ignored > 0 and not self._is_withdrawn)
        return waits and self.answer.finish_reason == "stop" and not items.num_client_calls

    async def _next_turn(self) -> bool:
        """Generate behind what is written; False when no token is left for it."""
        plan, answer, limit = self._plan, self.answer, self._params.max_tokens
        left = None if limit is None else limit - answer.num_output_tokens
        if left is not None and left < 1:
            return False
        self._is_first_turn = False
        self._is_withdrawn = answer.items.num_ignored > 0
        shapes = plan.tools.of_client() if self._is_withdrawn else plan.tools.shapes
        parsing = later_parsing(self._parsing, shapes, plan.client, auto=plan.auto)
        answer.next_turn()
        self._outputs = await self._generate(self.conversation(), shapes, self._params.clone(max_tokens=left), parsing)
        return True

    async def _generate(
        self,
        messages: Messages,
        shapes: Sequence[Mapping[str, Any]] | None,
        params: SamplingParams,
        parsing: Parsing,
        *,
        continues: bool = False,
    ) -> Outputs:
        plan, request = self._plan, self._plan.request
        chat = Chat(
            messages=conversation(request.instructions, (), messages),
            tools=shapes or None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=plan.template_kwargs,
        )
        token_ids = await render(plan.client.tokenizer(), chat, add_special_tokens=False)
        params = plan.client.prepare(params, parsing, token_ids)
        options = RequestOptions(request_id=f"{self.answer.name}-{uuid.uuid4().hex[:8]}", priority=request.priority)
        prompt = Prompt(token_ids=token_ids, add_special_tokens=False, cache_salt=request.cache_salt)
        return merge([plan.client.events(plan.client.generate(prompt, params, options), parsing)])
