"""`pegboard plugins record` and `replay`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pegboard.cli.main import command_setup, main
from pegboard.errors import UsageError
from pegboard.interfaces.command import Command, CommandSetup
from pegboard.interfaces.output_parser import Content, Event
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard_testing.authoring.streams import Record, Recording, Replay, recorded, unstable
from pegboard_testing.contract_command import CommandContract
from pegboard_testing.contract_generic import check_entry, installed_entry

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Letters:
    """A tokenizer whose tokens are letters. Token 0 is special."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        texts = [chr(token) if token else "<s>" for token in ids]
        return "".join(text for text in texts if not (skip_special_tokens and text == "<s>"))

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> Any:
        tokenizer = self

        class Stream:
            def push(self, ids: Sequence[int]) -> str:
                return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

            def flush(self) -> str:
                return ""

        return Stream()

    def vocabulary(self) -> Vocabulary:
        return Vocabulary((b"",), frozenset({0}), ())


def recording(text: str) -> Recording:
    tokenizer: Any = Letters()
    return recorded(tokenizer, "letters", [1, 2], [0, *map(ord, text)], tools=TOOLS)


def replay(path: Path, *words: str) -> int:
    setup = replace(command_setup("plugins-replay"), tokenizer=lambda reference: Letters())
    return Replay(None, setup).run([str(path), *words])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stream.json"
    path.write_text(json.dumps(asdict(recording(f"Well. {CALL}"))))
    return path


@pytest.mark.parametrize("word", ["plugins-record", "plugins-replay"])
def test_contract(word: str) -> None:
    check_entry(installed_entry("command", word))


class TestRecord(CommandContract):
    word = "plugins record"

    def command(self, setup: CommandSetup) -> Command:
        return Record(None, setup)


class TestReplay(CommandContract):
    word = "plugins replay"

    def command(self, setup: CommandSetup) -> Command:
        return Replay(None, setup)


def test_a_recording_keeps_both_texts(file: Path) -> None:
    again = Recording.read(file)
    assert [token.plain for token in again.tokens[:2]] == ["", "W"]
    assert again.tokens[0].special == "<s>"
    assert again == replace(recording(f"Well. {CALL}"), tokens=list(again.tokens))


def test_events_are_shown_with_their_tokens(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(file, "--tool-call-parser", "hermes", "--json") == 0
    events = json.loads(capsys.readouterr().out)
    first = {"token": 0, "event": "Content", "text": "<s>"}
    assert events[0] == first, "the markers of this format are special tokens, so it reads them"
    start = next(event for event in events if event["event"] == "ToolCallStart")
    assert start["name"] == "add"
    arguments = [event for event in events if event["event"] == "ToolCallArguments"]
    assert "".join(event["text"] for event in arguments) == '{"a": 1}'
    assert replay(file, "--tool-call-parser", "hermes") == 0
    assert "ToolCallStart(index=0" in capsys.readouterr().out


class Impatient:
    """A parser whose message depends on the chunks: it drops those of one letter."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        return [Content(text)] if len(text) > 1 else []

    def finish(self) -> list[Event]:
        return []


def test_a_parser_that_depends_on_chunks_is_found() -> None:
    pieces = list("some text")
    parser = Impatient()
    events = [event for piece in pieces for event in parser.feed(piece, ())]
    assert "in the chunks" in unstable(Impatient, events, pieces)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name one parser"),
        (["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"], "name one parser"),
    ],
)
def test_wrong_words(file: Path, words: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        replay(file, *words)
    file.write_text('{"tokens": 1}')
    with pytest.raises(UsageError, match="is not a recording of `pegboard plugins record`"):
        replay(file, "--tool-call-parser", "hermes")


@pytest.mark.real_model
def test_a_model_is_recorded(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stream.json"
    words = ["--messages", "Count to three.", "--max-tokens", "8", "-o", str(path)]
    small = ["--max-model-len", "256", "--kv-cache-memory-bytes", "16777216"]
    assert main(["plugins", "record", str(smollm2_gguf), *words, *small]) == 0
    assert "8 tokens" in capsys.readouterr().out
    assert main(["plugins", "replay", str(path), "--reasoning-parser", "qwen3"]) == 0
    assert Recording.read(path).model == str(smollm2_gguf)
