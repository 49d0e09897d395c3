"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pegboard.data.output import CompletionOutput, RequestOutput
from pegboard.data.prompt_embeds import PromptEmbeds, wrong_embeds
from pegboard.data.sampling_params import BeamSearchParams, SamplingParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import EngineClient, Prompt
from pegboard_api_openai.answer import (
    Answer,
    AnswerIds,
    ChunkWriter,
    Outputs,
    merge,
    prompt_logprobs,
)
from pegboard_api_openai.fields import CompletionRequest
from pegboard_api_openai.sampling import completion_params
from pegboard_chat.off_loop import SMALL_BYTES, off_loop
from pegboard_chat.openai_format import LOWEST, Step, TokenNames
from pegboard_chat.outputs import check_finished
from pegboard_chat.prompt_field import read_prompts
from pegboard_chat.request_body import parse_body
from pegboard_chat.tensors import read_tensor
from pegboard_server.json_api import served_model

Given = str | list[int] | PromptEmbeds


class CompletionRoute:
    """Generates for one or many prompts. The answer is whole or a stream."""

    def __init__(self, client: EngineClient, settings: Mapping[str, Any]) -> None:
        self._client = client
        self._settings = settings

    async def answer(self, http: Request) -> Response:
        """Text completion of one or many prompts: whole, or with `stream` as server-sent events."""
        client = self._client
        body = await http.body()

        def read() -> tuple[list[Given], SamplingParams | BeamSearchParams]:
            given = self._read_prompts(request)
            check_number(len(given), request.n)
            return given, completion_params(request, client.default_params())

        request = await off_loop(len(body), lambda: parse_body(body, CompletionRequest))
        given, params = await off_loop(
            len(body) if request.prompt_embeds is None else SMALL_BYTES, read
        )
        model, lora = await served_model(client, request.model)
        ids = AnswerIds("cmpl", http, request.request_id, lora)
        prompts = [_prompt(request, value) for value in given]
        answer = CompletionAnswer(request, given, ids.response_id, model, client, self._settings)
        return await answer.respond(http, self._start(request, prompts, params, ids), len(prompts))

    def _read_prompts(self, request: CompletionRequest) -> list[Given]:
        """Return the prompts: those of prompt_embeds come first."""
        limit = self._settings.get("max_prompts_per_request", 1024)
        embeds = read_embeds(
            request.prompt_embeds, is_on=bool(self._settings.get("enable_prompt_embeds"))
        )
        if embeds and request.echo:
            raise RequestError(
                "echo needs the text of the prompt, and prompt_embeds has none", parameter="echo"
            )
        if len(embeds) > limit:
            reason = (
                f"prompt_embeds: {len(embeds)} prompts in one request, at most {limit} are allowed"
            )
            raise RequestError(reason, parameter="prompt_embeds")
        if embeds and request.prompt in (None, ""):  # clients of vLLM send an empty text
            return list(embeds)
        return [*embeds, *read_prompts(request.prompt, limit - len(embeds))]

    def _start(
        self,
        request: CompletionRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        ids: AnswerIds,
    ) -> Outputs:
        """Start to generate for all prompts. Returns the merged outputs."""
        streams = []
        for index, prompt in enumerate(prompts):
            options = ids.options(request.priority, index if len(prompts) > 1 else None)
            if isinstance(params, BeamSearchParams):
                streams.append(self._client.beam_search(prompt, params, options))
            else:
                streams.append(self._client.generate(prompt, params, options))
        return merge(streams)


def read_embeds(value: str | list[str] | None, *, is_on: bool) -> list[PromptEmbeds]:
    """Return the prompts of the field `prompt_embeds`. Raises RequestError, also if it is given
    although it is off."""
    if value is None:
        return []
    if not is_on:
        raise wrong_embeds(
            "prompt_embeds",
            "prompts as embeddings are off; start the server with --enable-prompt-embeds",
        )
    try:
        if isinstance(value, str):
            return [read_tensor(value, "prompt_embeds")]
        return [read_tensor(each, f"prompt_embeds[{index}]") for index, each in enumerate(value)]
    except RequestError as error:
        error.parameter = "prompt_embeds"
        raise


