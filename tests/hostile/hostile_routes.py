"""The routes that read bodies, and a small valid body for each."""

from __future__ import annotations

from typing import Any

HEADERS = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
RESPONSES = "/v1/responses"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"

USER = [{"role": "user", "content": "x"}]
SMALL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    COMPLETION: {"prompt": "x", "max_tokens": 2},
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    TOKENIZE: {"prompt": "x"},
    DETOKENIZE: {"tokens": [1]},
    MESSAGES: {"model": "fake-model", "messages": USER, "max_tokens": 2},
    COUNT: {"model": "fake-model", "messages": USER},
}
