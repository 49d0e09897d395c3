"""Compares two servers' answers to the same request: status, error, JSON shape, finish reasons,
usage, token ids, text, logprobs. `KNOWN` lists what may differ, and why. docs/vllm.md lists the
same for readers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from request_generator import Case

TOLERANCE = 0.02
"""Tolerance of a logprob. Two programs add floats in different orders."""


@dataclass(frozen=True)
class Answer:
    """An answer: its status, and its body, which is an object, the list of a stream's events, or
    text."""

    status: int
    body: Any

    def to_json(self) -> list[Any]:
        return [self.status, self.body]


def ask(url: str, case: Case, client: httpx.Client) -> Answer:
    response = client.request(
        case.method, url + case.path, content=case.content, headers=case.headers
    )
    text = response.text
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        return Answer(
            response.status_code,
            [event if event == "[DONE]" else json.loads(event) for event in events],
        )
    try:
        return Answer(response.status_code, response.json())
    except ValueError:
        return Answer(response.status_code, text)


@dataclass(frozen=True)
class Difference:
    """One difference. where: its place inside the answer."""

    where: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.where}: {_short(self.ours)} here, {_short(self.theirs)} there"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:160] + "…"


def differences(case: Case, ours: Answer, theirs: Answer) -> list[Difference]:
    """Returns all differences except the known ones."""
    found = _differences(ours, theirs)
    return [
        item
        for item in found
        if not any(known.explains(case, item, ours, theirs) for known in KNOWN)
    ]


def _differences(ours: Answer, theirs: Answer) -> Iterator[Difference]:
    if ours.status != theirs.status:
        yield Difference("status", [ours.status, _message(ours)], [theirs.status, _message(theirs)])
    elif ours.status != 200:
        yield from _errors(ours.body, theirs.body)
    elif isinstance(ours.body, list) and isinstance(theirs.body, list):
        yield from _values("stream", _joined(ours.body), _joined(theirs.body))
    else:
        yield from _values("", ours.body, theirs.body)


def _message(answer: Answer) -> Any:
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    return error.get("message") if isinstance(error, dict) else None


def _errors(ours: Any, theirs: Any) -> Iterator[Difference]:
    """Compares two errors. Each server has its own messages; everything else is compared."""
    here, there = (body.get("error") if isinstance(body, dict) else None for body in (ours, theirs))
    if not isinstance(here, dict) or not isinstance(there, dict):
        yield Difference("error", ours, theirs)
        return
    for name in sorted({*here, *there} - {"message"}):
        if here.get(name) != there.get(name):
            yield Difference(f"error.{name}", here.get(name), there.get(name))


VOLATILE = (
    "id",
    "created",
    "permission",
    "owned_by",
    "root",
    "version",
    "system_fingerprint",
    "created_cache_tokens",
)
"""Fields that differ between any two answers, that name the server, or that vLLM added after the
version that Pegboard follows."""


def _values(path: str, ours: Any, theirs: Any) -> Iterator[Difference]:
    """Fields that are null or empty on one side count as absent."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted({*ours, *theirs}):
            here = ours.get(name)
            there = theirs.get(name)
            if name not in VOLATILE and not (_is_nothing(here) and _is_nothing(there)):
                yield from _values(f"{path}.{name}".lstrip("."), here, there)
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            yield Difference(path, ours, theirs)
        else:
            for index, (here, there) in enumerate(zip(ours, theirs, strict=True)):
                yield from _values(f"{path}[{index}]", here, there)
    elif isinstance(ours, float) or isinstance(theirs, float):
        is_number = isinstance(ours, int | float) and isinstance(theirs, int | float)
        if not is_number or not math.isclose(ours, theirs, abs_tol=TOLERANCE, rel_tol=TOLERANCE):
            yield Difference(path, ours, theirs)
    elif ours != theirs:
        yield Difference(path, ours, theirs)


def _is_nothing(value: Any) -> bool:
    return value is None or value == [] or value == {}


