"""Calls that the model chooses to make must follow their tools' schemas. Each parser's constraint
is tested on the backends that accept it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard.interfaces.structured_output import (
    Constraint,
    Grammar,
    StructuredOutput,
    StructuredOutputSetup,
)
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard.plugins.registry import Registry
from pegboard_chat.parsing import fold

END_TOKEN = 256
BACKENDS = ("xgrammar", "guidance")
NO_CONSTRAINT = {"openai"}
"""The parser uses the model's own library."""
PARSERS = sorted({point.name for point in entry_points(group="pegboard.tool_parser.v1")})

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": CITY}},
    {"type": "function", "function": {"name": "free", "parameters": CITY}},
]


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, registry: Registry) -> StructuredOutput:
    tokens = [bytes([value]) for value in range(256)] + [b""]
    vocabulary = Vocabulary(tokens, frozenset({END_TOKEN}), (END_TOKEN,))
    setup = StructuredOutputSetup(len(tokens), lambda: vocabulary, (END_TOKEN,))
    made: StructuredOutput = registry.build(
        registry.find("structured_output", request.param), setup
    )
    return made


def made_parser(registry: Registry, name: str) -> Any:
    vocabulary = Vocabulary([bytes([value]) for value in range(256)], frozenset(), ())
    return registry.build(
        registry.find("tool_parser", name), OutputParserSetup(vocabulary, tuple(TOOLS))
    )


def taken(backend: StructuredOutput, grammar: Grammar, text: str) -> int:
    """Returns the number of bytes of `text` that the grammar accepts, plus one when the text may
    end there."""
    data = text.encode()
    accepted = grammar.accept(list(data))
    if accepted < len(data):
        return accepted
    bits = np.zeros((1, -(-257 // 32)), np.uint32)
    backend.fill([grammar], bits)
    return accepted + int(np.unpackbits(bits.view(np.uint8), bitorder="little")[END_TOKEN])


def written(constraint: Constraint, index: int, arguments: dict[str, Any]) -> Iterator[str]:
    structure = json.loads(constraint.text)["structures"][index]
    yield structure["begin"] + json.dumps(arguments) + structure["end"]


@pytest.mark.parametrize("name", PARSERS)
def test_calls_keep_to_the_schema_and_text_is_free(
    registry: Registry, backend: StructuredOutput, name: str
) -> None:
    constraint = made_parser(registry, name).constraint(TOOLS, "auto")
    assert (constraint is None) == (name in NO_CONSTRAINT)
    if constraint is None:
        return
    assert constraint.kind == "structural_tag" and backend.reject(constraint) is None
    if "structures" not in json.loads(constraint.text):
        return  # calls that are not JSON: see test_strict_samples.py
    compiled = backend.compile(constraint)
    for index, arguments, is_valid in (
        (0, {"city": "Paris"}, True),
        (0, {"city": "Berlin"}, False),
        (0, {"town": "Paris"}, False),
        (1, {"anything": [1, {"x": None}]}, True),  # not strict
        (1, {}, True),
    ):
        for text in written(constraint, index, arguments):
            for around in ("", "Ünïcode { [text. "):
                whole = around + text
                num_bytes = len(whole.encode())
                assert (taken(backend, compiled.fork(), whole) == num_bytes + 1) == is_valid, whole
            if is_valid:
                parser = made_parser(registry, name)
                message = fold([*parser.feed(text, ()), *parser.finish()])
                assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
                    (TOOLS[index]["function"]["name"], arguments)
                ]
    free = 'No call: {"a": [1, 2]} <b>x</b>'
    assert taken(backend, compiled.fork(), free) == len(free) + 1
