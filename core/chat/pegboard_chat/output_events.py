"""From outputs to events: what an answer's text says, read by the model's parsers, for every front alike.

The whole answer and the stream go through the same code: a whole answer is a stream of one output.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.config.schema import structured_outputs_config
from pegboard.data.output import RequestOutput
from pegboard.data.sampling_params import SamplingParams, StructuredOutputsParams
from pegboard.errors import RequestError
from pegboard.front.parser_maker import ParserMaker, parser_setup
from pegboard.interfaces.api import ParsedOutput, Parsing
from pegboard.interfaces.output_parser import (
    Content,
    Event,
    OutputParser,
    OutputParserSetup,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from pegboard_chat.parsing import Pipeline
from pegboard_chat.parsing.forced_calls import NamedCall, RequiredCalls, fresh_id, named_schema, required_schema
from pegboard_chat.parsing.special_tokens import with_special_tokens
from pegboard_chat.parsing.structural_tag import triggers

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry


def has_compact_output(registry: "Registry", names: Sequence[str]) -> bool:
    """Some structured output plugin, of those in `names` if there are any, can forbid free white space."""
    entries = [entry for entry in registry.entries("structured_output") if not names or entry.name in names]
    return any(registry.spec(entry).supports.get("compact") is True for entry in entries)


class OutputReader:
    """Reads the answers of one model. tokenizer: of that model. Each parser may be None: its part stays content.

    can_be_compact: structured output can forbid free white space. Forced calls then do: a small model that may write any number
    of line feeds does not always come to an end.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        tool_parser: ParserMaker | None = None,
        reasoning_parser: ParserMaker | None = None,
        *,
        can_be_compact: bool = False,
    ) -> None:
        self._can_be_compact = can_be_compact
        self._tokenizer = tokenizer
        self._tools = tool_parser
        self._reasoning = reasoning_parser

    @classmethod
    def of_plan(cls, plan: "EnginePlan", registry: "Registry | None", tokenizer: "Tokenizer") -> "OutputReader":
        """With the parsers the plan has chosen. Raises PluginBroken for one that does not import. registry: None = no parsers."""
        if registry is None:
            return cls(tokenizer)
        tools = ParserMaker.chosen(registry, "tool_parser", plan.tool_parser)
        reasoning = ParserMaker.chosen(registry, "reasoning_parser", plan.reasoning_parser)
        backends = structured_outputs_config(plan.settings.engine).names
        return cls(tokenizer, tools, reasoning, can_be_compact=has_compact_output(registry, backends))

    def parsers(self) -> dict[str, str | None]:
        """Name of the parser by kind."""
        tools, reasoning = self._tools, self._reasoning
        return {"tool_parser": tools.name if tools else None, "reasoning_parser": reasoning.name if reasoning else None}

    def prepare(self, params: SamplingParams, parsing: Parsing, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """`params` as the parsers need them: a schema for calls that are forced, special tokens for markers that are some, and
        for structured output what ends the reasoning. Raises RequestError naming `tool_choice` or `tools`."""
        changes: dict[str, Any] = {}
        structure = params.structured_outputs
        forced = self._forced(parsing)
        if forced is not None:
            if structure is not None:
                raise RequestError(
                    "a tool_choice that forces a call and a structured output exclude each other: leave one of them out",
                    parameter="tool_choice",
                )
            structure = forced
        elif structure is None and (strict := self._strict(parsing, prompt_token_ids)) is not None:
            changes["structured_outputs"] = strict
        if structure is not None:
            ids = self._reasoning_end_ids(parsing, prompt_token_ids)
            changes["structured_outputs"] = msgspec.structs.replace(structure, reasoning_end_token_ids=ids)
        if self._keeps_special(parsing):
            changes["skip_special_tokens"] = False
        return params.clone(**changes) if changes else params

    def _forced(self, parsing: Parsing) -> StructuredOutputsParams | None:
        """The schema of calls that must be made."""
        if parsing.tool_choice in ("required", "named") and not parsing.tools:
            raise RequestError("tool_choice needs tools", parameter="tool_choice")
        if parsing.tool_choice == "named":
            schema = named_schema(parsing.tools, parsing.function or "")
        elif parsing.tool_choice == "required":
            schema = required_schema(parsing.tools, is_parallel=parsing.parallel_tool_calls)
        else:
            return None
        return StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=self._can_be_compact, parameter="tools")

    def _strict(self, parsing: Parsing, prompt_token_ids: Sequence[int]) -> StructuredOutputsParams | None:
        """Of calls that the model may make, where a tool is `strict` and the parser can describe its format.

        It waits for the end of the reasoning, unless all that begins a call also ends the reasoning: then it can hold from the
        first token on, and holds a call that the model makes out of its reasoning, too.
        """
        is_strict = any(tool["function"].get("strict") for tool in parsing.tools)
        if parsing.tool_choice != "auto" or not is_strict or self._tools is None:
            return None
        described = self._tools.make(self._setup(parsing, prompt_token_ids)).constraint(parsing.tools, "auto")
        if described is None:
            return None
        constraint = with_special_tokens(described, self._special_tokens)
        ends = self._reasoning_ends(parsing, prompt_token_ids) or ()
        is_free = constraint is not described or not set(ends) & set(self._special_tokens)  # to write the ends of reasoning
        holds_at_once = is_free and (begins := triggers(described)) and set(begins) <= set(ends)
        is_flag = constraint.kind == "json_object"
        value = True if is_flag else constraint.text
        ids = [] if holds_at_once else self._reasoning_end_ids(parsing, prompt_token_ids)
        wanted: dict[str, Any] = {constraint.kind: value, "reasoning_end_token_ids": ids}
        return StructuredOutputsParams(**wanted, parameter="tools")

    def _keeps_special(self, parsing: Parsing) -> bool:
        """Some parser of this request reads special tokens."""
        tools = self._tools if parsing.tool_choice == "auto" else None
        return any(parser is not None and parser.reads_special for parser in (self._reasoning, tools))

    def pipeline(self, parsing: Parsing, prompt_token_ids: Sequence[int]) -> Pipeline:
        """The parsers of one completion."""
        reads_calls = parsing.tool_choice == "auto" and parsing.tools and self._tools
        if not (self._reasoning or reads_calls or parsing.tool_choice in ("required", "named")):
            return Pipeline()
        setup = self._setup(parsing, prompt_token_ids)
        reasoning = self._reasoning.make(setup) if self._reasoning else None
        tools: OutputParser | None = self._tools.make(setup) if self._tools and parsing.tools else None
        if parsing.tool_choice in ("required", "named"):
            make_id = tools.call_id if tools else fresh_id
            is_named = parsing.tool_choice == "named"
            tools = NamedCall(parsing.function or "", make_id) if is_named else RequiredCalls(make_id)
        elif not reads_calls:
            tools = None
        return Pipeline(reasoning, tools)

    def _reasoning_end_ids(self, parsing: Parsing, prompt_token_ids: Sequence[int]) -> list[list[int]] | None:
        """Token ids of the texts, any of which ends the reasoning of an answer to this prompt; None without a parser."""
        ends = self._reasoning_ends(parsing, prompt_token_ids)
        return None if ends is None else [self._tokenizer.encode(end, add_special_tokens=False) for end in ends]

    def _reasoning_ends(self, parsing: Parsing, prompt_token_ids: Sequence[int]) -> tuple[str, ...] | None:
        if self._reasoning is None:
            return None
        return self._reasoning.make(self._setup(parsing, prompt_token_ids)).reasoning_end()

    def _setup(self, parsing: Parsing, prompt_token_ids: Sequence[int]) -> OutputParserSetup:
        return parser_setup(self._tokenizer, prompt_token_ids, parsing.tools, parsing.template_kwargs)

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Special tokens by their texts, without those that end an output."""
        vocabulary = self._tokenizer.vocabulary()
        ids = sorted(vocabulary.special_token_ids - set(vocabulary.eos_token_ids))
        return {text: token for token in ids if (text := self._tokenizer.decode([token], skip_special_tokens=False))}

    @cached_property
    def _special_texts(self) -> re.Pattern[str] | None:
        ids = sorted(self._tokenizer.vocabulary().special_token_ids)
        texts = {self._tokenizer.decode([token], skip_special_tokens=False) for token in ids} - {""}
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None

    async def events(self, outputs: AsyncIterator[RequestOutput], parsing: Parsing) -> AsyncGenerator[ParsedOutput, None]:
        """Each output with what it says; closing the result closes `outputs`. The outputs must be new text each (DELTA), or be
        one (FINAL_ONLY)."""
        hides_special = self._keeps_special(parsing) and parsing.skip_special_tokens
        readers: dict[int, _Completion] = {}
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                events: dict[int, list[Event]] = {}
                for completion in output.outputs:
                    reader = readers.get(completion.index)
                    if reader is None:
                        pipeline = self.pipeline(parsing, output.prompt_token_ids or ())
                        hidden = self._special_texts if hides_special else None
                        reader = _Completion(pipeline, hidden, is_parallel=parsing.parallel_tool_calls)
                        readers[completion.index] = reader
                    is_last = completion.finish_reason is not None
                    events[completion.index] = reader.read(completion.text, completion.token_ids, is_last=is_last)
                yield ParsedOutput(**{item.name: getattr(output, item.name) for item in fields(output)}, events=events)


class _Completion:
    """The reading of one completion. hidden: special tokens that are taken out of what is left. is_parallel: False drops all
    calls but the first."""

    def __init__(self, pipeline: Pipeline, hidden: re.Pattern[str] | None, *, is_parallel: bool) -> None:
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
        assert isinstance(event, ToolCallStart | ToolCallArguments | ToolCallEnd)
        return event if self._is_parallel or event.index == 0 else None
