"""Bodies of up to 8 MiB that take as much work as possible. Each is refused, and others get answers meanwhile."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hostile_routes import CHAT, COMPLETION, COUNT, DETOKENIZE, HEADERS, MESSAGES, RESPONSES, SMALL, TOKENIZE, USER

MIB = 1024 * 1024
BIG = 8 * MIB - 2000


def filled(item: Any) -> list[Any]:
    """As many copies of `item` as a body of 8 MiB can have."""
    return [item] * (BIG // (len(json.dumps(item)) + 2))


def named(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object", "properties": {"a": {}}}}}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
PART = {"type": "text", "text": "a"}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": (COMPLETION, {"prompt": "word " * (BIG // 5)}),
    "prompt without spaces": (COMPLETION, {"prompt": "a" * BIG}),
    "prompt of ids": (COMPLETION, {"prompt": filled(7)}),
    "many prompts": (COMPLETION, {"prompt": ["a" * 400] * 1024}),
    "too many prompts": (COMPLETION, {"prompt": filled("a")}),
    "bad_words": (COMPLETION, {"bad_words": filled("ab")}),
    "stop": (COMPLETION, {"stop": filled("ab")}),
    "one stop": (CHAT, {"stop": "a" * BIG}),
    "wrong stop": (CHAT, {"stop": filled(1)}),
    "stop_token_ids": (CHAT, {"stop_token_ids": filled(-1)}),
    "allowed_token_ids": (CHAT, {"allowed_token_ids": filled(-1)[:262_144]}),
    "logit_bias": (CHAT, {"logit_bias": {str(number): 1 for number in range(500_000)}}),
    "wrong logit_bias": (CHAT, {"logit_bias": {f"a{number}": None for number in range(300_000)}}),
    "message": (CHAT, {"messages": [{"role": "user", "content": "a b" * (BIG // 3)}]}),
    "messages": (CHAT, {"messages": filled(USER[0])}),
    "wrong messages": (CHAT, {"messages": filled(3)}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": filled(PART)}]}),
    "tools": (CHAT, {"tools": [named(number) for number in range(30_000)]}),
    "template arguments": (CHAT, {"chat_template_kwargs": {"extra": filled({"a": []})}}),
    "empty lists": (CHAT, {"metadata": filled([])}),
    "name of a field": (CHAT, {"x" * BIG: 1}),
    "names of fields": (CHAT, {f"x{number}": 1 for number in range(400_000)}),
    "text to tokenize": (TOKENIZE, {"prompt": "a" * BIG, "return_token_strs": True}),
    "chat to tokenize": (TOKENIZE, {"prompt": None, "messages": [{"role": "user", "content": "a" * BIG}]}),
    "ids": (DETOKENIZE, {"tokens": filled(97)}),
    "input": (RESPONSES, {"input": "a" * BIG}),
    "calls": (RESPONSES, {"input": filled(CALL)}),
    "allowed calls": (RESPONSES, {"input": [CALL] * 16_000}),
    "answers": (MESSAGES, {"messages": [{"role": "user", "content": filled(PART)}]}),
    "tokens of messages": (COUNT, {"messages": [{"role": "user", "content": "a" * BIG}]}),
    "stop_sequences": (MESSAGES, {"stop_sequences": filled("ab")}),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_a_large_body_holds_up_nobody(hostile, name):
    path, fields = LONG[name]
    body = json.dumps({**SMALL[path], **fields}, separators=(",", ":")).encode()[: 8 * MIB]

    async def post(http: httpx.AsyncClient) -> None:
        await http.post(path, json=SMALL[path])  # what is imported and compiled once
        hostile.lag_s, hostile.tokenizer.num_chars = 0.0, 0
        answer = await http.post(path, content=body, headers=HEADERS)
        assert answer.status_code in (200, 400), answer.text[:500]
        assert answer.status_code == 400 or name in ("many prompts", "allowed calls", "allowed_token_ids"), answer.text[:500]
        assert len(answer.content) < 4096 or answer.status_code == 200

    hostile.run(post)
    assert hostile.tokenizer.num_chars < MIB, "text was tokenized that cannot fit"
    assert hostile.lag_s < 0.25
