"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pegboard.data.output import CompletionOutput, RequestOutput
from pegboard.interfaces.api import EngineClient
from pegboard.interfaces.output_parser import Event, ToolCallStart
from pegboard.interfaces.tokenizer import Chat
from pegboard_api_openai.answer import Answer, AnswerIds, ChunkWriter
from pegboard_api_openai.conversation import read_request
from pegboard_api_openai.fields import ChatRequest
from pegboard_api_openai.logprobs import prompt_logprobs
from pegboard_api_openai.message_events import delta_fields, finish_reason, message_fields
from pegboard_api_openai.outputs import merge
from pegboard_api_openai.sampling import chat_params
from pegboard_chat.chats import Chats, ToolChoice
from pegboard_chat.logprobs import TokenNames, chat_logprobs
from pegboard_chat.reading import ParsedOutput
from pegboard_chat.request_body import parse_body
from pegboard_server.json_api import served_model


class ChatRoute:
    """Answers a conversation whole or as a stream."""

    def __init__(self, client: EngineClient, settings: Mapping[str, Any]) -> None:
        self._client = client
        self._settings = settings
        self._chats = Chats(client, settings)

    async def answer(self, http: Request) -> Response:
        """Chat completion: whole, or with `stream` as server-sent events."""
        client = self._client
        body = parse_body(await http.body(), ChatRequest)
        model = served_model(client, body.model)
        request = read_request(body)
        params = chat_params(body, client.default_params())
        ids = AnswerIds("chatcmpl", http, body.request_id)
        outputs = await self._chats.answer(request, params, ids.options(body.priority))
        choice = self._chats.tool_choice(request)
        answer = ChatAnswer(body, request.chat, choice, ids.response_id, model, client, self._settings)
        return await answer.respond(http, merge([outputs]), 1)


class ChatAnswer(Answer):
    """One choice per completion."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        chat: Chat,
        tool_choice: ToolChoice,
        response_id: str,
        model: str,
        client: EngineClient,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(request, response_id, model, client, settings)
        self._request = request
        last = chat.messages[-1]
        continues = not chat.add_generation_prompt
        self._role = last["role"] if continues else settings.get("response_role", "assistant")
        self._echo = last["content"] if request.echo and last["role"] == self._role else ""
        token_bytes = client.tokenizer().vocabulary().token_bytes if request.logprobs else ()
        self._names = TokenNames(as_ids=request.return_tokens_as_token_ids, token_bytes=token_bytes)
        self._has_begun = False
        self._has_parsers = tool_choice != "none" or client.parsers().reasoning is not None
        self._is_named = tool_choice == "named"
        self._hides_tokens = not request.include_reasoning and self._has_parsers  # they would tell what the reasoning was
        self._calling: set[int] = set()

    def whole(self, finals: Sequence[RequestOutput]) -> dict[str, Any]:
        request, output = self._request, finals[0]
        return {
            **super().whole(finals),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if request.prompt_logprobs is not None else None,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
        }

    def choices(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        assert isinstance(output, ParsedOutput), "chats are parsed"
        ordered = sorted(output.outputs, key=lambda item: item.index)
        return [self._choice(completion, output.events[completion.index]) for completion in ordered]

    def _choice(self, completion: CompletionOutput, events: Sequence[Event]) -> dict[str, Any]:
        message = {
            "role": self._role,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **message_fields(events, echo=self._echo, with_reasoning=self._request.include_reasoning),
        }
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": self._finish_reason(completion, events),
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._request.return_token_ids and not self._hides_tokens else None,
        }

    def _finish_reason(self, completion: CompletionOutput, events: Sequence[Event]) -> str | None:
        if any(isinstance(event, ToolCallStart) for event in events):
            self._calling.add(completion.index)
        has_calls = completion.index in self._calling
        return finish_reason(completion.finish_reason, has_calls=has_calls, is_named=self._is_named)

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._request.logprobs or self._hides_tokens:
            return None
        return chat_logprobs(completion.token_ids, completion.logprobs, self._request.top_logprobs or 0, self._names)

    def chunks(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput) -> list[bytes]:
        assert isinstance(output, ParsedOutput), "chats are parsed"
        chunks = [] if self._has_begun else self._opening(writer, output)
        self._has_begun = True
        for completion in output.outputs:
            self.count(completion.index, completion)
            events = output.events[completion.index]
            delta = delta_fields(events, with_reasoning=self._request.include_reasoning)
            reason = self._finish_reason(completion, events)
            if delta or not self.says_nothing(writer, "", completion, with_logprobs=self._request.logprobs):
                chunks.append(self._chunk(writer, completion, delta, reason))
        return chunks

    def _opening(self, writer: ChunkWriter, output: RequestOutput) -> list[bytes]:
        """Per choice: who speaks, then the echo of the message that is continued."""
        more = {"prompt_token_ids": output.prompt_token_ids} if self._request.return_token_ids else {}
        chunks = []
        for index in range(self._request.n):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append(writer.chunk(choice, self.usage_so_far(writer, 0, index), **more))
            if self._echo:
                choice = {"index": index, "delta": {"content": self._echo}, "logprobs": None, "finish_reason": None}
                chunks.append(writer.chunk(choice, self.usage_so_far(writer, 0, index)))
        return chunks

    def _chunk(self, writer: ChunkWriter, completion: CompletionOutput, delta: dict[str, Any], reason: str | None) -> bytes:
        choice: dict[str, Any] = {
            "index": completion.index,
            "delta": delta or ({} if self._has_parsers else {"content": ""}),
            "logprobs": self._logprobs(completion) if completion.token_ids else None,
            "finish_reason": reason,
        }
        if completion.finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if self._request.return_token_ids and not self._hides_tokens:
            choice["token_ids"] = completion.token_ids
        return writer.chunk(choice, self.usage_so_far(writer, 0, completion.index))
