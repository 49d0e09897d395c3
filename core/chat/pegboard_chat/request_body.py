"""Turns the bytes of a request into a checked model, and pydantic's errors into sentences that
users can act on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from pegboard.errors import MalformedRequest, RequestError, brief
from pegboard_chat.request_limits import MAX_DEPTH, check_counts, check_depth, check_items

M = TypeVar("M", bound=BaseModel)

MAX_NAME = 60
MAX_PATH = 200
"""The most characters of a field's path in an error. A client may send names of any length."""

OLD_STRUCTURE = "send structured_outputs instead"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "ask for n completions and choose one yourself"),
    "suffix": (("",), "the model cannot use text after the completion"),
    "guided_json": ((), OLD_STRUCTURE),
    "guided_regex": ((), OLD_STRUCTURE),
    "guided_choice": ((), OLD_STRUCTURE),
    "guided_grammar": ((), OLD_STRUCTURE),
    "logits_processors": (([],), "requests cannot contain code"),
    "mm_processor_kwargs": (({},), "only chat completions take images, audio and video"),
    "prompt_embeds": ((), "send text or token ids as prompt"),
    "modalities": ((["text"],), "the model writes text only"),
    "audio": ((), "the model writes text only"),
    "thinking_token_budget": ((), "reasoning cannot be cut short"),
    "verbosity": (("medium",), "the model has no such control"),
    "prediction": ((), "predicted output is not used"),
    "web_search_options": ((), "the server does not search the web"),
}
"""Fields of OpenAI or vLLM that are known but not supported: name → (values that have no effect,
reason for refusing all others)."""

ANY = (object,)
"""Instead of values: every value is accepted."""
NOT_THERE = "Pegboard does not have this sampler"
LLAMA_CPP: dict[str, tuple[tuple[Any, ...], str]] = {
    # where a prompt is cached; the answer is the same
    **dict.fromkeys(["cache_prompt", "id_slot"], (ANY, "")),
    # more facts in the answer, which no client needs
    **dict.fromkeys(["timings_per_token", "return_progress"], (ANY, "")),
    **dict.fromkeys(
        ["dynatemp_exponent", "xtc_threshold", "mirostat_tau", "mirostat_eta", "repeat_last_n"],
        (ANY, ""),
    ),
    **dict.fromkeys(
        ["dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"], (ANY, "")
    ),
    **dict.fromkeys(
        ["dynatemp_range", "xtc_probability", "dry_multiplier", "mirostat"], ((0, 0.0), NOT_THERE)
    ),
    **dict.fromkeys(["typical_p", "tfs_z"], ((1, 1.0), NOT_THERE)),
    "samplers": (([], ""), "samplers have a fixed order"),
    "repeat_penalty": ((1, 1.0), "send repetition_penalty instead"),
    "penalize_nl": ((False,), "send logit_bias instead"),
    "n_predict": ((), "send max_tokens instead"),
    "n_probs": ((0,), "send logprobs instead"),
    "post_sampling_probs": ((False,), "logprobs are those before sampling"),
    "return_tokens": ((False,), "send return_token_ids instead"),
    "min_keep": ((0,), "samplers may keep one token"),
    "n_keep": ((0, -1), "a prompt that is too long is refused, not shortened"),
    "n_discard": ((0,), "a prompt that is too long is refused, not shortened"),
    "n_indent": ((0,), "the text is not indented"),
    "t_max_predict_ms": ((0, -1), "close the connection to end an answer"),
    "grammar": (("",), "send structured_outputs instead"),
    "json_schema": (({},), "send response_format or structured_outputs instead"),
    "lora": (([],), "name the adapter as model"),
    "reasoning_format": (("auto", "deepseek"), "reasoning is always apart from the content"),
    "parse_tool_calls": ((True,), "calls are always read"),
}
"""Fields that clients of llama.cpp's server send, in the form of `REFUSED`. A parameter of a
sampler that another field turns off has no effect."""

_KNOWN = REFUSED | LLAMA_CPP

# msgspec's own reading of 1e308 takes forty times as long
decode_json = msgspec.json.Decoder(float_hook=float).decode

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of 64 bits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "float_parsing": "a number",
    "int_parsing": "an integer",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_long": "at most {max_length} items",
    "string_too_short": "at least {min_length} character",
    "string_pattern_mismatch": "text matching {pattern}",
    "literal_error": "{expected}",
}


def parse_body(body: bytes, model: type[M]) -> M:
    """Return a checked `model`. A null means "not given". Raises MalformedRequest, which names the
    field."""
    return checked(decode_body(body), model)


