"""The two routes that generate pass the contract tests of their kind."""

from __future__ import annotations

from typing import Any, ClassVar

from pegboard_api_openai.api import OpenAIApi
from pegboard_api_openai.plugin import OPENAI

from pegboard.interfaces.api import ApiSetup
from pegboard_testing.contract_api import ApiContract

FIELDS: dict[str, Any] = {
    "model": "fake-model",
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 1,
    "stop": ["a"],
    "stop_token_ids": [7],
    "max_tokens": 6,
    "min_tokens": 1,
    "logit_bias": {"5": 1},
    "allowed_token_ids": [5, 6],
    "truncate_prompt_tokens": 100,
    "response_format": {"type": "text"},
    "request_id": "r",
    "vllm_xargs": {"a": 1},
}


class OpenAIContract(ApiContract):
    def apis(self, setup: ApiSetup) -> Any:
        return [("openai", OpenAIApi(None, setup), OPENAI)]


class TestChat(OpenAIContract):
    path = "/v1/chat/completions"
    plain: ClassVar[dict[str, Any]] = {"messages": [{"role": "user", "content": "x"}]}
    body: ClassVar[dict[str, Any]] = {
        **FIELDS,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": "b",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "c"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 1,
        "documents": [{"title": "t", "text": "d"}],
        "chat_template_kwargs": {"thinking": True},
        "reasoning_effort": "low",
    }


class TestCompletions(OpenAIContract):
    path = "/v1/completions"
    plain: ClassVar[dict[str, Any]] = {"prompt": ["x", "y"], "max_tokens": 3000}
    body: ClassVar[dict[str, Any]] = {
        **FIELDS,
        "prompt": ["a", "b"],
        "logprobs": 1,
        "echo": True,
        "suffix": "",
    }
