"""Every field that a completion accepts changes something that can be observed, or is refused."""

from __future__ import annotations

import pytest
from pegboard_api_openai.fields import ChatRequest, CompletionRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IGNORED = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "store",
    "service_tier",
    "model",
}
"""Bookkeeping of OpenAI's, and names of the only model."""
COMMON = {
    "stream": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "seed": 3,
    "stop": ["l"],
    "stop_token_ids": [108],
    "include_stop_str_in_output": (True, {"stop": "l"}),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logit_bias": {"5": 1},
    "priority": 2,
    "request_id": "chosen",
    "structured_outputs": {"regex": "a"},
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "n": 2,
    "use_beam_search": True,
    "length_penalty": (2.0, {"use_beam_search": True, "n": 2}),
    "min_tokens": 3,
    "allowed_token_ids": [97],
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 2,
    "echo": True,
    "cache_salt": "s",
    "return_token_ids": True,
    "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"do_remote_decode": True},
    "response_format": {"type": "json_object"},
    "max_tokens": 2,
}
CHAT = {
    **COMMON,
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
    "logprobs": True,
    "top_logprobs": (2, {"logprobs": True}),
    "messages": [{"role": "user", "content": "other"}],
    "tools": ([TOOL], {"tool_choice": "required"}),
    "documents": [{"text": "x"}],
    "add_generation_prompt": False,
    "continue_final_message": (True, {"add_generation_prompt": False}),
    "add_special_tokens": True,
    "chat_template": "x",
    "chat_template_kwargs": {"a": 1},
    "max_completion_tokens": 2,
    "tool_choice": ("none", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, {"tools": [TOOL], "tool_choice": "required"}),
    "include_reasoning": None,
    "reasoning_effort": "low",
    "mm_processor_kwargs": {"a": 1},
}
COMPLETION = {
    **COMMON,
    "return_tokens_as_token_ids": (True, {"logprobs": 1}),
    "logprobs": 1,
    "prompt": "other",
    "prompt_embeds": "AAAA",
    "add_special_tokens": False,
}
TESTED_ELSEWHERE = {
    "functions",
    "function_call",
    "length_penalty",
    "include_reasoning",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_effort",
    "continue_final_message",
    "echo",
    "add_special_tokens",
}
"""Fields whose effect needs a parser, a template that reads them or ranked beams. Other tests of
this folder have those."""


def observed(http, path, body):
    server = http("hello world")
    response = server.client.post(path, json=body)
    answer = (
        response.json()
        if not body.get("stream")
        else [line.partition('"choices"')[2] for line in response.text.split("\n")]
    )
    if isinstance(answer, dict):
        answer = {key: value for key, value in answer.items() if key not in ("id", "created")}
    named = "chosen" in response.text
    asked = [
        (prompt, params, options.priority) for prompt, params, options in server.engine.requests
    ]
    return response.status_code, answer, asked, named


def cases():
    for path, model, base, examples in (
        (
            "/v1/chat/completions",
            ChatRequest,
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
            CHAT,
        ),
        ("/v1/completions", CompletionRequest, {"prompt": "hi", "max_tokens": 8}, COMPLETION),
    ):
        for name in model.model_fields:
            if name not in IGNORED | TESTED_ELSEWHERE:
                yield pytest.param(path, base, name, examples, id=f"{path.split('/')[2]}-{name}")


@pytest.mark.parametrize(("path", "base", "name", "examples"), list(cases()))
def test_a_field_acts_or_is_refused(http, path, base, name, examples):
    assert name in examples, f"a new field {name}: add a value that changes something"
    value, more = examples[name] if isinstance(examples[name], tuple) else (examples[name], {})
    with_it = observed(http, path, {**base, **more, name: value})
    without = observed(http, path, {**base, **more})
    assert with_it != without or with_it[0] == 400
    assert with_it[0] in (200, 400)
