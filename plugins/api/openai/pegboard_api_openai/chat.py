"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from pegboard.errors import RequestError
from pegboard.interfaces.api import EngineClient, Prompt
from pegboard.interfaces.tokenizer import Chat
from pegboard.output import CompletionOutput, RequestOutput
from pegboard_api_openai.answer import AnswerIds, ChunkWriter, Usage, answer_head, served_model, usage_of
from pegboard_api_openai.body import parse_body
from pegboard_api_openai.connection import (
    EventStream,
    Outputs,
    chain,
    first_output,
    json_response,
    last_outputs,
    merge,
    refuse_failed,
    while_connected,
)
from pegboard_api_openai.fields import ChatRequest
from pegboard_api_openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from pegboard_api_openai.messages import read_messages, read_tools
from pegboard_api_openai.sampling import chat_params

# Template arguments with a field of their own, or that would change what rendering returns.
RESERVED_KWARGS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)


class ChatRoute:
    """Renders the conversation, generates, and answers whole or as a stream."""

    def __init__(self, client: EngineClient, settings: Mapping[str, Any]) -> None:
        self._client = client
        self._settings = settings

    async def __call__(self, http: Request) -> Response:
        request = parse_body(await http.body(), ChatRequest)
        model = served_model(self._client, request.model)
        chat = self._chat(request)
        params = chat_params(request, self._client.default_params())
        tokenizer = self._client.tokenizer()

        def tokenize() -> Sequence[int]:
            rendered = tokenizer.render(chat)
            if rendered.token_ids is not None:
                return rendered.token_ids
            return tokenizer.encode(rendered.text or "", add_special_tokens=request.add_special_tokens)

        token_ids = await to_thread.run_sync(tokenize)
        ids = AnswerIds("chatcmpl", http, request.request_id)
        prompt = Prompt(token_ids=token_ids, add_special_tokens=False, cache_salt=request.cache_salt)
        outputs = merge([self._client.generate(prompt, params, ids.options(request.priority))])
        answer = ChatAnswer(request, chat, ids.response_id, model, self._client, self._settings)
        if request.stream:
            first = await while_connected(http.receive, first_output(outputs))
            return EventStream(answer.events(chain(first, outputs)), outputs)
        (output,) = await while_connected(http.receive, last_outputs(outputs, 1))
        return json_response(answer.whole(output))

    def _chat(self, request: ChatRequest) -> Chat:
        messages = read_messages(request.messages)
        tools = read_tools(request.tools, request.tool_choice)
        generation_prompt = request.add_generation_prompt
        if generation_prompt and request.continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true: an answer either continues the last "
                "message or starts a new one",
                parameter="continue_final_message",
            )
        if request.chat_template is not None and not self._settings.get("trust_request_chat_template"):
            raise RequestError(
                "chat_template is not accepted in requests; the server allows it with --trust-request-chat-template",
                parameter="chat_template",
            )
        taken = next((name for name in RESERVED_KWARGS if name in request.chat_template_kwargs), None)
        if taken is not None:
            raise RequestError(f"chat_template_kwargs must not hold {taken!r}", parameter="chat_template_kwargs")
        return Chat(
            messages=messages,
            tools=tools,
            documents=request.documents,
            add_generation_prompt=not request.continue_final_message if generation_prompt is None else generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            template_kwargs=request.chat_template_kwargs,
        )


class ChatAnswer:
    """The answer to one request, as one object or as events."""

    def __init__(
        self,
        request: ChatRequest,
        chat: Chat,
        response_id: str,
        model: str,
        client: EngineClient,
        settings: Mapping[str, Any],
    ) -> None:
        self._request = request
        self._settings = settings
        self._response_id = response_id
        self._model = model
        last = chat.messages[-1]
        continues = not chat.add_generation_prompt
        self._role = last["role"] if continues else settings.get("response_role", "assistant")
        self._echo = last["content"] if request.echo and last["role"] == self._role else ""
        token_bytes = client.tokenizer().vocabulary().token_bytes if request.logprobs else ()
        self._names = TokenNames(as_ids=request.return_tokens_as_token_ids, token_bytes=token_bytes)
        self._usage = Usage(with_details=bool(settings.get("enable_prompt_tokens_details")))

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        request = self._request
        self._usage.add(0, output)
        return {
            **answer_head(self._response_id, "chat.completion", self._model),
            "choices": [self._choice(completion) for completion in sorted(output.outputs, key=lambda item: item.index)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {"prompt_tokens_details": None, **self._usage.total()},
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if request.prompt_logprobs is not None else None,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
            "kv_transfer_params": None,
        }

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        message = {
            "role": self._role,
            "content": self._echo + completion.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": None,
            "reasoning_content": None,
        }
        return {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._request.return_token_ids else None,
        }

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(completion.token_ids, completion.logprobs, self._request.top_logprobs or 0, self._names)

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Chunks; those of one output are sent together."""
        head = answer_head(self._response_id, "chat.completion.chunk", self._model)
        writer = ChunkWriter(self._request, head, self._settings)
        num_tokens = [0] * self._request.n
        is_first = True
        async for _, output in outputs:
            refuse_failed(output)
            self._usage.add(0, output)
            chunks = self._opening(writer, output) if is_first else []
            is_first = False
            for completion in output.outputs:
                num_tokens[completion.index] += len(completion.token_ids)
                chunk = self._chunk(writer, completion, num_tokens[completion.index])
                if chunk:
                    chunks.append(chunk)
            if chunks:
                yield b"".join(chunks)
        if writer.include_usage:
            yield writer.usage_chunk(self._usage.total())

    def _opening(self, writer: ChunkWriter, output: RequestOutput) -> list[bytes]:
        """Per choice: who speaks, then the echo of the message that is continued."""
        more = {"prompt_token_ids": output.prompt_token_ids} if self._request.return_token_ids else {}
        chunks = []
        for index in range(self._request.n):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append(writer.chunk(choice, self._usage_so_far(writer, 0), **more))
            if self._echo:
                choice = {"index": index, "delta": {"content": self._echo}, "logprobs": None, "finish_reason": None}
                chunks.append(writer.chunk(choice, self._usage_so_far(writer, 0)))
        return chunks

    def _chunk(self, writer: ChunkWriter, completion: CompletionOutput, num_tokens: int) -> bytes | None:
        """None when there is nothing to say (the text is held back)."""
        request = self._request
        says_tokens = request.logprobs or request.return_token_ids or writer.continuous
        if not completion.text and completion.finish_reason is None and not (says_tokens and completion.token_ids):
            return None
        choice: dict[str, Any] = {
            "index": completion.index,
            "delta": {"content": completion.text},
            "logprobs": self._logprobs(completion) if completion.token_ids else None,
            "finish_reason": completion.finish_reason,
        }
        if completion.finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return writer.chunk(choice, self._usage_so_far(writer, num_tokens))

    def _usage_so_far(self, writer: ChunkWriter, num_tokens: int) -> dict[str, Any] | None:
        return usage_of(self._usage.num_prompt_tokens(0), num_tokens) if writer.continuous else None
