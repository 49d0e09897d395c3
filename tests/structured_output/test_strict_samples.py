"""Strict calls are drawn at random from each parser's grammar and read by the parser. The arguments
always fit the tool's schema."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.grammar.request_grammar import ReasoningEnd, RequestGrammar
from pegboard.errors import RequestError
from pegboard.interfaces.api import RequestOptions
from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard.interfaces.structured_output import (
    Constraint,
    Grammar,
    StructuredOutput,
    StructuredOutputSetup,
)
from pegboard.interfaces.tokenizer import Chat, Vocabulary
from pegboard.plugins.registry import Registry
from pegboard_chat.chats import ChatRequest, Chats
from pegboard_chat.parsing import Message, fold
from pegboard_chat.parsing.special_tokens import with_special_tokens
from pegboard_testing.contract_structured_output import json_judge, mask_of
from pegboard_testing.fake_client import FakeEngineClient
from pegboard_testing.parser_examples import CASES, TOOLS, Example, load_examples, load_tokens

ROOT = Path(__file__).parents[2]
END = 256
WORDS = (
    b"</",
    b"<",
    b">",
    b"</parameter>",
    b"</parameter>\n</function>",
    b"</arg",
    b"_value>",
    b"\n</",
    b'">',
    b'"}',
    b'"}]',
    b'", "',
    b'": ',
    b", ",
    b"(",
    b"='",
    b'="',
    b"')",
    b"<escape>",
    b"<escape>,",
    b"{}",
    b"null",
    b"True",
    b"true\n",
    b"12",
    b"-1",
    b" a",
    b"city",
    b"\n\n",
    "é".encode(),
    b"\xf0\x9f",
    b"<b>",
)
SIZE = 257 + len(WORDS)
"""A vocabulary of every byte, the end of an output, and some longer tokens."""
BACKENDS = ("xgrammar", "guidance")
PARSERS = sorted({point.name for point in entry_points(group="pegboard.tool_parser.v1")})
PATIENCE = 60
"""After this number of tokens, a text ends at the first place where it may."""

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "kinds": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": "number"},
            "is_metric": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "level": {"type": ["integer", "null"]},
        },
        "required": ["city", "share"],
    },
    "constants": {
        "properties": {
            "unit": {"enum": ["celsius", "fahrenheit", "<b>"]},
            "mode": {"const": "a b"},
            "size": {"enum": [1, 2.5, "many", None, True]},
            "either": {"anyOf": [{"type": "integer"}, {"enum": ["auto", "12", "none"]}]},
        },
        "required": ["unit"],
    },
    "nested": {
        "properties": {
            "where": {
                "type": "object",
                "properties": {
                    "street": {"type": "string"},
                    "number": {"type": "integer"},
                    "is_home": {"type": "boolean"},
                },
                "required": ["street"],
                "additionalProperties": False,
            },
            "tags": {
                "type": "array",
                "items": {"enum": ["x", "</y>"]},
                "minItems": 1,
                "maxItems": 3,
            },
            "words": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "points": {"type": "array", "items": {"$ref": "#/$defs/Point"}},
        },
        "required": ["where", "points"],
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {
                    "x": {"type": "number"},
                    "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["x", "label"],
                "additionalProperties": False,
            }
        },
    },
    "all optional": {
        "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}, "c": {"type": "integer"}}
    },
    "numbers with limits": {
        "properties": {
            "hour": {"type": "integer", "minimum": 0, "maximum": 23},
            "share": {"type": "number", "minimum": 0, "maximum": 1},
        },
        "required": ["hour"],
    },
    "strings with limits": {
        "properties": {
            "code": {"type": "string", "minLength": 2, "maxLength": 5},
            "plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
            "word": {"type": "string", "pattern": "ab"},
            "day": {"type": "string", "format": "date"},
            "at": {"type": "string", "format": "date-time"},
        },
        "required": ["code", "plate", "word", "day"],
    },
    "nothing": {"properties": {}},
}
for each in SCHEMAS.values():
    each |= {"type": "object", "additionalProperties": False}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, registry: Registry) -> StructuredOutput:
    vocabulary = Vocabulary(
        [bytes([value]) for value in range(256)] + [b"", *WORDS], frozenset({END}), (END,)
    )
    setup = StructuredOutputSetup(SIZE, lambda: vocabulary, (END,))
    made: StructuredOutput = registry.build(
        registry.find("structured_output", request.param), setup
    )
    return made


def parser_of(registry: Registry, name: str, tools: list[dict[str, Any]]) -> Any:
    vocabulary = Vocabulary([bytes([value]) for value in range(256)], frozenset(), ())
    return registry.build(
        registry.find("tool_parser", name), OutputParserSetup(vocabulary, tuple(tools))
    )


def read(parser: Any, text: str) -> Message:
    return fold([*parser.feed(text, ()), *parser.finish()])


def strict(name: str, schema: dict[str, Any], is_strict: bool = True) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "strict": is_strict, "parameters": schema},
    }


def ways_out(form: Any) -> Iterator[bytes]:
    """The texts that end a value: words that it must not contain, with the newline that may belong
    to them, and the texts that end JSON values. "ab" matches the pattern in the schemas."""
    yield from (b'"', b"'", b"}", b"]", b")", b"ab")
    for inner in (
        form.values() if isinstance(form, dict) else form if isinstance(form, list) else ()
    ):
        yield from ways_out(inner)
    if isinstance(form, dict):
        for word in form.get("excludes", ()):
            yield from (f"\n{word}".encode(), word.encode())


def drawn(
    backend: StructuredOutput,
    grammar: Grammar,
    start: list[int],
    ways: list[bytes],
    seed: int,
    size: int = SIZE,
) -> list[int]:
    """Returns token ids that begin with `start` and continue from random logits under the masks,
    until the text may end."""
    rng = np.random.default_rng(seed)
    ids = list(start)
    assert grammar.accept(ids) == len(ids)
    for step in range(40 * PATIENCE):
        allowed = mask_of(backend, grammar, size)
        assert allowed.any(), f"nothing is allowed after {ids}"
        if allowed[END]:
            return ids
        if step > PATIENCE and rng.random() < 0.7:
            possible = [way for way in ways if grammar.fork().accept(list(way)) == len(way)]
            if possible:
                way = possible[rng.integers(len(possible))]
                grammar.accept(list(way))
                ids += way
                continue
        tokens = np.flatnonzero(allowed)
        endless = np.isin(tokens, list(b" \t\r\n0123456789"))
        token = int(
            tokens[
                np.argmax(
                    rng.gumbel(size=len(tokens)) * 2
                    - 3 * endless * (step > PATIENCE)
                    + 2 * (tokens > END)
                )
            ]
        )
        assert grammar.accept([token]) == 1, f"{token} was allowed after {ids}"
        ids.append(token)
    raise AssertionError(f"no end of {ids}")


def decoded(ids: list[int], texts: Sequence[bytes] = (b"", *WORDS)) -> str:
    """texts: the texts of the tokens that are not single bytes."""
    return b"".join(bytes([id]) if id < END else texts[id - END] for id in ids).decode(
        errors="replace"
    )


def starts(constraint: Constraint) -> list[str]:
    tag = json.loads(constraint.text)
    return list(tag.get("triggers") or tag["format"].get("triggers") or ["["])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("name", PARSERS)
def test_random_calls_fit_the_schema(
    registry: Registry, backend: StructuredOutput, name: str, schema: str
) -> None:
    tools = [strict("first-one", SCHEMAS[schema]), strict("second", SCHEMAS["nothing"])]
    if "python" in name or name == "olmo3":
        tools[0]["function"]["name"] = "first_one"
    parser = parser_of(registry, name, tools)
    constraint = parser.constraint(tools, "auto")
    if constraint is None:
        pytest.skip("the format is not described")
    reason = backend.reject(constraint)
    if reason is not None:
        assert schema == "strings with limits" and "xgrammar" in type(backend).__module__, reason
        pytest.skip(reason)
    grammar = backend.compile(constraint)
    ways = sorted(set(ways_out(json.loads(constraint.text))))
    judge = json_judge(SCHEMAS[schema])
    names = set()
    for start in starts(constraint):
        for seed in range(2):
            text = decoded(drawn(backend, grammar.fork(), list(start.encode()), ways, seed))
            message = read(parser_of(registry, name, tools), text)
            assert message.tool_calls, text
            for call in message.tool_calls:
                names.add(call.name)
                is_first = call.name == tools[0]["function"]["name"]
                assert judge(call.arguments) if is_first else json.loads(call.arguments) == {}, (
                    text,
                    call.arguments,
                )
    assert names <= {tool["function"]["name"] for tool in tools}


@cache
def examples(name: str) -> list[Example]:
    """Calls and texts in the parser's format, as its model writes them."""
    cases = {case.name for case in CASES}
    for file in sorted(ROOT.glob("plugins/family/*/tests/examples.py")):
        if found := load_examples(file).get(("tool_parser", name)):
            return [example for example in found if example.name in cases]
    return []


