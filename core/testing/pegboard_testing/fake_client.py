"""A fake EngineClient. It has no model and no process but fulfils the whole contract. API plugins
and the server are tested with it.

Its tokenizer maps every byte to one token, so the text of every completion is known in advance: the
prompt itself (echo), or what `script` gives. It supports max_tokens, stop, stop_token_ids, n,
logprobs, prompt_logprobs, truncate_prompt_tokens, every output kind and abort; it fails and stalls
on demand, and records the requests that it receives.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.data.output import CompletionOutput, Logprob, RequestOutput
from pegboard.data.pooling_params import TOKEN_TASKS, Pooling, PoolingParams
from pegboard.data.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from pegboard.errors import EngineDeadError, RequestError
from pegboard.front.beam_search import beam_search_online
from pegboard.interfaces.api import Health, Prompt, RequestOptions, ServedModel
from pegboard.interfaces.io_processor import IOProcessor
from pegboard.interfaces.output_parser import ChosenParser, OutputParser, OutputParserSetup, Parsers
from pegboard.interfaces.tokenizer import Chat, Rendered, Vocabulary

if TYPE_CHECKING:
    from pegboard.data.request import LoRARequest

BOS = 256
EOS = 257
SPECIAL = {BOS: "<s>", EOS: "</s>"}


class ByteTokenizer:
    """One token per UTF-8 byte; 256 is <s>, 257 is </s>. A chat renders as `role: content` lines
    and `assistant: `."""

    def render(self, chat: Chat) -> Rendered:
        if chat.template_kwargs.get("fail"):
            raise RequestError("chat template error: asked to fail", parameter="messages")
        if chat.continue_final_message and chat.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt cannot both be true"
            raise RequestError(message, parameter="continue_final_message")
        head = f"[tools {len(chat.tools)}]" if chat.tools else ""
        lines = [f"{message['role']}: {message.get('content') or ''}" for message in chat.messages]
        end = (
            "\nassistant: "
            if chat.add_generation_prompt
            else ""
            if chat.continue_final_message
            else "\n"
        )
        text = (chat.chat_template or "") + head + "\n".join(lines) + end
        return Rendered(self.encode(text, add_special_tokens=chat.add_special_tokens), text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        stream = self.stream((), skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> "ByteStream":
        return ByteStream(skip_special_tokens)

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(
            [bytes([value]) for value in range(256)] + [b"", b""], frozenset(SPECIAL), (EOS,), BOS
        )


class ByteStream:
    """Incremental UTF-8 decoding. An unfinished character is held back."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token in token_ids:
            if token < 256:
                parts.append(self._decoder.decode(bytes([token])))
            elif not self._skip:
                parts.append(SPECIAL.get(token, ""))
        return "".join(parts)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class FakeEngineClient:
    """script: the texts of the completions: a string for all, a list indexed by completion, or a
    function of (prompt text, index).
    delay_s: pause before every token. fail_after: raise `error` after that many tokens of a request
    (0 = before the first). adapters: the LoRA adapters, which are models too.
    tool_parser, reasoning_parser: the parsers that read the answers. reads_special: the markers of
    the tool parser are special tokens. pools: it makes vectors [sum of the token ids, number of
    tokens, 0.5] and no text. labels: of a model that classifies; the value of class i is (sum of
    the token ids + i) mod 7 / 10.

    `requests` holds the requests received, `running` the ids being generated, `aborted` those whose
    stream was closed early, `controls` the control actions. `control_results` gives the answer to
    an action; the default is None.
    """

    def __init__(
        self,
        script: str | Sequence[str] | Callable[[str, int], str] | None = None,
        *,
        models: Sequence[str] = ("fake-model",),
        max_model_len: int = 4096,
        defaults: Mapping[str, Any] | None = None,
        delay_s: float = 0.0,
        fail_after: int | None = None,
        error: BaseException | None = None,
        num_cached_tokens: int = 0,
        tool_parser: Callable[[OutputParserSetup], OutputParser] | None = None,
        reasoning_parser: Callable[[OutputParserSetup], OutputParser] | None = None,
        reads_special: bool = False,
        adapters: "Sequence[LoRARequest]" = (),
        pools: bool = False,
        labels: Sequence[str] = (),
    ) -> None:
        self.script = script
        self.pools = pools
        self.labels = tuple(labels)
        self.max_model_len = max_model_len
        self.delay_s = delay_s
        self.fail_after = fail_after
        self.error = error or EngineDeadError("the fake engine was told to fail")
        self.num_cached_tokens = num_cached_tokens
        self.requests: list[tuple[Prompt, Any, RequestOptions]] = []
        self.controls: list[tuple[str, dict[str, object]]] = []
        self.control_results: dict[str, object] = {}
        self.running: set[str] = set()
        self.aborted: list[str] = []
        task: Any = "classify" if labels else "embed"
        tokens: Any = f"token_{task}"
        plan = Pooling(task=task, tasks=(tokens,), labels=self.labels)
        self._models = [
            ServedModel(
                name,
                name,
                max_model_len,
                1_700_000_000,
                pooling=plan if pools or labels else None,
            )
            for name in models
        ]
        self.adapters = {adapter.lora_name: adapter for adapter in adapters}
        self._defaults = dict(defaults or {})
        self._health = Health(True)
        self._tokenizer = ByteTokenizer()
        self.processor: IOProcessor | None = None
        self._parsers = Parsers(
            tool=ChosenParser("fake", tool_parser, reads_special=reads_special)
            if tool_parser
            else None,
            reasoning=ChosenParser("fake", reasoning_parser) if reasoning_parser else None,
        )

    def die(self, reason: str = "killed by the test") -> None:
        """Make the engine dead from now on."""
        self._health = Health(False, reason)

    def tokenizer(self) -> ByteTokenizer:
        return self._tokenizer

    def models(self) -> Sequence[ServedModel]:
        base = self._models[0]
        adapters = [
            replace(base, name=name, root=one.lora_path, parent=base.name)
            for name, one in self.adapters.items()
        ]
        return [*self._models, *adapters]

    async def adapter(self, name: str) -> "LoRARequest | None":
        return self.adapters.get(name)

    def default_params(self) -> Mapping[str, Any]:
        return self._defaults

    def health(self) -> Health:
        return self._health

    async def control(self, action: str, **arguments: object) -> object:
        self.controls.append((action, arguments))
        return self.control_results.get(action)

    def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request: RequestOptions
    ) -> AsyncIterator[RequestOutput]:
        return beam_search_online(self, prompt, params, request, (EOS,))

    def parsers(self) -> Parsers:
        return self._parsers

    def io_processor(self) -> IOProcessor:
        if self.processor is None:
            raise RequestError("the fake engine has no IO processor", parameter="data")
        return self.processor

    def transcriber(self) -> None:
        return None

    async def generate(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, request: RequestOptions
    ) -> AsyncIterator[RequestOutput]:
        self.requests.append((prompt, params, request))
        if request.request_id in self.running:
            raise RequestError(
                f"request id {request.request_id!r} is already running", parameter="request_id"
            )
        prompt_ids = self._prompt_ids(prompt, params)
        if isinstance(params, PoolingParams) != self.pools:
            raise RequestError(f"this engine {'makes vectors' if self.pools else 'generates text'}")
        makes = self._models[0].task
        if isinstance(params, PoolingParams) and params.task not in (
            None,
            makes,
            f"token_{makes}",
        ):
            raise RequestError(f"this model cannot {params.task}", parameter="task")
        if isinstance(params, PoolingParams):
            self.running.add(request.request_id)
            try:
                await asyncio.sleep(self.delay_s)
                if self.fail_after == 0:
                    raise self.error
                numbers = [sum(prompt_ids), len(prompt_ids), 0.5][: params.dimensions]
                if self.labels:
                    numbers = [
                        (sum(prompt_ids) + place) % 7 / 10 for place in range(len(self.labels))
                    ]
                array = np.array(numbers, np.float32)
                if params.task in TOKEN_TASKS:
                    array = np.tile(array, (len(prompt_ids), 1))
                yield RequestOutput(
                    request.request_id,
                    prompt.text,
                    prompt_ids,
                    [],
                    True,
                    embedding=array.tobytes(),
                    embedding_shape=array.shape,
                )
            finally:
                self.running.discard(request.request_id)
            return
        plans = [_Plan(self, prompt_ids, params, index) for index in range(params.n)]
        self.running.add(request.request_id)
        finished = False
        try:
            async for output in self._steps(plans, prompt, prompt_ids, params, request.request_id):
                finished = output.finished
                yield output
        finally:
            self.running.discard(request.request_id)
            if not finished:
                self.aborted.append(request.request_id)

    def _prompt_ids(self, prompt: Prompt, params: SamplingParams | PoolingParams) -> list[int]:
        if prompt.text is None and prompt.token_ids is None:
            raise RequestError("a prompt needs text or token ids", parameter="prompt")
        if prompt.token_ids is not None:
            ids = list(prompt.token_ids)
        else:
            if (
                params.truncate_prompt_tokens is None
                and len(prompt.text or "") > 64 * self.max_model_len
            ):
                raise RequestError(
                    "the prompt has more characters than fit into max_model_len", parameter="prompt"
                )
            ids = self._tokenizer.encode(
                prompt.text or "", add_special_tokens=prompt.add_special_tokens
            )
            if prompt.second_text is not None:
                ids += self._tokenizer.encode(prompt.second_text, add_special_tokens=False)
        if params.truncate_prompt_tokens is not None:
            limit = params.truncate_prompt_tokens
            ids = ids[-(self.max_model_len if limit == -1 else limit) :]
        if not ids or len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, expected 1 to {self.max_model_len - 1}",
                parameter="prompt",
            )
        if isinstance(params, SamplingParams):
            params.check_against_model(vocab_size=258, max_logprobs=20)
        return ids

    def text_for(self, prompt_ids: Sequence[int], index: int) -> str:
        """Return the text of a completion before max_tokens and stop are applied."""
        prompt_text = self._tokenizer.decode(prompt_ids, skip_special_tokens=True)
        if self.script is None:
            return prompt_text
        if isinstance(self.script, str):
            return self.script
        return (
            self.script(prompt_text, index)
            if callable(self.script)
            else self.script[index % len(self.script)]
        )

    async def _steps(
        self,
        plans: "list[_Plan]",
        prompt: Prompt,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
    ) -> AsyncIterator[RequestOutput]:
        def wrap(outputs: list[CompletionOutput], *, finished: bool) -> RequestOutput:
            scored = _prompt_logprobs(prompt_ids, params.prompt_logprobs)
            cached = self.num_cached_tokens
            return RequestOutput(
                request_id,
                prompt.text,
                prompt_ids,
                outputs,
                finished,
                scored,
                num_cached_tokens=cached,
            )

        kind = params.output_kind
        for step in range(max(plan.num_tokens for plan in plans)):
            await asyncio.sleep(self.delay_s)
            if self.fail_after is not None and step >= self.fail_after:
                raise self.error
            if not self._health.is_alive:
                raise EngineDeadError(f"the engine died: {self._health.reason}")
            live = [plan for plan in plans if step < plan.num_tokens]
            last = all(step + 1 >= plan.num_tokens for plan in plans)
            if kind is RequestOutputKind.DELTA:
                yield wrap([plan.output(step, step + 1) for plan in live], finished=last)
            elif kind is RequestOutputKind.CUMULATIVE:
                yield wrap([plan.output(0, step + 1) for plan in plans], finished=last)
        if kind is RequestOutputKind.FINAL_ONLY:
            yield wrap([plan.output(0, plan.num_tokens) for plan in plans], finished=True)