def checked(data: Mapping[str, Any], model: type[M]) -> M:
    """Return a checked `model` of these fields of a body. See `parse_body`."""
    given = {
        name: value
        for name, value in data.items()
        if value is not None or not _is_known(name, model)
    }
    for name in [name for name in given if name in _KNOWN and name not in model.model_fields]:
        _refuse(name, given.pop(name))
    check_items(given)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _translate(error, given, model) from error


def decode_body(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises MalformedRequest, also if it has too many values or is nested too
    deeply."""
    if not body:
        raise MalformedRequest("the request body is empty; expected a JSON object")
    check_counts(body)
    try:
        data = decode_json(body)
    except ValueError as error:
        # msgspec, UTF-8 or an integer with thousands of digits can raise it
        raise MalformedRequest(f"the request body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedRequest(
            f"the request body is nested deeper than {MAX_DEPTH} levels; expected fewer"
        ) from error
    if not isinstance(data, dict):
        raise MalformedRequest(f"the request body must be a JSON object, got {shown(data)}")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        for name, value in data.items():
            check_depth(value, name)
    return data


def _is_known(name: str, model: type[BaseModel]) -> bool:
    return name in model.model_fields or name in _KNOWN


def _refuse(name: str, value: Any) -> None:
    """Raise MalformedRequest unless `value` has no effect."""
    neutral, reason = _KNOWN[name]
    if neutral is not ANY and not any(
        type(value) is type(nothing) and value == nothing for nothing in neutral
    ):
        raise RequestError(
            f"{name} is not supported: {reason} (got {shown(value)})", parameter=name
        )


def _translate(
    error: ValidationError, data: Mapping[str, Any], model: type[BaseModel]
) -> MalformedRequest:
    """Return one sentence about the field that is wrong. If a union tried several types, it is
    about the deepest error."""
    complaints: dict[str, list[dict[str, Any]]] = {}
    for item in error.errors(include_url=False):
        complaints.setdefault(
            _path(item["loc"], data, is_missing=item["type"] == "missing"), []
        ).append(dict(item))
    first = next(iter(complaints))
    root = _root(first)
    path = max((path for path in complaints if _root(path) == root), key=len)
    items = complaints[path]
    if items[0]["type"] == "missing":
        return MalformedRequest(f"{path} is required", parameter=path)
    if items[0]["type"] == "extra_forbidden":
        return MalformedRequest(_unknown(path, items[0]["loc"], model), parameter=path)
    expected = " or ".join(dict.fromkeys(_expected(item) for item in items))
    return MalformedRequest(
        f"{path}: expected {expected}, got {shown(items[0]['input'])}", parameter=path
    )


def _root(path: str) -> str:
    return path.split("[")[0].split(".")[0]


def _path(location: Sequence[int | str], data: Any, *, is_missing: bool) -> str:
    """Return the path of a field, `stop[1]` for ("stop", "list[str]", 1). The names that pydantic
    inserts for the types of a union are left out. is_missing: the last step is a field that is
    missing."""
    path = ""
    for step in location:
        if isinstance(step, int) and isinstance(data, list) and step < len(data):
            path = f"{path}[{step}]"
            data = data[step]
        elif isinstance(data, dict) and step in data:
            path = f"{path}.{step}" if path else str(step)
            data = data[step]
        elif is_missing and step == location[-1]:
            path = f"{path}.{step}" if path else str(step)
    return path if len(path) <= MAX_PATH else path[:MAX_PATH] + "…"


def _expected(item: Mapping[str, Any]) -> str:
    template = _EXPECTED.get(item["type"])
    return template.format(**item.get("ctx", {})) if template else str(item["msg"])


def _unknown(path: str, location: Sequence[int | str], model: type[BaseModel]) -> str:
    names = list(model.model_fields)
    if len(location) > 1:
        annotation = model.model_fields[str(location[0])].annotation
        nested = [
            arm
            for arm in getattr(annotation, "__args__", ())
            if isinstance(arm, type) and issubclass(arm, BaseModel)
        ]
        names = [name for arm in nested for name in arm.model_fields]
    near = difflib.get_close_matches(str(location[-1])[:MAX_NAME], names, 1)
    return f"unknown field {path!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def shown(value: Any) -> str:
    """Return the beginning of a value, and its JSON type: `'hot' (a string)`."""
    kinds = {
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    if value is None:
        return "null"
    if isinstance(value, list | dict) and len(value) > 8:
        return f"{kinds[type(value)]} of {len(value)}"
    return f"{brief(value)} ({kinds.get(type(value), type(value).__name__)})"


def wrong(path: str, expected: str, got: Any) -> MalformedRequest:
    """Return the error for a value at `path` that is not what was expected."""
    return MalformedRequest(f"{path}: expected {expected}, got {shown(got)}", parameter=path)
