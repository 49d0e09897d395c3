"""Makes requests for a server: valid bodies, mutated bodies, hostile values in every field, bodies
of up to 8 MiB, odd headers, and every route with every method. The same number of a seed is always
the same request."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from typing import Any

import pooled_routes
from hostile_bodies import FIELDS, LONG, MIB, VALUES, encoded, mutate_value, places
from hostile_routes import (
    CHAT,
    COMPLETION,
    COUNT,
    DETOKENIZE,
    HEADERS,
    MESSAGES,
    RESPONSES,
    SMALL,
    TOKENIZE,
)

PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
FLAT_TOOL = {"type": "function", "name": "look", "parameters": PARAMETERS}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
USER = {"role": "user", "content": "the thin heron"}
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
RESULT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "x"}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "nothing"},
]

VALID: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": [USER], "max_tokens": 4},
        {
            "messages": TALK,
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["x", "y"],
            "logit_bias": {"17": 1.5},
            "logprobs": True,
            "top_logprobs": 2,
            "seed": 3,
            "tools": [TOOL],
            "metadata": {"a": "b"},
        },
        {
            "messages": [USER],
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 2,
        },
        {"messages": [USER], "max_tokens": 30, "tools": [TOOL], "tool_choice": "required"},
        {"messages": [USER], "max_tokens": 30, "response_format": FORMAT},
        {
            "messages": [USER, {"role": "assistant", "content": "the"}],
            "max_tokens": 3,
            "continue_final_message": True,
            "add_generation_prompt": False,
            "echo": True,
            "chat_template_kwargs": {"x": 1},
            "reasoning_effort": "low",
        },
    ],
    COMPLETION: [
        {
            "prompt": ["One", "Two"],
            "max_tokens": 2,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
            "stop_token_ids": [5, 6],
            "bad_words": ["three"],
            "min_tokens": 1,
            "frequency_penalty": 0.5,
            "stream": True,
            "top_k": 4,
            "min_p": 0.1,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
        {
            "prompt": [7, 8, 9],
            "max_tokens": 16,
            "seed": 1,
            "n": 2,
            "return_token_ids": True,
            "priority": 0,
            "cache_salt": "s",
        },
        {"prompt": "the", "max_tokens": 4, "use_beam_search": True, "n": 3, "temperature": 0},
        {"prompt": "the", "max_tokens": 8, "structured_outputs": {"regex": "[a-c]+"}},
        {
            "prompt": "the",
            "max_tokens": 2,
            "prompt_logprobs": 1,
            "truncate_prompt_tokens": 4,
            "allowed_token_ids": [97, 98],
        },
    ],
    RESPONSES: [
        {"input": "the", "max_output_tokens": 4},
        {
            "input": [USER, CALL_ITEM, RESULT_ITEM],
            "max_output_tokens": 4,
            "instructions": "Be brief.",
            "stream": True,
            "store": False,
            "tools": [FLAT_TOOL],
        },
        {
            "input": "the",
            "max_output_tokens": 24,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        },
        {
            "input": "the",
            "max_output_tokens": 4,
            "background": True,
            "stream": True,
            "reasoning": {"effort": "low"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "truncation": "auto",
            "max_tool_calls": 2,
        },
    ],
    MESSAGES: [
        {
            "model": "served",
            "messages": [USER],
            "max_tokens": 4,
            "system": "Be brief.",
            "stop_sequences": ["x"],
            "top_k": 3,
        },
        {
            "model": "served",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 6,
            "stream": True,
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "disabled"},
            "metadata": {"user_id": "u"},
        },
    ],
    COUNT: [
        {
            "model": "served",
            "messages": [USER],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        }
    ],
    TOKENIZE: [
        {"prompt": "the", "return_token_strs": True},
        {"messages": [USER], "add_generation_prompt": False, "tools": [TOOL]},
    ],
    DETOKENIZE: [{"tokens": [1, 2, 260]}],
    "/v1/responses/input_tokens": [{"input": "the", "tools": [FLAT_TOOL]}],
    "/inference/v1/generate": [
        {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 4, "seed": 1, "logprobs": 1}}
    ],
    "/abort_requests": [{"request_ids": ["unknown"]}],
    "/invocations": [{"prompt": "the", "max_tokens": 2}, {"messages": [USER], "max_tokens": 2}],
}
"""Bodies that are answered with 200, for every route that reads a body, except those of pooling
models (pooled_routes.py). "served" is replaced by the name of the model."""

WEIGHTS = {CHAT: 30, COMPLETION: 25, RESPONSES: 15, MESSAGES: 15}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

CONSTRAINTS: list[Any] = [
    {"json": SCHEMA},
    {"json": json.dumps(SCHEMA)},
    {"json_object": True},
    {"choice": ["a", "b"]},
    {"regex": "[a-c]{2,5}"},
    {"grammar": 'root ::= "a" | "b" root'},
    {"json": {"type": "string", "minLength": 9, "maxLength": 2}},
    {"regex": "[.*"},
    {"json": {"$ref": "#"}},
    {"json": {"type": "integer", "maximum": 10**300}},
    {"json": {"enum": []}},
    {"json": {"not": {}}},
    {"json": {"properties": {f"p{number}": {"type": "string"} for number in range(800)}}},
    {"regex": "(a{1,900}){1,900}"},
    {"regex": "(a+)+$"},
    {"regex": "\\p{Han}+(?=a)"},
    {"grammar": "root ::= root"},
    {"grammar": "root ::= x"},
    {"grammar": ""},
    {
        "grammar": "root ::= r0\n"
        + "\n".join(f"r{number} ::= r{number + 1}" for number in range(2000))
        + '\nr2000 ::= "a"'
    },
    {"choice": ["a" * 5000] * 3},
    {"choice": []},
    {"choice": [1]},
    {"structural_tag": "{}"},
    {"structural_tag": "[]"},
    {"json": "{"},
    {"json": {"anyOf": [{"type": "array", "items": {"$ref": "#/anyOf/0"}}, {"type": "null"}]}},
    {"regex": ""},
    {"json": {"allOf": [{"type": "string"}, {"type": "number"}]}},
    {"json": {"type": "array", "minItems": 10**6}},
    {"json": {}},
    {
        "json": {
            "patternProperties": {".*": {}},
            "propertyNames": {"maxLength": 1},
            "type": "object",
        }
    },
    {"json": True},
    {"regex": "a", "choice": ["b"]},
    {"json": {"const": "x" * 9000}},
    {"regex": "é{3}🚀*"},
    {"regex": "x{100000}"},
    {"json": {"pattern": "(" * 50}},
    {"json": {"type": "string", "pattern": "(a|aa)+$", "maxLength": 3}},
    {"json": None},
]
OTHERS: list[Any] = [
    "auto",
    "required",
    "none",
    "x",
    "{{ 1 }}",
    "json_object",
    {"type": "json_object"},
    {"type": "tool", "name": "x"},
    [USER],
    [TOOL],
    [FLAT_TOOL],
    FORMAT,
    {"a": {"type": "integer"}},
    [CALL_ITEM],
    3,
    0.5,
    True,
    False,
    1e9,
    ["a", "b"],
    [1, 2],
]
ROLES = ["user", "assistant", "tool", "system", "developer", "function", "", "x" * 300, None, 5]
PARTS = [
    "content",
    "tool_calls",
    "tool_call_id",
    "reasoning",
    "function_call",
    "type",
    "name",
    *FIELDS,
]
QUERIES = [
    "",
    "",
    "?a=b",
    "?stream=true",
    "?config_format=json",
    "?config_format=x",
    "?after=1&limit=-1",
    "?limit=" + "9" * 40,
    "?%00",
    "?starting_after=3&stream=1",
]
ODD_HEADERS: list[dict[str, str]] = [
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"X-Request-Id": "a b"},
    {"X-Request-Id": "x" * 300},
    {"traceparent": "00-zz"},
    {"Authorization": "Bearer x"},
    {"Content-Encoding": "gzip"},
    {"Accept": "text/event-stream"},
    {"X-Long": "a" * 40_000},
    {"Connection": "close"},
    {"Transfer-Encoding": "chunked"},
    {},
]
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD", "TRACE")
NAMES = ("x", "resp_1", "%00", "..%2f", "a" * 500, "%ff")
LEAVES = ("in the head", "in the body", "after the request", "in the answer")
KINDS = {
    "valid": 240,
    "field": 280,
    "mutated": 300,
    "constraint": 40,
    "route": 80,
    "headers": 40,
    "large": 3,
}
"""How often each kind of request is made, in parts of their sum."""


@dataclass(frozen=True)
class Request:
    """leave: where the client abandons the request; "" = it reads the whole answer. resets: it
    leaves with RST."""

    number: int
    kind: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    leave: str = ""
    resets: bool = False

    def encoded(self) -> tuple[bytes, bytes]:
        """Return the bytes of the head and of the body."""
        headers = {"Host": "server", "Content-Length": str(len(self.body)), **self.headers}
        body = self.body
        if "Transfer-Encoding" in headers:
            del headers["Content-Length"]
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{self.method} {self.path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"), body


Parts = tuple[str, str, dict[str, str], Any]
"""(method, path, headers, body): bytes, or a value that is sent as JSON."""


class Generator:
    """Makes requests. model: the served name. description: the server's /openapi.json, which tells
    the routes and fields. pools: the model makes vectors. Half of the valid bodies are for it then,
    and the large ones."""

    def __init__(
        self, seed: int, model: str, description: dict[str, Any], *, pools: bool = False
    ) -> None:
        self._seed = seed
        self._model = model
        self._pools = pools
        self._valid_bodies = {**VALID, **pooled_routes.VALID} if pools else VALID
        self._small = pooled_routes.SMALL if pools else SMALL
        self._large_bodies = pooled_routes.LONG if pools else LONG
        self._routes = [
            (method.upper(), path)
            for path, methods in description["paths"].items()
            for method in methods
        ]
        schemas = description["components"]["schemas"]
        self._fields = {
            path: sorted({name for body in bodies for name in body})
            for path, bodies in self._valid_bodies.items()
        }
        for path, methods in description["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            for schema in content.values():
                self._fields[path] = sorted(
                    schemas[schema["schema"]["$ref"].rpartition("/")[2]]["properties"]
                )
        self._long: dict[str, bytes] = {}

    def make(self, number: int) -> Request:
        draw = random.Random(f"{self._seed} {number}")
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        method, path, headers, body = getattr(self, f"_{kind}")(draw)
        leave = draw.choice(LEAVES) if draw.random() < 0.08 else ""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        return Request(number, kind, method, path, headers, body, leave, draw.random() < 0.5)

    def _base(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        bodies = pooled_routes.VALID if self._pools and draw.random() < 0.5 else VALID
        path = draw.choices(list(bodies), [WEIGHTS.get(path, 5) for path in bodies])[0]
        body = copy.deepcopy(draw.choice(bodies[path]))
        return path, body if "model" not in body else {**body, "model": self._model}

    def _valid(self, draw: random.Random) -> Parts:
        path, body = self._base(draw)
        if body.get("prompt") == "the":
            body["prompt"] = " ".join(
                draw.choices(("the", "in", "heron", "é", "7"), k=draw.choice((1, 5, 40)))
            )
        return "POST", path, HEADERS, body

    def _field(self, draw: random.Random) -> Parts:
        path, body = self._base(draw)
        for name in draw.sample([*self._fields[path], *FIELDS[:6]], draw.choice((1, 1, 2, 3))):
            body[name] = self._value(draw)
        if isinstance(body.get("messages"), list) and draw.random() < 0.3:
            body["messages"].append(
                {"role": draw.choice(ROLES), draw.choice(PARTS): self._value(draw)}
            )
        return "POST", path, HEADERS, _short(body, draw)

    def _mutated(self, draw: random.Random) -> Parts:
        path, body = self._base(draw)
        for _ in range(draw.randint(1, 3)):
            if places(body):
                mutate_value(draw, body)
        body = _short(body, draw)
        return "POST", path, HEADERS, encoded(draw, body) if places(body) else body

    def _constraint(self, draw: random.Random) -> Parts:
        constraint = copy.deepcopy(draw.choice(CONSTRAINTS))
        if draw.random() < 0.3:
            mutate_value(draw, constraint)
        schema = constraint.get("json", SCHEMA)
        function = {"name": "f", "parameters": schema, "strict": draw.random() < 0.5}
        form = {"type": "json_schema", "name": "a", "schema": schema}
        use = {
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "tool", "name": "f"},
        }
        path, fields = draw.choice(
            [
                *[(COMPLETION, {"structured_outputs": constraint})] * 4,
                (
                    CHAT,
                    {
                        "tools": [{"type": "function", "function": function}],
                        "tool_choice": draw.choice(("auto", "required")),
                    },
                ),
                (CHAT, {"response_format": {"type": "json_schema", "json_schema": form}}),
                (RESPONSES, {"text": {"format": form}}),
                (RESPONSES, {"structured_outputs": constraint}),
                (MESSAGES, {"output_config": {"format": form}}),
                (MESSAGES, use),
            ]
        )
        body = {**SMALL[path], **fields}
        return (
            "POST",
            path,
            HEADERS,
            body if "model" not in body else {**body, "model": self._model},
        )

    def _route(self, draw: random.Random) -> Parts:
        method, path = draw.choice([*self._routes, ("GET", "/v1/nothing"), ("GET", "/%2e%2e/")])
        if draw.random() < 0.3:
            method = draw.choice(METHODS)
        while "{" in path:
            path = path[: path.index("{")] + draw.choice(NAMES) + path[path.index("}") + 1 :]
        body = (
            json.dumps(draw.choice(VALUES)).encode()
            if method != "GET" and draw.random() < 0.5
            else b""
        )
        return method, path + draw.choice(QUERIES), HEADERS if body else {}, body

    def _headers(self, draw: random.Random) -> Parts:
        method, path, headers, body = self._valid(draw)
        return (
            method,
            path,
            {**(headers if draw.random() < 0.7 else {}), **draw.choice(ODD_HEADERS)},
            body,
        )

    def _large(self, draw: random.Random) -> Parts:
        name = draw.choice(list(self._large_bodies))
        path, fields = self._large_bodies[name]
        if name not in self._long:
            body = {
                **self._small[path],
                **({"model": self._model} if "model" in self._small[path] else {}),
                **fields(),
            }
            self._long[name] = json.dumps(body, separators=(",", ":")).encode()[: 8 * MIB]
        return "POST", path, HEADERS, self._long[name]

    def _value(self, draw: random.Random) -> Any:
        what = draw.random()
        if what < 0.65:
            return copy.deepcopy(draw.choice(VALUES))
        if what < 0.85:
            return copy.deepcopy(draw.choice(OTHERS))
        if what < 0.9:
            return copy.deepcopy(draw.choice(CONSTRAINTS))
        if what < 0.94:
            value = draw.choice(VALUES)
            return [value] * min(draw.choice((3, 300, 5000)), 1_000_000 // len(json.dumps(value)))
        if what < 0.97:
            return {
                str(number): draw.choice((1, "a", None))
                for number in range(draw.choice((10, 5000)))
            }
        value: Any = 1
        for _ in range(draw.choice((5, 100, 130, 700))):
            value = draw.choice(([value], {"a": value}))
        return value


def _short(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Limit the output, mostly: a missing limit is valid, and takes long."""
    if (
        draw.random() < 0.99
        and not any(name in body for name in LIMITS)
        and "max_tokens" in body | {"max_tokens": 0}
    ):
        body["max_tokens" if "input" not in body else "max_output_tokens"] = 8
    for name in LIMITS:
        limit = body.get(name)
        if isinstance(limit, int) and 64 < limit < 2**31:
            body[name] = 64
    return body
