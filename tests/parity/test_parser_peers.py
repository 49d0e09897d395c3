"""Every output parser compared with vLLM's parser of the same name, on the examples of its package.

Opt-in: PEGBOARD_PEER_VLLM names the Python of an environment that has vLLM (CPU). An example must
give the same as vLLM's whole-text or streaming result (these may disagree with each other), or say
why not (`Example.differs`). A reason without a difference is also an error, so that the lists in
the packages' READMEs stay true.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.interfaces.output_parser import OutputParser
from pegboard_chat.parsing import Message, Pipeline, fold
from pegboard_testing.contract_generic import installed_entry
from pegboard_testing.contract_output_parser import setup_for
from pegboard_testing.parser_examples import Example, load_examples, load_tokens

ROOT = Path(__file__).parents[2]
PEER = os.environ.get("PEGBOARD_PEER_VLLM")
FILES = sorted(ROOT.glob("plugins/*/*/tests/examples.py"))
NOT_THERE = {("tool_parser", "minimax")}
"""A parser of older versions."""
BEHIND = {("reasoning_parser", "openai_gptoss"): ("tool_parser", "openai")}
"""The peer's parser also reads calls, so ours is combined with the tool parser."""
PARSERS = [(file, *key) for file in FILES for key in load_examples(file) if key not in NOT_THERE]

pytestmark = pytest.mark.skipif(PEER is None, reason="PEGBOARD_PEER_VLLM names no Python with vLLM")


def ours(kind: str, name: str, example: Example) -> Message:
    parsers = [made(kind, name, example)]
    if (behind := BEHIND.get((kind, name))) is not None:
        parsers.append(made(*behind, example))
    pipeline = Pipeline(*parsers)
    return fold([*pipeline.feed(example.text, ()), *pipeline.finish()])


def made(kind: str, name: str, example: Example) -> OutputParser:
    from pegboard.plugins.importing import import_part, import_spec

    entry = installed_entry(kind, name)
    parser: OutputParser = import_part(entry, import_spec(entry).implementation, "implementation")(
        None, setup_for(example)
    )
    return parser


@pytest.fixture(scope="module")
def peer() -> Iterator[subprocess.Popen[str]]:
    assert PEER is not None
    script = Path(__file__).with_name("vllm_parsers.py")
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [PEER, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        yield process
        assert process.stdin is not None
        process.stdin.close()
        errors.seek(0)
        assert process.wait(60) == 0, errors.read()[-3000:]


def theirs(peer: subprocess.Popen[str], file: Path, kind: str, name: str) -> list[dict[str, Any]]:
    examples = [
        {
            "text": example.text,
            "tools": list(example.tools),
            "template_kwargs": dict(example.template_kwargs),
            "prompt_end": example.prompt_end,
        }
        for example in load_examples(file)[kind, name]
    ]
    job = {"kind": kind, "name": name, "tokens": list(load_tokens(file)), "examples": examples}
    assert peer.stdin is not None and peer.stdout is not None
    print(json.dumps(job), file=peer.stdin, flush=True)
    line = peer.stdout.readline()
    assert line, "the peer has stopped"
    results: list[dict[str, Any]] = json.loads(line)
    return results


def shape(content: str, reasoning: str, calls: list[tuple[str, str]]) -> tuple[Any, ...]:
    """The compared values: arguments as JSON values (as text when they are not JSON), and text
    without white space at its ends and around calls."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    words = " ".join(content.split()) if calls else content.strip()
    return words, reasoning.strip(), [(name, value(arguments)) for name, arguments in calls]


def shape_of(result: dict[str, Any]) -> tuple[Any, ...] | str:
    if "error" in result:
        return str(result["error"])
    return shape(result["content"], result["reasoning"], result["calls"])


@pytest.mark.parametrize(
    ("file", "kind", "name"), PARSERS, ids=[f"{kind}:{name}" for _, kind, name in PARSERS]
)
def test_same_as_vllm(peer: subprocess.Popen[str], file: Path, kind: str, name: str) -> None:
    examples = load_examples(file)[kind, name]
    assert len(examples) >= 60, f"{len(examples)} examples, at least 60 are wanted"
    wrong = []
    for example, result in zip(examples, theirs(peer, file, kind, name), strict=True):
        message = ours(kind, name, example)
        found = shape(
            message.content,
            message.reasoning,
            [(call.name, call.arguments) for call in message.tool_calls],
        )
        whole = shape_of(result["whole"])
        stream = shape_of(result["stream"])
        if found in (whole, stream):
            if example.differs:
                wrong.append(f"{example.name}: no difference, but one is listed: {example.differs}")
        elif not example.differs:
            wrong.append(
                f"{example.name}: {example.text!r}\n  ours   {found}\n  whole  {whole}\n  stream "
                f"{stream}"
            )
    assert not wrong, f"{len(wrong)} of {len(examples)}\n" + "\n".join(wrong)
