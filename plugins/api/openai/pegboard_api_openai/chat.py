"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pegboard.data.output import CompletionOutput, RequestOutput
from pegboard.data.sampling_params import BeamSearchParams, SamplingParams
from pegboard.errors import MalformedRequest
from pegboard.interfaces.api import EngineClient
from pegboard.interfaces.output_parser import (
    Content,
    Event,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from pegboard.interfaces.tokenizer import Chat
from pegboard_api_openai.answer import Answer, AnswerIds, ChunkWriter, merge, prompt_logprobs
from pegboard_api_openai.fields import ChatRequest, TemplateFields
from pegboard_api_openai.sampling import chat_params
from pegboard_chat import chats
from pegboard_chat.chats import Chats, ParsedOutput, ToolChoice
from pegboard_chat.off_loop import off_loop
from pegboard_chat.openai_format import (
    TokenNames,
    chat_logprobs,
    check_function,
    read_messages,
    read_tools,
    template_kwargs,
)
from pegboard_chat.parsing import fold
from pegboard_chat.request_body import parse_body, wrong
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
        given = await http.body()

        def read() -> tuple[ChatRequest, chats.ChatRequest, SamplingParams | BeamSearchParams]:
            body = parse_body(given, ChatRequest)
            return body, read_request(body), chat_params(body, client.default_params())

        body, request, params = await off_loop(len(given), read)
        model, lora = await served_model(client, body.model)
        ids = AnswerIds("chatcmpl", http, body.request_id, lora)
        outputs = await self._chats.answer(request, params, ids.options(body.priority))
        choice = self._chats.tool_choice(request)
        answer = ChatAnswer(
            body, request.chat, choice, ids.response_id, model, client, self._settings
        )
        return await answer.respond(http, merge([outputs]), 1)


class ChatAnswer(Answer):
    """The answer to a chat completion. It has one choice per completion."""

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
        self._names = TokenNames(as_ids=self.names_ids, token_bytes=token_bytes)
        self._has_begun = False
        self._has_parsers = tool_choice != "none" or client.parsers().reasoning is not None
        self._is_named = tool_choice == "named"
        self._is_legacy = bool(request.functions)
        # the tokens would reveal the hidden reasoning
        self._hides_tokens = not request.include_reasoning and self._has_parsers
        self._calling: set[int] = set()

    def whole(self, finals: Sequence[RequestOutput]) -> dict[str, Any]:
        request = self._request
        output = finals[0]
        return {
            **super().whole(finals),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs)
            if request.prompt_logprobs is not None
            else None,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
        }

    def choices(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        assert isinstance(output, ParsedOutput), "chats are parsed"
        ordered = sorted(output.outputs, key=lambda item: item.index)
        return [self._choice(completion, output.events[completion.index]) for completion in ordered]

    def _choice(self, completion: CompletionOutput, events: Sequence[Event]) -> dict[str, Any]:
        fields = message_fields(
            events, echo=self._echo, with_reasoning=self._request.include_reasoning
        )
        message = {
            "role": self._role,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **(as_function_call(fields) if self._is_legacy else fields),
        }
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": self._finish_reason(completion, events),
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids
            if self._request.return_token_ids and not self._hides_tokens
            else None,
        }

    def _finish_reason(self, completion: CompletionOutput, events: Sequence[Event]) -> str | None:
        if any(isinstance(event, ToolCallStart) for event in events):
            self._calling.add(completion.index)
        has_calls = completion.index in self._calling
        reason = finish_reason(
            completion.finish_reason, has_calls=has_calls, is_named=self._is_named
        )
        return "function_call" if reason == "tool_calls" and self._is_legacy else reason

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._request.logprobs or self._hides_tokens:
            return None
        return chat_logprobs(
            completion.token_ids, completion.logprobs, self._request.top_logprobs or 0, self._names
        )

    def chunks(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput) -> list[bytes]:
        assert isinstance(output, ParsedOutput), "chats are parsed"
        chunks = [] if self._has_begun else self._opening(writer, output)
        self._has_begun = True
        for completion in output.outputs:
            self.count(completion.index, completion)
            events = output.events[completion.index]
            delta = delta_fields(events, with_reasoning=self._request.include_reasoning)
            delta = as_function_call(delta) if self._is_legacy else delta
            reason = self._finish_reason(completion, events)
            if delta or not self.says_nothing(
                writer, "", completion, with_logprobs=self._request.logprobs
            ):
                chunks.append(self._chunk(writer, completion, delta, reason))
        return chunks

    def _opening(self, writer: ChunkWriter, output: RequestOutput) -> list[bytes]:
        """The first chunks of each choice: its role, then the echo of the message that is
        continued."""
        more = (
            {"prompt_token_ids": output.prompt_token_ids} if self._request.return_token_ids else {}
        )
        chunks = []
        for index in range(self._request.n):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append(writer.chunk(choice, self.usage_so_far(writer, 0, index), **more))
            if self._echo:
                choice = {
                    "index": index,
                    "delta": {"content": self._echo},
                    "logprobs": None,
                    "finish_reason": None,
                }
                chunks.append(writer.chunk(choice, self.usage_so_far(writer, 0, index)))
        return chunks

    def _chunk(
        self,
        writer: ChunkWriter,
        completion: CompletionOutput,
        delta: dict[str, Any],
        reason: str | None,
    ) -> bytes:
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


