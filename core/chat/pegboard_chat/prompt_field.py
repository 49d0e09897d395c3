"""The field of a request body that holds one or many prompts, as text or as token ids."""

from __future__ import annotations

from typing import Any

from pegboard.errors import RequestError
from pegboard_chat.request_body import wrong

EXPECTED = "a string, a list of strings, a list of token ids or a list of lists of token ids"


def read_prompts(value: Any, limit: int, name: str = "prompt") -> list[str] | list[list[int]]:
    """Return the prompts in order. They are all texts or all token ids. name: of the field. limit:
    the number of prompts that are allowed. Raises RequestError naming `prompt[i]`."""
    prompts: list[Any]
    if value is None:
        raise RequestError(f"{name} is required", parameter=name)
    if isinstance(value, str):
        prompts = [value]
    elif not isinstance(value, list):
        raise wrong(name, EXPECTED, value)
    elif _is_ids(value):
        prompts = [value]
    else:
        prompts = value
    if not prompts:
        raise RequestError(f"{name} must not be empty", parameter=name)
    if len(prompts) > limit:
        raise RequestError(
            f"{name}: {len(prompts)} prompts in one request, at most {limit} are allowed",
            parameter=name,
        )
    first_is_text = isinstance(prompts[0], str)
    for index, prompt in enumerate(prompts):
        path = f"{name}[{index}]" if prompts is value else name
        if not isinstance(prompt, str if first_is_text else list):
            expected = (
                "a string, as the prompts before it" if first_is_text else "a list of token ids"
            )
            raise wrong(path, expected if index else EXPECTED, prompt)
        if not prompt:
            raise RequestError(f"{path} must not be empty", parameter=path)
        if isinstance(prompt, list):
            _check_ids(prompt, path)
    return prompts


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], int) and not isinstance(value[0], bool)


def _check_ids(ids: list[Any], path: str) -> None:
    if set(map(type, ids)) == {int} and min(ids) >= 0:
        return
    for position, token in enumerate(ids):
        if type(token) is not int or token < 0:
            raise wrong(f"{path}[{position}]", "a token id (an integer from 0)", token)
