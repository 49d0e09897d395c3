"""The routes of models that pool, and bodies for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostile_bodies import BIG, filled
from hostile_routes import USER

EMBEDDINGS = "/v1/embeddings"
POOLING = "/pooling"
CLASSIFY = "/classify"
SCORE = "/score"
RERANK = "/rerank"

SMALL: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {"input": "x"},
    POOLING: {"input": "x"},
    CLASSIFY: {"input": "x"},
    SCORE: {"text_1": "x", "text_2": "a"},
    RERANK: {"query": "x", "documents": ["a"]},
}

SCORED: list[dict[str, Any]] = [
    {"text_1": "the", "text_2": ["in", "heron"], "truncate_prompt_tokens": 8},
    {"data_1": ["the", "a"], "data_2": ["in", "heron"], "model": "served", "priority": 0},
]
RANKED: list[dict[str, Any]] = [
    {"query": "the", "documents": ["in", {"text": "heron"}], "top_n": 1, "model": "served"},
    {"query": "the", "documents": ["in"], "return_documents": False, "cache_salt": "s"},
]
VALID: dict[str, list[dict[str, Any]]] = {
    EMBEDDINGS: [
        {"input": "the", "model": "served", "encoding_format": "base64", "embed_dtype": "bfloat16"},
        {"input": ["the", "in"], "encoding_format": "bytes", "endianness": "big", "user": "u"},
        {"input": [[7, 8], [9]], "truncate_prompt_tokens": -1, "use_activation": False},
        {"messages": USER, "add_generation_prompt": False, "encoding_format": "bytes_only"},
    ],
    POOLING: [
        {"input": "the", "model": "served", "encoding_format": "base64", "embed_dtype": "fp8_e5m2"},
        {"input": [[7, 8], [9]], "task": "embed", "use_activation": False, "user": "u"},
        {"input": "the in", "task": "token_embed", "encoding_format": "bytes"},
    ],
    SCORE: SCORED,
    "/v1/score": SCORED,
    RERANK: RANKED,
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
}
"""Bodies that are answered with 200 by a model that makes vectors, for every route but those that
need another model. "served" is replaced by the name of the model."""

LONG: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "text": (EMBEDDINGS, lambda: {"input": "a" * BIG}),
    "texts": (EMBEDDINGS, lambda: {"input": filled("a")}),
    "token ids": (EMBEDDINGS, lambda: {"input": filled(7)}),
    "lists of ids": (EMBEDDINGS, lambda: {"input": filled([7])}),
    "inputs of tokens": (POOLING, lambda: {"input": filled("a")}),
    "data": (POOLING, lambda: {"data": filled({"text": "a"})}),
    "chat": (EMBEDDINGS, lambda: {"input": None, "messages": filled(USER[0])}),
    "text of words": (CLASSIFY, lambda: {"input": "a b" * (BIG // 3)}),
    "pairs": (SCORE, lambda: {"text_1": "a", "text_2": filled("b")}),
    "wrong texts": (SCORE, lambda: {"text_2": filled(3)}),
    "query": (RERANK, lambda: {"query": "a" * BIG}),
    "documents": (RERANK, lambda: {"documents": filled({"text": "a"})}),
    "wrong documents": (RERANK, lambda: {"documents": filled({"text": 3})}),
}
"""Route and fields, as in hostile_bodies."""


def engine_of(path: str) -> dict[str, Any]:
    """What the fake engine must be, so that it answers a route."""
    if path not in SMALL and path not in VALID:
        return {}
    return {"pools": True, "labels": ("fits",)} if path == CLASSIFY else {"pools": True}
