"""`pegboard plugins record` and `replay`: what a model has written, token by token, in a file; and
what a parser makes of it, without the model.

A recording is JSON: the model's reference, the tools, the switches of the chat template, the ids at
the end of the prompt, and each token of the answer with its text, once with special tokens and once
without.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pegboard.errors import PegboardError, UsageError
from pegboard.interfaces.command import CommandSetup, FlagParser
from pegboard.interfaces.output_parser import (
    PROMPT_END_TOKENS,
    Event,
    OutputParser,
    OutputParserSetup,
    OutputParserSpec,
)
from pegboard.interfaces.tokenizer import Tokenizer
from pegboard.plugins.defaults import default_model

NUM_CUTS = 50
"""How many ways of cutting the text into chunks are tried."""


@dataclass(frozen=True, slots=True)
class Token:
    """special: the text with special tokens. plain: without."""

    id: int
    special: str
    plain: str


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer of a model."""

    model: str
    prompt_end: Sequence[int]
    tokens: Sequence[Token]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """Read a file of `plugins record`. Raises UsageError."""
        try:
            content = json.loads(path.read_text("utf-8"))
            tokens = [Token(**token) for token in content.pop("tokens")]
            return cls(tokens=tokens, **content)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"{path} is not a recording of `pegboard plugins record`: {error}"
            ) from error


def recorded(
    tokenizer: Tokenizer, model: str, prompt: Sequence[int], ids: Sequence[int], **more: Any
) -> Recording:
    """Return the recording of an answer. ids: of the answer. more: fields of Recording."""
    streams = [tokenizer.stream(prompt, skip_special_tokens=skips) for skips in (False, True)]
    texts = [[stream.push([token]) for token in ids] for stream in streams]
    for stream, text in zip(streams, texts, strict=True):
        if text:
            text[-1] += stream.flush()
    tokens = [Token(*token) for token in zip(ids, *texts, strict=True)]
    return Recording(model, list(prompt[-PROMPT_END_TOKENS:]), tokens, **more)


class Record:
    """The command `plugins record`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._setup = setup
        self._parser = setup.parser(
            prog="pegboard plugins record",
            description="Let a model answer, and write each token to a file, for `plugins replay`.",
        )
        self._parser.add_argument(
            "--messages", required=True, metavar="FILE|TEXT", help="JSON, or one user message"
        )
        self._parser.add_argument("--tools", metavar="FILE", help="JSON: tools as in OpenAI's API")
        self._parser.add_argument("--template-kwargs", type=json.loads, default={}, metavar="JSON")
        self._parser.add_argument("--max-tokens", type="number", default=512)
        self._parser.add_argument("--temperature", type=float, default=0.0)
        self._parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
        self._parser.add_settings("engine", "plugins")

    def run(self, words: Sequence[str]) -> int:
        from pegboard import LLM, SamplingParams

        settings, arguments = self._parser.parse_settings(words)
        tools = _json(arguments.tools) if arguments.tools else []
        params = SamplingParams(
            temperature=arguments.temperature, max_tokens=arguments.max_tokens, detokenize=False
        )
        with LLM.from_settings(settings) as llm:
            (answer,) = llm.chat(
                [_messages(arguments.messages)],
                params,
                tools=tools or None,
                chat_template_kwargs=arguments.template_kwargs,
                use_tqdm=False,
            )
        model = settings.engine.model or default_model()
        recording = recorded(
            self._setup.tokenizer(model),
            model,
            answer.prompt_token_ids or (),
            answer.outputs[0].token_ids,
            tools=tools,
            template_kwargs=arguments.template_kwargs,
        )
        try:
            text = json.dumps(asdict(recording), indent=1, ensure_ascii=False)
            arguments.output.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise PegboardError(f"{arguments.output}: {error.strerror}") from error
        print(f"{len(recording.tokens)} tokens: {arguments.output}")
        return 0


def _messages(text: str) -> list[dict[str, Any]]:
    if Path(text).is_file():
        messages: list[dict[str, Any]] = _json(text)
        return messages
    return [{"role": "user", "content": text}]


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


class Replay:
    """The command `plugins replay`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._setup = setup
        self._parser: FlagParser = setup.parser(
            prog="pegboard plugins replay",
            description="Feed a recording to a parser, and print the events with the token at "
            "which each came. The exit status is 1 if other chunks of the same text give others.",
        )
        self._parser.add_argument("file", type=Path, metavar="FILE", help="of `plugins record`")
        self._parser.add_argument("--tool-call-parser", metavar="NAME")
        self._parser.add_argument("--reasoning-parser", metavar="NAME")
        self._parser.add_argument(
            "--json", action="store_true", dest="as_json", help="machine-readable output"
        )
        self._parser.add_settings("plugins")

    def run(self, words: Sequence[str]) -> int:
        settings, arguments = self._parser.parse_settings(words)
        recording = Recording.read(arguments.file)
        spec, make = _parser_of(settings, arguments)
        tokenizer = self._setup.tokenizer(recording.model)
        end = tokenizer.decode(recording.prompt_end, skip_special_tokens=False)
        parser_setup = OutputParserSetup(
            tokenizer.vocabulary(), tuple(recording.tools), recording.template_kwargs, end
        )
        keeps = "special_tokens" in spec.flags
        pieces = [token.special if keeps else token.plain for token in recording.tokens]
        events = replayed(make(parser_setup), recording, pieces)
        if arguments.as_json:
            lines = [{"token": at, "event": type(e).__name__, **asdict(e)} for at, e in events]
            print(json.dumps(lines, indent=1, ensure_ascii=False))
        else:
            for at, event in events:
                place = "end" if at is None else at
                print(f"{place:>5}  {event}")
        if wrong := unstable(lambda: make(parser_setup), [event for _, event in events], pieces):
            print(wrong)
            return 1
        return 0


