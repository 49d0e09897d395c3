"""Structured output over HTTP: the openai client's `.parse()`, vLLM's `structured_outputs`, and the
answer to a bad constraint."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from server_process import MODEL

from pegboard_testing.contract_structured_output import json_judge
from pegboard_testing.structured_output_cases import PERSON

MESSAGES: Any = [{"role": "user", "content": "Invent a small order of fruit for a customer."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Address(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    zip: int


class Fruit(BaseModel):
    kind: Literal["apple", "pear", "plum"]
    size: Size
    count: int


class Order(BaseModel):
    address: Address
    main: Fruit
    other: Fruit | None
    is_gift: bool


pytestmark = pytest.mark.usefixtures("left_idle")


def test_parse_gives_pydantic_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        messages=MESSAGES, response_format=Order, max_completion_tokens=300, **GREEDY
    )
    order = answer.choices[0].message.parsed
    assert (
        isinstance(order, Order)
        and isinstance(order.main.size, Size)
        and answer.choices[0].finish_reason == "stop"
    )


def test_parse_of_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        messages=MESSAGES, response_format=Order, max_completion_tokens=300, **GREEDY
    ) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].message
    whole = client.chat.completions.parse(
        messages=MESSAGES, response_format=Order, max_completion_tokens=300, **GREEDY
    )
    assert (
        streamed.content == whole.choices[0].message.content
        and streamed.parsed == whole.choices[0].message.parsed
    )


def test_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": "Answer in JSON: what is the capital of France?"}],
        response_format={"type": "json_object"},
        max_completion_tokens=200,
        extra_body={"structured_outputs": None},
        **GREEDY,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("structure", "judge"),
    [
        ({"choice": ["positive", "negative"]}, lambda text: text in ("positive", "negative")),
        ({"regex": r"\d{4}-\d{2}"}, lambda text: re.fullmatch(r"\d{4}-\d{2}", text)),
        (
            {"grammar": 'root ::= "SELECT " ("a" | "b") " FROM t"'},
            lambda text: re.fullmatch("SELECT [ab] FROM t", text),
        ),
        ({"grammar": 'start: "x" | "y"'}, lambda text: text in ("x", "y")),
        ({"json": PERSON, "disable_any_whitespace": True}, lambda text: json_judge(PERSON)(text)),
    ],
)
def test_structured_outputs_in_both_routes(
    client: openai.OpenAI, structure: dict[str, Any], judge: Any
) -> None:
    body = {"structured_outputs": structure}
    chat = client.chat.completions.create(
        messages=MESSAGES, max_completion_tokens=250, extra_body=body, **GREEDY
    )
    text = client.completions.create(prompt="Answer:", max_tokens=250, extra_body=body, **GREEDY)
    for reason, content in (
        (chat.choices[0].finish_reason, chat.choices[0].message.content),
        (text.choices[0].finish_reason, text.choices[0].text),
    ):
        assert reason == "length" or judge(content), content


def test_structural_tag(client: openai.OpenAI) -> None:
    form = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<n>",
            "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
            "end": "</n>",
        },
    }
    answer = client.chat.completions.create(
        messages=MESSAGES,
        response_format=form,  # type: ignore[arg-type]  # vLLM's
        max_completion_tokens=60,
        **GREEDY,
    )
    assert (
        re.fullmatch(r"<n>-?\d+</n>", answer.choices[0].message.content or "")
        or answer.choices[0].finish_reason == "length"
    )


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "regex"),
        (
            {"structured_outputs": {"grammar": 'root ::= "a" missing'}},
            "structured_outputs",
            "missing",
        ),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs", "nonsense"),
        (
            {"structured_outputs": {"json": {"$ref": "#/$defs/none"}}},
            "structured_outputs",
            "#/$defs/none",
        ),
        (
            {"structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}},
            "structured_outputs",
            "format",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "exactly one",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "nonsense"}},
                }
            },
            "response_format",
            "nonsense",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": 7, "triggers": []}},
            "response_format",
            "structural_tag",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": "nonsense"}},
                    }
                ],
                "tool_choice": "required",
            },
            "tools",
            "nonsense",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_constraint_is_that_request_s_400(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            messages=MESSAGES, max_completion_tokens=5, stream=stream, extra_body=fields, **GREEDY
        )
    body: Any = caught.value.body
    assert body["param"] == param and words in body["message"] and body["code"] == 400


def test_many_at_once_with_n_and_free_ones_between(client: openai.OpenAI) -> None:
    schemas = [
        {"type": "object", "properties": {f"k{i}": {"type": "boolean"}}, "required": [f"k{i}"]}
        for i in range(6)
    ]

    def ask(i: int) -> list[str]:
        body = (
            {"structured_outputs": {"json": schemas[i], "disable_any_whitespace": True}}
            if i < 6
            else {}
        )
        answer = client.completions.create(
            model=MODEL, prompt="Answer:", max_tokens=40, n=2, temperature=1, extra_body=body
        )
        return [choice.text for choice in answer.choices]

    with ThreadPoolExecutor(9) as threads:
        answers = list(threads.map(ask, range(9)))
    for schema, texts in zip(schemas, answers, strict=False):
        assert all(map(json_judge(schema), texts)), texts
