"""Requests for the comparison with vLLM: every field of every route, alone and together, valid and
invalid. The same seed gives the same requests."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

MODEL = "smol"
JSON = {"Content-Type": "application/json"}

# Field → (valid values, invalid values). With these values of sampling fields a greedy request
# stays greedy, so that texts can be compared.
COMMON: dict[str, tuple[list[Any], list[Any]]] = {
    "model": ([MODEL, None], ["nope", 5]),
    "temperature": ([0, 0.0], [-1, "hot", [0]]),
    "top_p": ([1, 0.5], [0, 1.5, -1]),
    "top_k": ([0, -1, 3], [-2, 1.5, "x"]),
    "min_p": ([0, 0.5], [-0.5, 2]),
    "n": ([1], [0, -1, "x", 2]),  # 2 is refused with greedy sampling
    "presence_penalty": ([0, 1.5, -1.5], [3, -3, "x"]),
    "frequency_penalty": ([0, 1.5, -1.5], [3, -3]),
    "repetition_penalty": ([1.0, 1.3, 0.9], [0, -1, "x"]),
    "seed": ([0, 7, -1], [2**64, "x", 1.5]),
    "stop": ([[], "\n", [".", "the"], ["zzz"]], [3, [""], {}]),
    "stop_token_ids": ([[], [30], [28, 30, 198]], ["x", ["x"], 5]),
    "include_stop_str_in_output": ([True, False], ["x", 7]),
    "ignore_eos": ([True, False], ["x"]),
    "min_tokens": ([0, 3], [-1, 400, "x"]),
    "logit_bias": ([{}, {"30": -100}, {"28": 60}], [{"x": 1}, {"999999": 1}, [1], "x"]),
    "allowed_token_ids": ([[28, 30, 198, 253, 260]], [[], [999999], ["x"], 5]),
    "bad_words": ([[], ["the"], ["Paris", "a"]], [[5], "x", [""]]),
    "prompt_logprobs": ([0, 1, 3], [-2, 25, "x"]),
    "skip_special_tokens": ([True, False], ["x"]),
    "spaces_between_special_tokens": ([True, False], ["x"]),
    "truncate_prompt_tokens": ([1, 4, -1], [-2, 9999, "x"]),
    "echo": ([True, False], ["x"]),
    "priority": ([0], [3, "x"]),
    "cache_salt": (["salt"], ["", 5]),
    "request_id": (["chosen-1"], [5]),
    "user": (["me"], [5]),
    "return_token_ids": ([True, False], ["x"]),
    "return_tokens_as_token_ids": ([True, False], ["x"]),
    "vllm_xargs": ([{}], ["x"]),
    "stream": ([True, False], ["x"]),
    "stream_options": (
        [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
        ["x", 5],
    ),
    "use_beam_search": ([True, False], ["x"]),
    "length_penalty": ([1.0], ["x"]),
    "no_such_field": ([], [1]),
    "logits_processors": ([], [["package.module"]]),
    "best_of": ([], [2]),
}
COMPLETION = {
    **COMMON,
    "prompt": (
        [
            "Hello",
            "The capital of France is",
            ["One", "Two and"],
            [504, 3575, 282],
            [[504, 3575], [504]],
            "Once upon a time " * 8,
        ],
        ["", [], [[]], 5, {"a": 1}, ["a", 1], [999999], [-1], None, "word " * 700],
    ),
    "max_tokens": ([1, 2, 8, None], [0, -1, "x", 1.5]),
    "logprobs": ([0, 1, 3], [-2, 25, "x"]),
    "add_special_tokens": ([True, False], ["x"]),
    "suffix": ([], ["end"]),
}
HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {
    **COMMON,
    "messages": (
        [
            HELLO,
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is the capital of France?"},
            ],
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hi"}],
                }
            ],
            [
                *HELLO,
                {"role": "assistant", "content": "Hi!"},
                {"role": "user", "content": "Count to three."},
            ],
            [*HELLO, {"role": "assistant", "content": "I"}],
        ],
        [
            [],
            "x",
            [5],
            [{"role": "user"}],
            [{"role": "user", "content": 5}],
            [{"content": "x"}],
            None,
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": [{"type": "nonsense"}]}],
            [{"role": "user", "content": "word " * 700}],
        ],
    ),
    "max_tokens": ([1, 2, 8], [0, -1, "x"]),
    "max_completion_tokens": ([1, 2, 8], [0, -1, "x"]),
    "logprobs": ([True, False], ["x"]),
    "top_logprobs": ([0, 2], [-2, 25, "x"]),
    "add_generation_prompt": ([True, False], ["x"]),
    "continue_final_message": ([False], ["x"]),
    "add_special_tokens": ([True, False], ["x"]),
    "documents": ([[{"title": "a", "text": "b"}]], ["x", [5]]),
    "chat_template": ([], ["{{ messages }}", 5]),
    "chat_template_kwargs": ([{}, {"unused": True}], ["x"]),
}
TOKENIZE = {
    "prompt": (["Hello", "", "two words", "<|im_start|>é🌍"], [5, ["x"]]),
    "model": ([MODEL, None], ["nope"]),
    "add_special_tokens": ([True, False], ["x"]),
    "return_token_strs": ([False], ["x"]),
}
TOKENIZE_CHAT = {
    name: CHAT[name]
    for name in ("messages", "model", "add_generation_prompt", "add_special_tokens")
}
DETOKENIZE = {
    "tokens": ([[504, 3575], [], [1, 2], [28]], [["x"], "x", [-1], 5]),
    "model": ([MODEL, None], ["nope"]),
}

SHORT = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
ROUTES: list[tuple[str, int, dict[str, Any], dict[str, tuple[list[Any], list[Any]]]]] = [
    # path, weight, fields that are always present, fields to draw from
    ("/v1/completions", 10, {"prompt": "The capital of France is", **SHORT}, COMPLETION),
    ("/v1/chat/completions", 10, {"messages": HELLO, **SHORT}, CHAT),
    ("/tokenize", 1, {"prompt": "Hello there"}, TOKENIZE),
    ("/tokenize", 1, {"messages": HELLO}, TOKENIZE_CHAT),
    ("/detokenize", 1, {"tokens": [504, 3575]}, DETOKENIZE),
]


@dataclass(frozen=True)
class Case:
    """One request. body: an object, or bytes that are sent as they are. changed: the fields that
    were drawn."""

    method: str
    path: str
    body: Any = None
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    changed: tuple[str, ...] = ()

    @property
    def content(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()

    def value(self, name: str) -> Any:
        """Returns a field of the body, or None when the body does not have it."""
        return self.body.get(name) if isinstance(self.body, dict) else None


def generate(number: int, seed: int = 0) -> list[Case]:
    """Returns `number` requests: first the unusual ones, then every value of every field once (if
    there is room), then mixtures."""
    chance = random.Random(seed)
    single = [
        Case("POST", path, {**base, name: value}, changed=(name,))
        for path, _, base, fields in ROUTES
        for name, (valid, invalid) in fields.items()
        for value in (*valid, *invalid)
    ]
    chance.shuffle(single)
    mixed = [_mixture(chance) for _ in range(number)]
    half = max(0, number - len(ODD)) * 2 // 3
    return [*ODD, *single[:half], *mixed][:number]


def _mixture(chance: random.Random) -> Case:
    path, _, base, fields = chance.choices(ROUTES, [weight for _, weight, _, _ in ROUTES])[0]
    body = dict(base)
    names = chance.sample(sorted(fields), min(len(fields), chance.randint(2, 6)))
    for name in names:
        valid, invalid = fields[name]
        pool = valid if valid and (not invalid or chance.random() < 0.93) else invalid
        body[name] = chance.choice(pool)
    return Case("POST", path, body, changed=tuple(sorted(names)))


ODD = [
    Case("GET", "/v1/models", None),
    Case("GET", "/health", None),
    Case("GET", "/ping", None),
    Case("POST", "/ping", None),
    Case("GET", "/version", None),
    Case("GET", "/load", None),
    Case("GET", "/v1/nothing", None),
    Case("GET", "/v1/chat/completions", None),
    Case("DELETE", "/v1/models", None),
    Case("POST", "/v1/completions", b""),
    Case("POST", "/v1/completions", b"{"),
    Case("POST", "/v1/completions", b"[]"),
    Case("POST", "/v1/completions", b'"x"'),
    Case("POST", "/v1/completions", b"\xff"),
    Case("POST", "/v1/chat/completions", {}),
    Case("POST", "/v1/completions", {}),
    Case("POST", "/tokenize", {}),
    Case("POST", "/detokenize", {}),
    Case("POST", "/v1/completions", b'{"prompt": "x"}', {"Content-Type": "text/plain"}),
    Case("POST", "/v1/chat/completions", b"{}", {}),
]
