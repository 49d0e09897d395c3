"""One call from messages to events: render, check, generate, parse. Every API uses it to answer
chats.

request = ChatRequest(chat=Chat(messages=[{"role": "user", "content": "Hello"}]))
outputs = await Chats(client).answer(request, SamplingParams(), RequestOptions(request_id="a"))
async for output in outputs:
    print(output.events)
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

from pegboard.data.media import MediaSource, take_media
from pegboard.data.output import RequestOutput
from pegboard.data.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from pegboard.errors import MalformedRequest, RequestError, expect
from pegboard.interfaces.api import EngineClient, Prompt, RequestOptions
from pegboard.interfaces.output_parser import (
    Content,
    Event,
    OutputParser,
    OutputParserSetup,
    Reasoning,
)
from pegboard.interfaces.tokenizer import Chat, Rendered, Tokenizer
from pegboard_chat.off_loop import off_loop
from pegboard_chat.outputs import check_finished
from pegboard_chat.parsing import Pipeline
from pegboard_chat.parsing.forced_calls import (
    NamedCall,
    RequiredCalls,
    fresh_id,
    named_schema,
    required_schema,
)
from pegboard_chat.parsing.special_tokens import with_special_tokens
from pegboard_chat.parsing.structural_tag import triggers
from pegboard_chat.request_limits import PromptLimit

ToolChoice = Literal["none", "auto", "required", "named"]

RESERVED_KWARGS = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)
"""Template arguments that are refused, because they have their own field or would change what
rendering returns."""

NO_PARSER = (
    "tool_choice 'auto' is not supported: no tool parser is known for this model; name one with "
    "--tool-call-parser, leave tool_choice out to get the answer as text, or force a call"
)
CUT_FACTOR = 8
"""How many times longer than the model's limit a conversation may be that the request asks to
cut."""

NOT_AUTO = "tool_choice 'auto' is not supported: the server runs with --no-enable-auto-tool-choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation, and how its answer is parsed.

    chat: the template's input; the model sees its tools. tool_choice: "none" leaves calls as text,
    "auto" reads the model's own format, "required" and "named" force calls; None means "auto" if
    calls can be read, else "none". function: the function that "named" forces. tools: the tools
    that may be called, in OpenAI's form; None = all tools of the chat. parallel_tool_calls: False
    keeps only the first call. media_options: how images, audio and video are processed.
    """

    chat: Chat
    tool_choice: ToolChoice | None = None
    function: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    parallel_tool_calls: bool = True
    cache_salt: str | None = None
    media_options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Checked:
    """A request after all checks. chat: the template's input."""

    chat: Chat
    tools: Sequence[Mapping[str, Any]]
    tool_choice: ToolChoice
    request: ChatRequest
    media: Sequence[MediaSource] = ()