def is_held_otherwise(name: str, example: Example) -> bool:
    """Formats of Python calls require free lists and objects in JSON's notation, and nothing after
    a list of calls."""
    if name not in ("pythonic", "llama4_pythonic", "olmo3"):
        return False
    is_behind = (
        name != "olmo3"
        and bool(example.calls)
        and not example.text.rstrip().endswith(("]", "<|python_end|>"))
    )
    return is_behind or re.search(r"""=(\{'|\[(\[|'.*")|\[\{)""", example.text) is not None


def is_taken(backend: StructuredOutput, grammar: Grammar, text: str) -> bool:
    data = list(text.encode())
    return grammar.accept(data) == len(data) and bool(mask_of(backend, grammar, SIZE)[END])


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("name", PARSERS)
def test_what_models_write_is_taken(
    registry: Registry, backend: StructuredOutput, name: str, is_strict: bool
) -> None:
    tools: list[dict[str, Any]] = []
    for tool in TOOLS:
        # values of any type
        has_any = any(word in json.dumps(tool) for word in ('"filters"', '"people"'))
        function = tool["function"]
        tools.append(
            strict(
                function["name"],
                function["parameters"],
                is_strict and not (name == "functiongemma" and has_any),
            )
        )
    constraint = parser_of(registry, name, tools).constraint(tools, "auto")
    if constraint is None or "format" not in json.loads(constraint.text):
        pytest.skip("calls are JSON, or not described")
    grammar = backend.compile(constraint)
    written = [example for example in examples(name) if not is_held_otherwise(name, example)]
    assert len(written) > 40
    for example in written:
        assert is_taken(backend, grammar.fork(), example.text), example.text