def _joined(events: list[Any]) -> dict[str, Any]:
    """Returns the content of a stream, however it was cut into events."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for choice in event.get("choices", []):
            whole = choices.setdefault(
                choice["index"], {"text": "", "token_ids": [], "logprobs": [], "role": None}
            )
            delta = choice.get("delta", {})
            whole["text"] += choice.get("text") or delta.get("content") or ""
            whole["token_ids"] += choice.get("token_ids") or []
            whole["role"] = delta.get("role") or whole["role"]
            whole["logprobs"] += _chosen(choice.get("logprobs") or {})
            for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                if choice.get(name) is not None:
                    whole[name] = choice[name]
    usages = [event["usage"] for event in events[:-1] if event.get("usage")]
    prompts = [event["prompt_token_ids"] for event in events[:-1] if event.get("prompt_token_ids")]
    return {
        "choices": [choices[index] for index in sorted(choices)],
        "usage": usages[-1] if usages else None,
        "has_usage_in_every_chunk": bool(usages)
        and all(event.get("usage") for event in events[:-1]),
        "prompt_token_ids": prompts[0] if prompts else None,
        "objects": sorted({event.get("object", "error") for event in events[:-1]}),
        "errors": [event["error"]["type"] for event in events[:-1] if "error" in event],
        "end": events[-1],
    }


def _chosen(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return [[entry["token"], entry["logprob"]] for entry in logprobs["content"] or ()]
    return [
        list(pair)
        for pair in zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True)
    ]


@dataclass(frozen=True)
class Known:
    """An intended difference. name: its row in docs/vllm.md."""

    name: str
    explains: Callable[[Case, Difference, Answer, Answer], bool]


def _is_refusal(ours: Answer, *words: str) -> bool:
    """Pegboard refuses the request, with one of `words` in the message."""
    return ours.status == 400 and any(word in str(_message(ours)) for word in words)


def _names_a_field(case: Case, item: Difference, ours: Answer, theirs: Answer) -> bool:
    """Pegboard names a field of the request, or a place inside it, and never "body"."""
    root = str(item.ours).partition("[")[0].partition(".")[0]
    return item.where == "error.param" and (
        item.ours is None or root in {*case.changed, "prompt", "messages", "tokens"}
    )


KNOWN = [
    Known(
        "a field that would be ignored",
        lambda case, item, ours, theirs: (
            item.where == "status"
            and theirs.status == 200
            and _is_refusal(
                ours,
                "unknown field",
                "is not supported",
                "has no effect with use_beam_search",
                "priority",
                "no place for documents",
            )
        ),
    ),
    Known(
        "a message without content",
        lambda case, item, ours, theirs: (
            item.where == "status" and _is_refusal(ours, ".content is required")
        ),
    ),
    Known("`param` of an error", _names_a_field),
    Known(
        "`type` of an error, when several things are wrong",
        lambda case, item, ours, theirs: (
            item.where == "error.type"
            and (len(case.changed) > 1 or _is_refusal(ours, "unknown field", "is not supported"))
            and {item.ours, item.theirs} <= {"Bad Request", "BadRequestError"}
        ),
    ),
    Known(
        "`type` of an error, when a value has the wrong JSON type",
        lambda case, item, ours, theirs: (
            item.where == "error.type"
            and (item.ours, item.theirs) == ("Bad Request", "BadRequestError")
            and _is_refusal(ours, ": expected ", "messages is required")
        ),
    ),
    Known(
        "an unknown path or method, a body that is not text",
        lambda case, item, ours, theirs: (
            item.where == "error" and isinstance(theirs.body, dict) and "detail" in theirs.body
        ),
    ),
    Known(
        "`echo` with `return_token_ids`",
        lambda case, item, ours, theirs: (
            case.value("echo") is True
            and item.where.endswith(".text")
            and str(item.ours).endswith(str(item.theirs))
        ),
    ),
    Known(
        "`echo` in a chat",
        lambda case, item, ours, theirs: (
            case.path == "/v1/chat/completions"
            and case.value("echo") is True
            and item.where == "prompt_logprobs"
        ),
    ),
    Known(
        "text of an incomplete character in `prompt_logprobs`",
        lambda case, item, ours, theirs: (
            item.where.endswith(".decoded_token") and "\ufffd" in str(item.ours)
        ),
    ),
    Known(
        "`cached_tokens`",
        lambda case, item, ours, theirs: item.where.endswith("prompt_tokens_details.cached_tokens"),
    ),
]