class Chats:
    """Answers conversations with the served model. settings: the server's settings, as an API
    plugin gets them."""

    def __init__(self, client: EngineClient, settings: Mapping[str, Any] | None = None) -> None:
        settings = settings or {}
        self._client = client
        self._limit = PromptLimit(client)
        self._is_auto = bool(settings.get("enable_auto_tool_choice", True))
        self._hides_tools = bool(settings.get("exclude_tools_when_tool_choice_none"))
        self._trusts_templates = bool(settings.get("trust_request_chat_template"))
        self._trusts_options = bool(settings.get("trust_request_mm_kwargs"))

    @property
    def can_read_calls(self) -> bool:
        """Whether the model has a tool parser and the server lets the model choose to call
        tools."""
        return self._is_auto and self._client.parsers().tool is not None

    def tool_choice(self, request: ChatRequest) -> ToolChoice:
        """Return the tool choice that applies. Raises MalformedRequest, which names
        `tool_choice`."""
        choice = request.tool_choice
        tools = request.chat.tools if request.tools is None else request.tools
        if choice is None:
            return "auto" if tools and self.can_read_calls else "none"
        if choice != "none" and not tools:
            raise MalformedRequest("tool_choice needs tools", parameter="tool_choice")
        if choice == "auto" and not self.can_read_calls:
            raise MalformedRequest(
                NO_PARSER if self._is_auto else NOT_AUTO, parameter="tool_choice"
            )
        return choice

    async def token_ids(self, request: ChatRequest) -> Sequence[int]:
        """Return the prompt. Raises RequestError for a mistake in the conversation."""
        return await asyncio.to_thread(self._render, self._checked(request), is_cut=False)

    async def answer(
        self,
        request: ChatRequest,
        params: SamplingParams | BeamSearchParams,
        options: RequestOptions,
    ) -> AsyncGenerator[ParsedOutput, None]:
        """Start the answer and return its outputs. Raises RequestError for a mistake in the
        conversation, the tools or the parameters.

        `params.output_kind` (DELTA or FINAL_ONLY) determines the outputs. Each has its events. A
        whole answer is a stream with one output, so both kinds give the same message. The iterator
        raises what `EngineClient.generate` raises, and PegboardError if the engine gave up a
        completion. Closing the iterator aborts the request.
        """
        if self._client.models()[0].task != "generate":
            raise RequestError(
                "this model makes vectors and does not answer chats; send the text to "
                "/v1/embeddings or /classify"
            )
        checked = self._checked(request)

        def prepare() -> tuple[Sequence[int], SamplingParams | BeamSearchParams]:
            token_ids = self._render(
                checked, is_cut=getattr(params, "truncate_prompt_tokens", None) is not None
            )
            return token_ids, params if isinstance(params, BeamSearchParams) else self._prepared(
                params, checked, token_ids
            )

        token_ids, prepared = await asyncio.to_thread(prepare)
        prompt = Prompt(
            token_ids=token_ids,
            add_special_tokens=False,
            cache_salt=request.cache_salt,
            chat=checked.chat,
            media=checked.media,
            media_options=request.media_options or {},
        )
        if isinstance(prepared, BeamSearchParams):
            outputs = self._client.beam_search(prompt, prepared, options)
        else:
            outputs = self._client.generate(prompt, prepared, options)
        hides_special = self._keeps_special(checked) and params.skip_special_tokens
        is_streamed = getattr(params, "output_kind", None) is RequestOutputKind.DELTA
        return read_outputs(
            outputs,
            partial(self._pipeline, checked, is_streamed=is_streamed),
            hidden=self._special_texts if hides_special else None,
            is_parallel=request.parallel_tool_calls,
        )

    # --- check ------------------------------------------------------------------------------------

    def _checked(self, request: ChatRequest) -> _Checked:
        chat = request.chat
        choice = self.tool_choice(request)
        if chat.chat_template is not None and not self._trusts_templates:
            raise RequestError(
                (
                    "chat_template is not accepted in requests; the server allows it with "
                    "--trust-request-chat-template"
                ),
                parameter="chat_template",
            )
        if request.media_options and not self._trusts_options:
            raise RequestError(
                "mm_processor_kwargs is not accepted in requests; the server allows it with "
                "--trust-request-mm-kwargs",
                parameter="mm_processor_kwargs",
            )
        taken = next((name for name in RESERVED_KWARGS if name in chat.template_kwargs), None)
        if taken is not None:
            raise RequestError(
                f"chat_template_kwargs must not hold {taken!r}", parameter="chat_template_kwargs"
            )
        tools = (chat.tools if request.tools is None else request.tools) or ()
        if request.tool_choice == "none" and self._hides_tools:
            chat = replace(chat, tools=None)
        model = self._client.models()[0]
        messages, media = take_media(
            chat.messages, model.placeholders, interleaves=model.interleaves
        )
        chat = replace(chat, messages=messages)
        return _Checked(chat, tools, choice, request, media)

    def _render(self, checked: _Checked, *, is_cut: bool) -> Sequence[int]:
        """Render and encode the chat. It may take long, so it is called in a thread. is_cut: the
        prompt will be cut to a length, so it may be longer than the model takes."""
        factor = CUT_FACTOR if is_cut else 1
        tokenizer = self._client.tokenizer()
        rendered = tokenizer.render(replace(checked.chat, max_chars=factor * self._limit.max_chars))
        token_ids: Sequence[int] = expect(rendered, Rendered, tokenizer, "render").token_ids
        return token_ids

    # --- generate ---------------------------------------------------------------------------------

    def _prepared(
        self, params: SamplingParams, checked: _Checked, prompt_token_ids: Sequence[int]
    ) -> SamplingParams:
        """Return `params` with what the parsers need: a schema for forced or strict calls, and
        special tokens in the text if markers are special tokens. Tools may be large, so it is
        called in a thread."""
        changes: dict[str, Any] = {}
        forced = self._forced(checked)
        if forced is not None and params.structured_outputs is not None:
            raise RequestError(
                (
                    "a tool_choice that forces a call and a structured output exclude each other: "
                    "leave one of them out"
                ),
                parameter="tool_choice",
            )
        if forced is not None:
            changes["structured_outputs"] = forced
        elif (
            params.structured_outputs is None
            and (strict := self._strict(checked, prompt_token_ids)) is not None
        ):
            changes["structured_outputs"] = strict
        if self._keeps_special(checked):
            changes["skip_special_tokens"] = False
        return params.clone(**changes) if changes else params

    def _forced(self, checked: _Checked) -> StructuredOutputsParams | None:
        """Return the schema of calls that must be made. It forbids free white space if possible,
        because a small model that may write any number of line feeds does not always stop."""
        if checked.tool_choice == "named":
            schema = named_schema(checked.tools, checked.request.function or "")
        elif checked.tool_choice == "required":
            schema = required_schema(checked.tools, is_parallel=checked.request.parallel_tool_calls)
        else:
            return None
        is_compact = self._client.parsers().can_be_compact
        return StructuredOutputsParams(
            json=json.dumps(schema), disable_any_whitespace=is_compact, parameter="tools"
        )

    def _strict(
        self, checked: _Checked, prompt_token_ids: Sequence[int]
    ) -> StructuredOutputsParams | None:
        """Return the constraint on calls that the model may make, if a tool is `strict` and the
        parser can describe its format. The constraint applies after the reasoning, unless every
        beginning of a call also ends the reasoning. In that case it applies from the first token
        on, and so also to a call that interrupts the reasoning.
        """
        parsers = self._client.parsers()
        is_strict = any(tool["function"].get("strict") for tool in checked.tools)
        if checked.tool_choice != "auto" or not is_strict or parsers.tool is None:
            return None
        setup = self._setup(checked, prompt_token_ids)
        described = parsers.tool.make(setup).constraint(checked.tools, "auto")
        if described is None:
            return None
        constraint = with_special_tokens(described, self._special_tokens)
        wanted: dict[str, Any] = {
            constraint.kind: True if constraint.kind == "json_object" else constraint.text
        }
        ends = (
            parsers.reasoning.make(setup).reasoning_end() if parsers.reasoning is not None else ()
        )
        # to write the ends of reasoning
        is_free = constraint is not described or not set(ends) & set(self._special_tokens)
        if is_free and (begins := triggers(described)) and set(begins) <= set(ends):
            wanted["reasoning_end_token_ids"] = []
        return StructuredOutputsParams(**wanted, parameter="tools")

    def _keeps_special(self, checked: _Checked) -> bool:
        """Return whether a parser of this request reads special tokens."""
        parsers = self._client.parsers()
        used = (parsers.reasoning, parsers.tool if checked.tool_choice == "auto" else None)
        return any(parser is not None and parser.reads_special for parser in used)

    # --- parse ------------------------------------------------------------------------------------

    def _pipeline(
        self, checked: _Checked, prompt_token_ids: Sequence[int], *, is_streamed: bool
    ) -> Pipeline:
        """Return the parsers of one completion."""
        parsers = self._client.parsers()
        is_forced = checked.tool_choice in ("required", "named")
        reads_calls = (
            checked.tool_choice == "auto" and bool(checked.tools) and parsers.tool is not None
        )
        if not (parsers.reasoning or reads_calls or is_forced):
            return Pipeline()
        setup = replace(self._setup(checked, prompt_token_ids), is_streamed=is_streamed)
        reasoning = parsers.reasoning.make(setup) if parsers.reasoning else None
        # the tool parser begins after the reasoning that the prompt may have opened
        if reasoning is not None:
            setup = replace(setup, prompt_end="")
        tools: OutputParser | None = (
            parsers.tool.make(setup) if parsers.tool and (reads_calls or is_forced) else None
        )
        if is_forced:
            make_id = tools.call_id if tools else fresh_id
            is_named = checked.tool_choice == "named"
            tools = (
                NamedCall(checked.request.function or "", make_id)
                if is_named
                else RequiredCalls(make_id)
            )
        names = [
            parser.plugin if parser is not None else ""
            for parser in (parsers.reasoning, parsers.tool)
        ]
        return Pipeline(reasoning, tools, names if not is_forced else [names[0], ""])

    def _setup(self, checked: _Checked, prompt_token_ids: Sequence[int]) -> OutputParserSetup:
        tokenizer = self._client.tokenizer()
        return OutputParserSetup.after_prompt(
            tokenizer, prompt_token_ids, checked.tools, checked.chat.template_kwargs
        )

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Text → id of the special tokens, without those that end an output."""
        tokenizer = self._client.tokenizer()
        vocabulary = tokenizer.vocabulary()
        ids = sorted(vocabulary.special_token_ids - set(vocabulary.eos_token_ids))
        return {
            text: token
            for token in ids
            if (text := tokenizer.decode([token], skip_special_tokens=False))
        }

    @cached_property
    def _special_texts(self) -> "re.Pattern[str] | None":
        return special_texts(self._client.tokenizer())


@dataclass(slots=True)
class ParsedOutput(RequestOutput):
    """An output, and the events in its texts by the index of the completion."""

    events: dict[int, list[Event]] = field(default_factory=dict)


_FIELDS = tuple(item.name for item in fields(RequestOutput))


def special_texts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that matches the texts of the special tokens. None: the vocabulary has no
    special tokens."""
    ids = sorted(tokenizer.vocabulary().special_token_ids)
    texts = {tokenizer.decode([token], skip_special_tokens=False) for token in ids} - {""}
    return (
        re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        if texts
        else None
    )


