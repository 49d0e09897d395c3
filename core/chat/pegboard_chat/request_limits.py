"""The limits of request bodies. They are checked before work is done that grows with the body:
before it is decoded, before its fields are checked, and before its text is tokenized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pegboard.errors import MalformedRequest, RequestError

if TYPE_CHECKING:
    from pegboard.interfaces.api import EngineClient

MAX_DEPTH = 128
"""How deep lists and objects may be nested in a body. Templates, parsers and schema compilers walk
values recursively."""

MAX_STRINGS = 200_000
MAX_CONTAINERS = 100_000
MAX_NUMBERS = 1_500_000
"""How many strings (names of fields included), how many lists and objects, and how many values a
body may have in all."""

MAX_EXPONENTS = 4096
"""How many numbers with an exponent a body may have. Reading or writing 1e308 takes a hundred times
as long as other numbers."""

COUNTED_FROM = 6 * MAX_EXPONENTS
"""The values of a body of fewer bytes are not counted: it has no room for many."""

CONTAINERS = (dict, list)

SLICE = 64 * 1024

MAX_ITEMS: dict[str, tuple[int, int | None]] = {
    "stop": (256, 64 * 1024),
    "stop_sequences": (256, 64 * 1024),
    "bad_words": (1024, 64 * 1024),
    "stop_token_ids": (16_384, None),
    "allowed_token_ids": (262_144, None),
    "logit_bias": (16_384, None),
    "messages": (16_384, None),
    "input": (16_384, None),
    "tools": (1024, None),
    "functions": (1024, None),
    "documents": (1024, None),
    "metadata": (256, None),
    "vllm_xargs": (256, None),
    "kv_transfer_params": (256, None),
    "chat_template_kwargs": (256, None),
    "include": (64, None),
    "tokens": (1_048_576, None),
}
"""Field of a body → (how many items it may have, how many characters they may have together).
`docs/serving.md` lists them."""


def check_counts(body: bytes) -> None:
    """Raise MalformedRequest if `body` is JSON of more values than any request needs. Small values
    take up to fifty times their bytes in memory, so this is checked before they are decoded."""
    if len(body) < COUNTED_FROM or _is_small(body):
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    exponents = "numbers with an exponent"
    counts = {"strings": plain.count(b'"') // 2, "lists and objects": 0, "values": 0, exponents: 0}
    limits = {
        "strings": MAX_STRINGS,
        "lists and objects": MAX_CONTAINERS,
        "values": MAX_NUMBERS,
        exponents: MAX_EXPONENTS,
    }
    is_inside = False
    # in slices, because splitting makes an object for each part
    for start in range(0, len(plain), SLICE):
        parts = plain[start : start + SLICE].split(b'"')
        outside = b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        counts["lists and objects"] += outside.count(b"{") + outside.count(b"[")
        counts["values"] += outside.count(b",")
        letters = outside.lower()
        counts[exponents] += letters.count(b"e") - letters.count(b"true") - letters.count(b"false")
        for name, limit in limits.items():
            if counts[name] > limit:
                raise MalformedRequest(
                    f"the request body has over {limit} {name}, the most that a request may have"
                )


def _is_small(body: bytes) -> bool:
    """Count as if no string contained a quote, a bracket or a comma. This is fast, and enough for
    nearly all bodies."""
    return (
        body.count(b'"') // 2 <= MAX_STRINGS
        and body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS
        and body.count(b",") <= MAX_NUMBERS
        and body.count(b"e") + body.count(b"E") <= MAX_EXPONENTS
    )


def check_depth(value: Any, name: str) -> None:
    """Raise MalformedRequest if lists and objects in `value` are nested deeper than `MAX_DEPTH`.
    name: the field that has `value`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [part for part in item.values() if isinstance(part, CONTAINERS)]
            elif isinstance(item, list):
                inner += [part for part in item if isinstance(part, CONTAINERS)]
        if not inner:
            return
        level = inner
    raise MalformedRequest(
        f"{name} is nested deeper than {MAX_DEPTH} levels; expected fewer", parameter=name
    )


def check_items(given: Mapping[str, Any]) -> None:
    """Raise RequestError if a field of the body has more items, or more characters in them, than
    `MAX_ITEMS` allows."""
    for name, value in given.items():
        if name not in MAX_ITEMS or not isinstance(value, str | list | dict):
            continue
        most, most_chars = MAX_ITEMS[name]
        if not isinstance(value, str) and len(value) > most:
            raise RequestError(
                f"{name} has {len(value)} items; at most {most} are allowed", parameter=name
            )
        if most_chars is not None and (num := _num_chars(value)) > most_chars:
            raise RequestError(
                f"{name} has {num} characters; at most {most_chars} are allowed", parameter=name
            )


def _num_chars(value: str | Iterable[Any]) -> int:
    return (
        len(value)
        if isinstance(value, str)
        else sum(len(item) for item in value if isinstance(item, str))
    )


class PromptLimit:
    """How long the text of a prompt may be: `max_model_len` times the longest token of the
    vocabulary. A longer text cannot fit, whatever its tokens are, so it is refused without
    tokenizing it."""

    def __init__(self, client: "EngineClient") -> None:
        self._client = client

    @cached_property
    def max_chars(self) -> int:
        return (
            self._client.models()[0].max_model_len
            * self._client.tokenizer().vocabulary().longest_token()
        )

    def check(self, text: str, parameter: str = "prompt") -> None:
        """Raise RequestError if `text` is too long."""
        if len(text) > self.max_chars:
            raise too_long(len(text), self.max_chars, parameter)


def too_long(num_chars: int, limit: int, parameter: str) -> RequestError:
    return RequestError(
        f"{parameter}: the text has over {min(num_chars, limit)} characters, more than fit into "
        f"max_model_len (at most {limit} characters): shorten it",
        parameter=parameter,
    )


def num_text_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many characters the contents of `messages` have."""
    parts = (part for message in messages for part in _texts(message.get("content")))
    return sum(map(len, parts))


def _texts(content: Any) -> Iterable[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