class _Plan:
    """One completion, decided in advance: its tokens, the text that may be shown after each, and
    its finish reason."""

    def __init__(
        self,
        client: FakeEngineClient,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        index: int,
    ) -> None:
        tokenizer = client.tokenizer()
        self.params = params
        self.index = index
        room = client.max_model_len - len(prompt_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        tokens = [
            *tokenizer.encode(client.text_for(prompt_ids, index), add_special_tokens=False),
            EOS,
        ]
        self.tokens: list[int] = []
        self.shown: list[str] = []
        self.finish_reason: str = "length"
        self.stop_reason: str | int | None = None
        stream = tokenizer.stream(prompt_ids, skip_special_tokens=params.skip_special_tokens)
        text = ""
        for token in tokens[:limit]:
            self.tokens.append(token)
            text += stream.push([token])
            if self._ends(token, text):
                break
            self.shown.append(text[: max(0, len(text) - params.text_hold_back)])
        else:
            self.shown[-1:] = [text + stream.flush()]
        self.num_tokens = len(self.tokens)

    def _ends(self, token: int, text: str) -> bool:
        hits = [(text.find(stop), stop) for stop in self.params.stop or () if stop in text]
        if hits:
            start, stop = min(hits)
            self.shown.append(text[: start + len(stop) * self.params.include_stop_str_in_output])
            self.finish_reason = "stop"
            self.stop_reason = stop
        elif token in (self.params.stop_token_ids or ()):
            self.shown.append(text)
            self.finish_reason = "stop"
            self.stop_reason = token
        elif token == EOS and not self.params.ignore_eos:
            self.shown.append(text)
            self.finish_reason = "stop"
        else:
            return False
        return True

    def output(self, start: int, end: int) -> CompletionOutput:
        """Return the output that tokens [start, end) add."""
        before = self.shown[start - 1] if start else ""
        done = end >= self.num_tokens
        asked = self.params.logprobs
        scored = (
            None
            if asked is None
            else [fake_logprobs(token, asked) for token in self.tokens[start:end]]
        )
        return CompletionOutput(
            index=self.index,
            text=self.shown[end - 1][len(before) :],
            token_ids=self.tokens[start:end],
            cumulative_logprob=-0.25 * end if asked is not None else None,
            logprobs=scored,
            finish_reason=self.finish_reason if done else None,
            stop_reason=self.stop_reason if done else None,
        )


def fake_logprobs(token: int, num_top: int) -> dict[int, Logprob]:
    """Return the chosen token with rank 2, and `num_top` others, of which the last is impossible
    (-inf)."""
    tokenizer = ByteTokenizer()

    def entry(candidate: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.decode([candidate], skip_special_tokens=False))

    entries = {token: entry(token, -0.25, 2)}
    for rank in [rank for rank in range(1, num_top + 1) if rank != 2]:
        other = (token + rank) % 256
        entries[other] = entry(other, -0.125 if rank == 1 else -float(rank), rank)
    if num_top > 2:
        entries[(token + num_top) % 256].logprob = float("-inf")
    return entries


def _prompt_logprobs(
    prompt_ids: Sequence[int], asked: int | None
) -> list[dict[int, Logprob] | None] | None:
    if asked is None:
        return None
    return [None, *(fake_logprobs(token, asked) for token in prompt_ids[1:])]