def _prompt(request: CompletionRequest, value: Given) -> Prompt:
    if isinstance(value, PromptEmbeds):
        return Prompt(embeds=(value,), cache_salt=request.cache_salt)
    if isinstance(value, str):
        return Prompt(
            text=value, add_special_tokens=request.add_special_tokens, cache_salt=request.cache_salt
        )
    return Prompt(token_ids=value, add_special_tokens=False, cache_salt=request.cache_salt)


class CompletionAnswer(Answer):
    """The answer to a text completion. Choice index = prompt index * n + completion index."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[Given],
        response_id: str,
        model: str,
        client: EngineClient,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(request, response_id, model, client, settings)
        self._request = request
        self._prompts = prompts
        self._names = TokenNames(as_ids=self.names_ids)
        num_choices = len(prompts) * request.n
        self._num_chars = [0] * num_choices
        self._has_begun = [False] * num_choices

    def prepare(self, output: RequestOutput) -> None:
        """Check the output. An echo with max_tokens 0 has generated one token, which is removed
        here. Raises PegboardError when the engine failed to finish a completion."""
        check_finished(output)
        if self._request.max_tokens != 0:
            return
        for completion in output.outputs:
            completion.text = ""
            completion.token_ids = []
            completion.logprobs = [] if completion.logprobs is not None else None
            completion.finish_reason = completion.finish_reason and "length"
            completion.stop_reason = None

    def choices(self, prompt_index: int, output: RequestOutput) -> list[dict[str, Any]]:
        echo = self._echo(prompt_index, output)
        completions = sorted(output.outputs, key=lambda item: item.index)
        return [self._choice(prompt_index, output, completion, echo) for completion in completions]

    def _choice(
        self, prompt_index: int, output: RequestOutput, completion: CompletionOutput, echo: str
    ) -> dict[str, Any]:
        request = self._request
        asked = request.prompt_logprobs is not None
        return {
            "index": prompt_index * request.n + completion.index,
            "text": echo + completion.text,
            "logprobs": self._logprobs(output, completion, 0, echo if request.echo else None),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if request.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if asked else None,
            "prompt_token_ids": output.prompt_token_ids if request.return_token_ids else None,
        }

    def _echo(self, prompt_index: int, output: RequestOutput) -> str:
        """Returns the prompt's text if the request asks for an echo, else "". The text is the
        client's, or it is decoded from the token ids if the client sent ids or the prompt was
        truncated."""
        request = self._request
        if not request.echo:
            return ""
        given = self._prompts[prompt_index]
        if isinstance(given, str) and request.truncate_prompt_tokens is None:
            return given
        return self.client.tokenizer().decode(
            output.prompt_token_ids or (), skip_special_tokens=False
        )

    def _logprobs(
        self, output: RequestOutput, completion: CompletionOutput, offset: int, echo: str | None
    ) -> dict[str, Any] | None:
        """Logprobs of a completion. offset: the number of characters of this choice that were sent
        before. echo: the prompt's text, to start with the prompt's tokens; else None."""
        num_top = self._request.logprobs
        if num_top is None:
            return None
        token_ids = list(completion.token_ids)
        steps: list[Step | None] = list(completion.logprobs or [{}] * len(token_ids))
        decode = partial(self.client.tokenizer().decode, skip_special_tokens=False)
        if echo is None or not output.prompt_token_ids:
            return completion_logprobs(token_ids, steps, num_top, self._names, decode, offset)
        token_ids = [*output.prompt_token_ids, *token_ids]
        steps = [*(output.prompt_logprobs or [None] * len(output.prompt_token_ids)), *steps]
        # The tokenizer may have put tokens before a text, such as <s>, which the echo does not
        # contain.
        num_hidden = len(decode(output.prompt_token_ids)) - len(echo)
        fields = completion_logprobs(
            token_ids, steps, num_top, self._names, decode, -num_hidden, decode(token_ids[:1])
        )
        fields["text_offset"] = [max(0, offset) for offset in fields["text_offset"]]
        return fields

    def chunks(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput) -> list[bytes]:
        chunks = [
            self._chunk(writer, prompt_index, output, completion) for completion in output.outputs
        ]
        return [chunk for chunk in chunks if chunk]

    def _chunk(
        self,
        writer: ChunkWriter,
        prompt_index: int,
        output: RequestOutput,
        completion: CompletionOutput,
    ) -> bytes | None:
        """A chunk for one completion. Returns None when there is nothing to send."""
        request = self._request
        index = prompt_index * request.n + completion.index
        is_first = not self._has_begun[index]
        echo = self._echo(prompt_index, output) if is_first else ""
        text = echo + completion.text
        self.count(index, completion)
        if self.says_nothing(writer, text, completion, with_logprobs=request.logprobs is not None):
            return None
        self._has_begun[index] = True
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(
                output,
                completion,
                self._num_chars[index],
                echo if is_first and request.echo else None,
            ),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        self._num_chars[index] += len(text)
        if request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return writer.chunk(choice, self.usage_so_far(writer, prompt_index, index))


MAX_COMPLETIONS = 4096


def check_number(num_prompts: int, n: int) -> None:
    """Raise RequestError when a request asks for more completions than one request may have."""
    if num_prompts * n > MAX_COMPLETIONS:
        raise RequestError(
            f"n: {n} completions of each of {num_prompts} prompts are {num_prompts * n}, at most "
            f"{MAX_COMPLETIONS} are allowed in one request",
            parameter="n",
        )


PART = "\N{REPLACEMENT CHARACTER}"
"""Stands in a token's text for bytes that are no whole character."""

