"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pegboard.interfaces.api import EngineClient, Prompt
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
from pegboard_api_openai.fields import CompletionRequest
from pegboard_api_openai.logprobs import Step, TokenNames, completion_logprobs, prompt_logprobs
from pegboard_api_openai.prompts import read_prompts
from pegboard_api_openai.sampling import completion_params


class CompletionRoute:
    """Generates for one or many prompts, and answers whole or as a stream."""

    def __init__(self, client: EngineClient, settings: Mapping[str, Any]) -> None:
        self._client = client
        self._settings = settings

    async def __call__(self, http: Request) -> Response:
        request = parse_body(await http.body(), CompletionRequest, keep_null=("max_tokens",))
        model = served_model(self._client, request.model)
        given = read_prompts(request.prompt, self._settings.get("max_prompts_per_request", 1024))
        params = completion_params(request, self._client.default_params())
        ids = AnswerIds("cmpl", http, request.request_id)
        streams = []
        for index, value in enumerate(given):
            options = ids.options(request.priority, index if len(given) > 1 else None)
            streams.append(self._client.generate(self._prompt(request, value), params, options))
        outputs = merge(streams)
        answer = CompletionAnswer(request, given, ids.response_id, model, self._client, self._settings)
        if request.stream:
            first = await while_connected(http.receive, first_output(outputs))
            return EventStream(answer.events(chain(first, outputs)), outputs)
        finals = await while_connected(http.receive, last_outputs(outputs, len(given)))
        return json_response(answer.whole(finals))

    def _prompt(self, request: CompletionRequest, value: str | list[int]) -> Prompt:
        if isinstance(value, str):
            return Prompt(text=value, add_special_tokens=request.add_special_tokens, cache_salt=request.cache_salt)
        return Prompt(token_ids=value, add_special_tokens=False, cache_salt=request.cache_salt)


class CompletionAnswer:
    """The answer to one request, as one object or as events. Choice index = prompt index * n + completion index."""

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[str | list[int]],
        response_id: str,
        model: str,
        client: EngineClient,
        settings: Mapping[str, Any],
    ) -> None:
        self._request = request
        self._prompts = prompts
        self._response_id = response_id
        self._model = model
        self._client = client
        self._settings = settings
        self._names = TokenNames(as_ids=request.return_tokens_as_token_ids)
        self._usage = Usage(with_details=bool(settings.get("enable_prompt_tokens_details")))
        self._only_echo = request.max_tokens == 0

    def whole(self, finals: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for prompt_index, output in enumerate(finals):
            if self._only_echo:
                _drop_output(output)
            self._usage.add(prompt_index, output)
            echo = self._echo(prompt_index, output)
            for completion in sorted(output.outputs, key=lambda item: item.index):
                choices.append(self._whole_choice(prompt_index, output, completion, echo))
        return {
            **answer_head(self._response_id, "text_completion", self._model),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": None,
            "usage": {"prompt_tokens_details": None, **self._usage.total()},
            "kv_transfer_params": None,
        }

    def _whole_choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, echo: str) -> dict[str, Any]:
        request = self._request
        asked = request.prompt_logprobs is not None
        return {
            "index": prompt_index * request.n + completion.index,
            "text": echo + completion.text,
            "logprobs": self._logprobs(output, completion, 0, with_prompt=request.echo),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if request.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if asked else None,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
        }

    def _echo(self, prompt_index: int, output: RequestOutput) -> str:
        """The prompt's text when it is asked for: as it came, unless it came as ids or was cut."""
        request = self._request
        if not request.echo:
            return ""
        given = self._prompts[prompt_index]
        if isinstance(given, str) and request.truncate_prompt_tokens is None:
            return given
        return self._client.tokenizer().decode(output.prompt_token_ids or (), skip_special_tokens=True)

    def _logprobs(
        self, output: RequestOutput, completion: CompletionOutput, start: int, *, with_prompt: bool
    ) -> dict[str, Any] | None:
        """start: characters of this choice that were sent before. with_prompt: put the prompt's tokens in front."""
        if self._request.logprobs is None:
            return None
        token_ids = list(completion.token_ids)
        steps: list[Step | None] = list(completion.logprobs or [{}] * len(token_ids))
        first_token = ""
        if with_prompt and output.prompt_token_ids:
            token_ids = [*output.prompt_token_ids, *token_ids]
            steps = [*(output.prompt_logprobs or [None] * len(output.prompt_token_ids)), *steps]
            first_token = self._client.tokenizer().decode(token_ids[:1], skip_special_tokens=False)
        return completion_logprobs(token_ids, steps, self._names, start, first_token)

    async def events(self, outputs: Outputs) -> AsyncGenerator[bytes, None]:
        """Chunks; those of one output are sent together."""
        head = answer_head(self._response_id, "text_completion", self._model)
        writer = ChunkWriter(self._request, head, self._settings)
        num_choices = len(self._prompts) * self._request.n
        self._num_tokens = [0] * num_choices
        self._num_chars = [0] * num_choices
        self._begun = [False] * num_choices
        async for prompt_index, output in outputs:
            refuse_failed(output)
            if self._only_echo:
                _drop_output(output)
            self._usage.add(prompt_index, output)
            chunks = [self._chunk(writer, prompt_index, output, completion) for completion in output.outputs]
            event = b"".join(chunk for chunk in chunks if chunk)
            if event:
                yield event
        if writer.include_usage:
            yield writer.usage_chunk(self._usage.total())

    def _chunk(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> bytes | None:
        """None when there is nothing to say (the text is held back)."""
        request = self._request
        index = prompt_index * request.n + completion.index
        is_first = not self._begun[index]
        text = completion.text
        if is_first and request.echo:
            text = self._echo(prompt_index, output) + text
        self._num_tokens[index] += len(completion.token_ids)
        says_tokens = request.logprobs is not None or request.return_token_ids or writer.continuous
        if not text and completion.finish_reason is None and not (says_tokens and completion.token_ids):
            return None
        self._begun[index] = True
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(output, completion, self._num_chars[index], with_prompt=is_first and request.echo),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        self._num_chars[index] += len(text)
        if request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        usage = usage_of(self._usage.num_prompt_tokens(prompt_index), self._num_tokens[index]) if writer.continuous else None
        return writer.chunk(choice, usage)


def _drop_output(output: RequestOutput) -> None:
    """Of an echo with max_tokens 0, which had to run one token, nothing but the prompt is shown."""
    for completion in output.outputs:
        completion.text, completion.token_ids = "", []
        completion.logprobs = [] if completion.logprobs is not None else None
        completion.finish_reason, completion.stop_reason = completion.finish_reason and "length", None