async def read_outputs(
    outputs: AsyncIterator[RequestOutput],
    make_pipeline: Callable[[Sequence[int]], Pipeline],
    *,
    hidden: re.Pattern[str] | None = None,
    is_parallel: bool = True,
) -> AsyncGenerator[ParsedOutput, None]:
    """Yield each output with its events. Closing the result closes `outputs`.

    outputs: one for each new text (DELTA), or only one (FINAL_ONLY). make_pipeline: makes the
    parsers of a completion from the prompt's token ids. hidden: special tokens to remove from the
    text. is_parallel: False drops all calls except the first. Raises PegboardError if the engine
    gave up a completion.
    """
    readers: dict[int, _Completion] = {}

    def read(output: RequestOutput) -> dict[int, list[Event]]:
        events: dict[int, list[Event]] = {}
        check_finished(output)
        for completion in output.outputs:
            reader = readers.get(completion.index)
            if reader is None:
                pipeline = make_pipeline(output.prompt_token_ids or ())
                reader = readers[completion.index] = _Completion(
                    pipeline, hidden, is_parallel=is_parallel
                )
            is_last = completion.finish_reason is not None
            events[completion.index] = reader.read(
                completion.text, completion.token_ids, is_last=is_last
            )
        return events

    async with aclosing(outputs):  # type: ignore[type-var]
        async for output in outputs:
            num_chars = sum(len(completion.text) for completion in output.outputs)
            events = await off_loop(num_chars, partial(read, output))
            yield ParsedOutput(**{name: getattr(output, name) for name in _FIELDS}, events=events)


class _Completion:
    """Reads one completion."""

    def __init__(
        self, pipeline: Pipeline, hidden: re.Pattern[str] | None, *, is_parallel: bool
    ) -> None:
        self._pipeline = pipeline
        self._hidden = hidden
        self._is_parallel = is_parallel

    def read(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> list[Event]:
        events = self._pipeline.feed(text, token_ids)
        if is_last:
            events = [*events, *self._pipeline.finish()]
        return [kept for event in events if (kept := self._kept(event)) is not None]

    def _kept(self, event: Event) -> Event | None:
        if isinstance(event, Content | Reasoning):
            text = self._hidden.sub("", event.text) if self._hidden else event.text
            return type(event)(text) if text else None
        return event if self._is_parallel or event.index == 0 else None