def read_chat(request: TemplateFields, tools: Sequence[Mapping[str, Any]] | None) -> Chat:
    """Reads the conversation for the chat template. Raises RequestError naming the wrong field."""
    generation_prompt = request.add_generation_prompt
    return Chat(
        messages=read_messages(request.messages),
        tools=tools,
        documents=request.documents,
        add_generation_prompt=not request.continue_final_message
        if generation_prompt is None
        else generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        template_kwargs=template_kwargs(
            request.chat_template_kwargs, getattr(request, "reasoning_effort", None)
        ),
        add_special_tokens=bool(request.add_special_tokens),
    )


def read_request(request: ChatRequest) -> chats.ChatRequest:
    """Reads the conversation and the tool choice of a chat completion. Raises RequestError naming
    the wrong field."""
    tools = read_tools(request.tools)
    choice: Any = request.tool_choice
    name: str | None = None
    if request.functions or request.function_call not in (None, "none"):
        tools, choice = _read_functions(request)
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise wrong(
                "tool_choice",
                "none, auto, required or {'type': 'function', 'function': {'name': …}}",
                choice,
            )
        choice = "named"
    elif choice not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", "none, auto, required or a named tool", choice)
    return chats.ChatRequest(
        chat=read_chat(request, tools),
        tool_choice=choice,
        function=name,
        parallel_tool_calls=request.parallel_tool_calls is not False and not request.functions,
        cache_salt=request.cache_salt,
        media_options=request.mm_processor_kwargs,
    )


def _read_functions(request: ChatRequest) -> tuple[Sequence[Mapping[str, Any]], Any]:
    """Return the tools and the tool choice that the legacy fields `functions` and `function_call`
    mean."""
    if request.tools or request.tool_choice is not None:
        raise MalformedRequest(
            "functions is the older form of tools: send either, not both", parameter="functions"
        )
    functions = request.functions or []
    choice = request.function_call
    if not functions:
        raise MalformedRequest("function_call needs functions", parameter="function_call")
    for index, function in enumerate(functions):
        check_function(function, f"functions[{index}]")
    if isinstance(choice, dict) and isinstance(choice.get("name"), str):
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        raise wrong("function_call", "none, auto or {'name': …}", choice)
    return [{"type": "function", "function": function} for function in functions], choice


def as_function_call(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn the tool call of a message or delta into the legacy `function_call`."""
    calls = fields.pop("tool_calls", None)
    return {**fields, "function_call": calls[0]["function"]} if calls else fields


def message_fields(events: Sequence[Event], *, echo: str, with_reasoning: bool) -> dict[str, Any]:
    """Returns content, reasoning (under both of its names) and tool_calls of a whole message.
    content is null when the answer consists only of reasoning or calls."""
    message = fold(events)
    reasoning = message.reasoning if with_reasoning and message.reasoning else None
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    content: str | None = echo + message.content
    if not content and (calls or message.reasoning):
        content = None
    return {
        "content": content,
        "tool_calls": calls,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }


def delta_fields(events: Sequence[Event], *, with_reasoning: bool) -> dict[str, Any]:
    """Returns the fields of the delta for one output. The delta is empty when the output adds
    nothing visible."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallStart(index, id, name):
                calls[index] = {
                    "index": index,
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    delta: dict[str, Any] = {}
    if reasoning and with_reasoning:
        delta["reasoning"] = delta["reasoning_content"] = "".join(reasoning)
    if content:
        delta["content"] = "".join(content)
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def finish_reason(engine_reason: str | None, *, has_calls: bool, is_named: bool) -> str | None:
    """Returns "tool_calls" when the model chose to call a tool and stopped by itself. A call that
    the request named is not the model's choice, so its reason is "stop", as in OpenAI's API."""
    return "tool_calls" if engine_reason == "stop" and has_calls and not is_named else engine_reason
