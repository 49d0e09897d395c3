"""The `prompt` field of text completions: one or many prompts, as text or as token ids."""

from __future__ import annotations

from typing import Any

from pegboard.errors import MalformedRequest, RequestError
from pegboard_chat.request_body import shown

MAX_COMPLETIONS = 4096
EXPECTED = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def read_prompts(value: Any, limit: int) -> list[str] | list[list[int]]:
    """The prompts in order, all texts or all token ids. Raises RequestError naming `prompt[i]`."""
    prompts: list[Any]
    if value is None:
        raise RequestError("prompt is required", parameter="prompt")
    if isinstance(value, str):
        prompts = [value]
    elif not isinstance(value, list):
        raise _wrong("prompt", EXPECTED, value)
    elif _is_ids(value):
        prompts = [value]
    else:
        prompts = value
    if not prompts:
        raise RequestError("prompt must not be empty", parameter="prompt")
    if len(prompts) > limit:
        raise RequestError(f"prompt: {len(prompts)} prompts in one request, at most {limit} are allowed", parameter="prompt")
    first_is_text = isinstance(prompts[0], str)
    for index, prompt in enumerate(prompts):
        path = f"prompt[{index}]" if prompts is value else "prompt"
        if not isinstance(prompt, str if first_is_text else list):
            expected = "a string, as the prompts before it" if first_is_text else "a list of token ids"
            raise _wrong(path, expected if index else EXPECTED, prompt)
        if not prompt:
            raise RequestError(f"{path} must not be empty", parameter=path)
        if isinstance(prompt, list):
            _check_ids(prompt, path)
    return prompts


def check_number(num_prompts: int, n: int) -> None:
    """Raise RequestError when a request asks for more completions than one request may have."""
    if num_prompts * n > MAX_COMPLETIONS:
        raise RequestError(
            f"n: {n} completions of each of {num_prompts} prompts are {num_prompts * n}, at most {MAX_COMPLETIONS} are allowed "
            "in one request",
            parameter="n",
        )


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], int) and not isinstance(value[0], bool)


def _check_ids(ids: list[Any], path: str) -> None:
    for position, token in enumerate(ids):
        if type(token) is not int or token < 0:
            raise _wrong(f"{path}[{position}]", "a token id (an integer from 0)", token)


def _wrong(path: str, expected: str, got: Any) -> MalformedRequest:
    return MalformedRequest(f"{path}: expected {expected}, got {shown(got)}", parameter=path)