def _parser_of(settings: Any, arguments: Namespace) -> tuple[OutputParserSpec, Any]:
    """Return the spec of the parser that is named, and what builds it from a setup."""
    from pegboard.plugins.registry import Registry

    names = {
        "tool_parser": arguments.tool_call_parser,
        "reasoning_parser": arguments.reasoning_parser,
    }
    wanted = [(kind, name) for kind, name in names.items() if name]
    if len(wanted) != 1:
        raise UsageError("name one parser: --tool-call-parser NAME or --reasoning-parser NAME")
    registry = Registry.discover(settings.plugins)
    entry = registry.find(*wanted[0])
    spec = registry.spec(entry)
    assert isinstance(spec, OutputParserSpec)
    return spec, lambda parser_setup: registry.build(entry, parser_setup)


def replayed(
    parser: OutputParser, recording: Recording, pieces: Sequence[str]
) -> list[tuple[int | None, Event]]:
    """Return each event with the index of its token. None = it came at the end."""
    events: list[tuple[int | None, Event]] = []
    for at, (token, text) in enumerate(zip(recording.tokens, pieces, strict=True)):
        events += [(at, event) for event in parser.feed(text, [token.id])]
    return [*events, *((None, event) for event in parser.finish())]


def unstable(make: Any, events: Sequence[Event], pieces: Sequence[str]) -> str:
    """Feed the whole text in other chunks. Return what differs, or ""."""
    from pegboard_chat.parsing import fold

    text = "".join(pieces)
    expected = fold(events)
    draw = random.Random(0)
    for _ in range(NUM_CUTS):
        marks = sorted({0, len(text), *(draw.randrange(len(text) + 1) for _ in range(8))})
        chunks = [text[start:stop] for start, stop in zip(marks, marks[1:], strict=False)]
        parser = make()
        message = fold([*(e for chunk in chunks for e in parser.feed(chunk, ())), *parser.finish()])
        if (message.content, message.reasoning) != (expected.content, expected.reasoning) or [
            (call.name, call.arguments) for call in message.tool_calls
        ] != [(call.name, call.arguments) for call in expected.tool_calls]:
            return f"in the chunks {chunks}\nthe message is {message}\nand not {expected}"
    return ""
