"""Bodies that are wrong in some way: mutations of valid ones, and bodies of up to 8 MiB that take
as much work as possible."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from hostile_routes import CHAT, COMPLETION, COUNT, DETOKENIZE, MESSAGES, RESPONSES, TOKENIZE, USER

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    0.5,
    -0.5,
    1e308,
    -1e308,
    5e-324,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**40,
    "",
    "0",
    "x" * 5000,
    "\x00",
    "\ud7ff",
    "🚀",
    "\u202e",
    [],
    {},
    [[]],
    [{}],
    {"": ""},
    [None],
    [[1, 2], ["a"]],
    ["a"] * 2000,
    {"role": "user"},
    {"type": "text"},
]
FIELDS = [
    "n",
    "temperatur",
    "best_of",
    "suffix",
    "__class__",
    "",
    "functions",
    "response_format",
    "guided_json",
    "prompt_logprobs",
    "top_k",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "priority",
    "cache_salt",
    "prompt",
    "messages",
    "tool_choice",
    "user",
    "store",
    "continue_final_message",
    "skip_special_tokens",
    "repetition_penalty",
    "\u0000",
]
LITERALS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"01",
    b"0x10",
    b"'a'",
    b"\xff",
    b"//",
    b"9" * 5000,
    b"[" * 5000 + b"]" * 5000,
]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns every (container, key) inside a body."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, inner in items for place in [(value, key), *places(inner)]]


def mutate_value(chance: random.Random, body: dict[str, Any]) -> None:
    container, key = chance.choice(places(body))
    what = chance.random()
    if what < 0.6:
        container[key] = copy.deepcopy(chance.choice(VALUES))
    elif what < 0.75:
        container[key] = [container[key]]
    elif what < 0.9:
        del container[key]
    else:
        container[key] = {"x": container[key]}


def encoded(chance: random.Random, body: dict[str, Any]) -> bytes:
    """Returns the body as bytes: mostly JSON, otherwise damaged in a way that JSON text cannot
    express."""
    kind = chance.choice(
        ["plain"] * 8 + ["cut", "byte", "literal", "literal", "deep", "encoding", "noise", "other"]
    )
    data = json.dumps(body).encode()
    if kind == "cut":
        return data[: chance.randrange(len(data))]
    if kind == "byte":
        position = chance.randrange(len(data))
        return (
            data[:position]
            + chance.choice([b"", b"[", b'"', b"}", b",", b"\x80", b"\x00", b"null"])
            + data[position + 1 :]
        )
    if kind == "literal":
        container, key = chance.choice(places(body))
        container[key] = "@literal@"
        return json.dumps(body).encode().replace(b'"@literal@"', chance.choice(LITERALS))
    if kind == "deep":
        depth = chance.choice([50, 900, 20_000])
        if chance.random() < 0.5:
            return b'{"a":' * depth + data + b"}" * depth
        return data[:-1] + b',"tools":' + b"[" * depth + b"]" * depth + b"}"
    if kind == "encoding":
        return data.decode().encode(
            chance.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"])
        ) + chance.choice([b"", b"\xff"])
    if kind == "noise":
        return chance.randbytes(chance.randrange(200))
    if kind == "other":
        return chance.choice(
            [
                b"",
                b" ",
                b"null",
                b"[]",
                b"{}",
                b"3",
                b'"x"',
                b"{}{}",
                b"true",
                b"[" * 100_000,
                b"\x1f\x8b\x08",
            ]
        )
    return data


MIB = 1024 * 1024
BIG = 8 * MIB - 2000


def filled(item: Any) -> list[Any]:
    """As many copies of `item` as a body of 8 MiB can have."""
    return [item] * (BIG // (len(json.dumps(item)) + 2))


def named(number: int) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": f"f{number}",
            "parameters": {"type": "object", "properties": {"a": {}}},
        },
    }


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
PART = {"type": "text", "text": "a"}
LONG: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "prompt": (COMPLETION, lambda: {"prompt": "word " * (BIG // 5)}),
    "prompt without spaces": (COMPLETION, lambda: {"prompt": "a" * BIG}),
    "prompt of ids": (COMPLETION, lambda: {"prompt": filled(7)}),
    "many prompts": (COMPLETION, lambda: {"prompt": ["a" * 400] * 1024}),
    "too many prompts": (COMPLETION, lambda: {"prompt": filled("a")}),
    "bad_words": (COMPLETION, lambda: {"bad_words": filled("ab")}),
    "stop": (COMPLETION, lambda: {"stop": filled("ab")}),
    "one stop": (CHAT, lambda: {"stop": "a" * BIG}),
    "wrong stop": (CHAT, lambda: {"stop": filled(1)}),
    "stop_token_ids": (CHAT, lambda: {"stop_token_ids": filled(-1)}),
    "allowed_token_ids": (CHAT, lambda: {"allowed_token_ids": filled(-1)[:262_144]}),
    "logit_bias": (CHAT, lambda: {"logit_bias": {str(number): 1 for number in range(500_000)}}),
    "wrong logit_bias": (
        CHAT,
        lambda: {"logit_bias": {f"a{number}": None for number in range(300_000)}},
    ),
    "message": (CHAT, lambda: {"messages": [{"role": "user", "content": "a b" * (BIG // 3)}]}),
    "messages": (CHAT, lambda: {"messages": filled(USER[0])}),
    "wrong messages": (CHAT, lambda: {"messages": filled(3)}),
    "parts": (CHAT, lambda: {"messages": [{"role": "user", "content": filled(PART)}]}),
    "tools": (CHAT, lambda: {"tools": [named(number) for number in range(30_000)]}),
    "large numbers": (CHAT, lambda: {"user": filled(1e308)}),
    "large numbers in a call": (
        CHAT,
        lambda: {
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "type": "function",
                            "function": {
                                "name": "f",
                                "arguments": json.dumps({"a": filled(5e-324)}),
                            },
                        }
                    ],
                },
            ]
        },
    ),
    "template arguments": (CHAT, lambda: {"chat_template_kwargs": {"extra": filled({"a": []})}}),
    "empty lists": (CHAT, lambda: {"metadata": filled([])}),
    "name of a field": (CHAT, lambda: {"x" * BIG: 1}),
    "names of fields": (CHAT, lambda: {f"x{number}": 1 for number in range(400_000)}),
    "text to tokenize": (TOKENIZE, lambda: {"prompt": "a" * BIG, "return_token_strs": True}),
    "chat to tokenize": (
        TOKENIZE,
        lambda: {"prompt": None, "messages": [{"role": "user", "content": "a" * BIG}]},
    ),
    "ids": (DETOKENIZE, lambda: {"tokens": filled(97)}),
    "input": (RESPONSES, lambda: {"input": "a" * BIG}),
    "calls": (RESPONSES, lambda: {"input": filled(CALL)}),
    "allowed calls": (RESPONSES, lambda: {"input": [CALL] * 16_000}),
    "answers": (MESSAGES, lambda: {"messages": [{"role": "user", "content": filled(PART)}]}),
    "tokens of messages": (COUNT, lambda: {"messages": [{"role": "user", "content": "a" * BIG}]}),
    "stop_sequences": (MESSAGES, lambda: {"stop_sequences": filled("ab")}),
}
"""Route and fields. They are made when they are needed, because they take much memory."""