TOKENS_OF_A_CHARACTER = 8
"""After this many tokens, a character that is not whole is taken for text."""


def completion_logprobs(
    token_ids: Sequence[int],
    steps: Sequence[Step | None],
    num_top: int,
    names: TokenNames,
    decode: Callable[[list[int]], str],
    start: int,
    first_token: str = "",
) -> dict[str, Any]:
    """Returns four parallel lists. num_top: the number of alternatives to show in addition to the
    token itself; -1 = all. decode: returns the text of token ids. start: the number of characters
    before the first token. A step that is None (the first token of a prompt) has no logprob; its
    text is `first_token`. All tokens of one character have the offset of its first."""
    offsets = []
    tokens = []
    chosen = []
    top = []
    parts: list[int] = []  # the tokens of a character that is not whole
    for token, step in zip(token_ids, steps, strict=True):
        entry = step.get(token) if step else None
        text = first_token if step is None else entry.decoded_token if entry else None
        if parts and PART not in (text or ""):  # the character was never whole
            start += len(decode(parts))
            parts = []
        tokens.append(names.name(token, text))
        offsets.append(start)
        if PART in (text or ""):
            parts.append(token)
            text = decode(parts)
            if text.endswith(PART) and len(parts) < TOKENS_OF_A_CHARACTER:
                text = ""
            else:
                parts = []
        start += len(text or "")
        chosen.append(None if step is None else max(entry.logprob, LOWEST) if entry else LOWEST)
        top.append(_top(token, step, num_top, names) if step else None)
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": top}


def _top(token: int, step: Step, num_top: int, names: TokenNames) -> dict[str, float]:
    # beam search has more logprobs than the request asks for
    if num_top >= 0 and len(step) > num_top + (token in step):
        best = sorted(step, key=lambda other: -step[other].logprob)[:num_top]
        step = {other: step[other] for other in dict.fromkeys([token, *best]) if other in step}
    return {
        names.name(other, entry.decoded_token): max(entry.logprob, LOWEST)
        for other, entry in step.items()
    }