@pytest.mark.parametrize("name", PARSERS)
def test_only_calls_of_strict_tools_are_held(
    registry: Registry, backend: StructuredOutput, name: str
) -> None:
    paris = next((example.text for example in examples(name) if example.name == "one string"), "")
    for is_strict in (True, False):
        tools = [strict("get_weather", CITY, is_strict)]
        constraint = parser_of(registry, name, tools).constraint(tools, "auto")
        if constraint is None or "format" not in json.loads(constraint.text):
            pytest.skip("calls are JSON, or not described")
        grammar = backend.compile(constraint)
        for text, fits in (
            (paris, True),
            (paris.replace("Paris", "Berlin"), False),
            (paris.replace("Paris", "Paris, France"), False),
            (paris.replace("city", "town"), False),
            (paris.replace("get_weather", "get_wether"), None),
            ('No call: <b>x</b> {"a": [1, 2]}', True),
        ):
            assert is_taken(backend, grammar.fork(), text) == (
                fits is True or not is_strict and fits is not None
            ), text


def special_tokens(name: str) -> list[str]:
    """Texts that are special tokens in the vocabularies of the format's models, and two others."""
    for file in sorted(ROOT.glob("plugins/family/*/tests/examples.py")):
        if ("tool_parser", name) in load_examples(file):
            return list(dict.fromkeys([*load_tokens(file), "<|x|>", "<|y|>"]))
    return []


@pytest.mark.parametrize("name", PARSERS)
def test_markers_that_are_special_tokens(registry: Registry, name: str) -> None:
    """Grammars of guidance support special tokens by their ids. xgrammar reports that it does
    not."""
    texts = special_tokens(name)
    token_ids = {text: END + 1 + i for i, text in enumerate(texts)}
    size = END + 1 + len(texts)
    vocabulary = Vocabulary(
        [bytes([i]) for i in range(256)] + [b""] * (1 + len(texts)),
        frozenset(range(END, size)),
        (END,),
    )
    setup = StructuredOutputSetup(size, lambda: vocabulary, (END,))
    guidance: StructuredOutput = registry.build(
        registry.find("structured_output", "guidance"), setup
    )
    tools = [strict("get_weather", CITY)]
    described = parser_of(registry, name, tools).constraint(tools, "auto")
    if described is None:
        pytest.skip("the format is not described")
    constraint = with_special_tokens(described, token_ids)
    # parts of their tags are single, ordinary tokens
    if constraint == described or name == "olmo3":
        pytest.skip("the format has no special tokens")
    xgrammar: StructuredOutput = registry.build(
        registry.find("structured_output", "xgrammar"), setup
    )
    assert "special tokens" in (xgrammar.reject(constraint) or "")
    split = re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")

    def tokens(text: str) -> list[int]:
        return [
            id
            for part in split.split(text)
            for id in ([token_ids[part]] if part in token_ids else part.encode())
        ]

    grammar = guidance.compile(constraint)
    written = [example.text for example in examples(name) if example.name == "one string"]
    paris = next(text for text in written if split.search(text))
    for text, fits in (
        (paris, True),
        (f"a<|x|>free<|x|><|y|> é {paris}<|y|> {paris}\n", True),
        ("free <|x|> text", True),
        ("", True),
        (paris.replace("Paris", "Berlin"), False),
        (paris.replace("Paris", "Par<|x|>is"), False),
        (paris.replace("city", "town"), False),
    ):
        state = grammar.fork()
        ids = tokens(text)
        assert (
            state.accept(ids) == len(ids) and bool(mask_of(guidance, state, size)[END])
        ) == fits, text
    start = tokens(paris[: paris.index("get_weather")])
    while start[-1] < END:  # the last marker before the name
        start.pop()
    ways = sorted(set(ways_out(json.loads(constraint.text))))
    judge = json_judge(CITY)
    by_id = [b"", *(text.encode() for text in texts)]
    for seed in range(3):
        ids = drawn(guidance, grammar.fork(), start, ways, seed, size)
        text = decoded(ids, by_id)
        calls = read(parser_of(registry, name, tools), text).tool_calls
        assert calls and all(judge(call.arguments) for call in calls), text


@pytest.mark.parametrize(
    ("name", "reasoning", "thought"),
    [
        ("hermes", "qwen3", "<think>hm"),
        ("qwen3_coder", "qwen3", "<think>hm"),
        ("glm45", "glm45", "<think>hm"),
        ("seed_oss", "seed_oss", "hm"),
        ("kimi_k2", "kimi_k2", "<think>hm"),
        ("mistral", "mistral", "[THINK]hm"),
    ],
)
def test_calls_made_out_of_the_reasoning_are_held(
    registry: Registry, name: str, reasoning: str, thought: str
) -> None:
    def maker(kind: str, chosen: str) -> Any:
        return lambda setup: registry.build(registry.find(kind, chosen), setup)

    client = FakeEngineClient(
        tool_parser=maker("tool_parser", name),
        reasoning_parser=maker("reasoning_parser", reasoning),
    )
    tools = [strict("get_weather", CITY)]
    chat = Chat(messages=[{"role": "user", "content": "h"}], tools=tools)

    async def ask() -> None:
        options = RequestOptions(request_id="r")
        async for _ in await Chats(client).answer(
            ChatRequest(chat=chat), SamplingParams(max_tokens=1), options
        ):
            pass

    asyncio.run(ask())
    prompt, params, _ = client.requests[0]
    wanted = params.structured_outputs
    vocabulary = client.tokenizer().vocabulary()
    assert wanted is not None
    setup = StructuredOutputSetup(vocabulary.size, lambda: vocabulary, vocabulary.eos_token_ids)
    backend: StructuredOutput = registry.build(
        registry.find("structured_output", "guidance"), setup
    )
    grammar = backend.compile(Constraint("structural_tag", wanted.structural_tag or ""))
    ends = wanted.reasoning_end_token_ids
    if ends is None:  # then core finds them
        made = maker("reasoning_parser", reasoning)(
            OutputParserSetup.after_prompt(client.tokenizer(), prompt.token_ids or ())
        )
        ends = [list(end.encode()) for end in made.reasoning_end()]
    paris = next(example.text for example in examples(name) if example.name == "one string")
    for text, fits in ((paris, True), (paris.replace("Paris", "Berlin"), False)):
        state = RequestGrammar(
            "guidance",
            backend,
            grammar.fork(),
            vocab_size=vocabulary.size,
            reasoning=ReasoningEnd(ends, vocabulary.token_bytes) if ends else None,
        )
        ids = list(f"{thought} {text}".encode())
        assert (state.accept(ids) == len(ids)) == fits


NOT_EXPRESSED: dict[str, Any] = {
    "recursion": {"properties": {"node": {"$ref": "#"}}},
    "allOf": {"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 2}]}}},
    "not": {"properties": {"a": {"type": "string", "not": {"const": "x"}}}},
    "anchors inside": {"properties": {"a": {"type": "string", "pattern": "a(^b)"}}},
    "pattern and length": {"properties": {"a": {"type": "string", "pattern": "b", "maxLength": 3}}},
    "format": {"properties": {"a": {"type": "string", "format": "email"}}},
    "number of properties": {"properties": {"a": {"type": "string"}}, "minProperties": 1},
    "unknown required": {"properties": {}, "required": ["a"]},
    "strange name": {"properties": {"a<b": {"type": "string"}}},
    "limited integer or string": {
        "properties": {"a": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}]}}
    },
    "no type": {"properties": {"a": {"minLength": 3}}},
}


@pytest.mark.parametrize("schema", NOT_EXPRESSED)
@pytest.mark.parametrize(
    "name", ["qwen3_coder", "glm45", "deepseek_v32", "pythonic", "functiongemma"]
)
def test_what_cannot_be_kept_is_refused_or_kept(registry: Registry, name: str, schema: str) -> None:
    """Some formats support only some of these."""
    tools = [strict("f", {"type": "object", **NOT_EXPRESSED[schema]})]
    parser = parser_of(registry, name, tools)
    can = {
        "strange name": {"functiongemma"},
        "limited integer or string": {"deepseek_v32", "pythonic", "functiongemma"},
    }
    if name in can.get(schema, ()):
        assert parser.constraint(tools, "auto") is not None
        return
    with pytest.raises(RequestError, match="cannot be enforced") as caught:
        parser.constraint(tools, "auto")
    assert caught.value.parameter == "tools"
