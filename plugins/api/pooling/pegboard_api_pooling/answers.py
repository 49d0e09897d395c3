"""Parts of requests and answers that several routes have."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from pegboard.data.output import RequestOutput
from pegboard.errors import RequestError
from pegboard_api_pooling.encodings import metadata, packed
from pegboard_api_pooling.fields import EmbeddingRequest, PoolingFields
from pegboard_server.pooling import Run


def check_salt(request: PoolingFields) -> str | None:
    """Return the cache salt. Raises RequestError if it is empty."""
    if request.cache_salt == "":
        raise RequestError("cache_salt must not be empty", parameter="cache_salt")
    return request.cache_salt


def usage(outputs: Sequence[RequestOutput]) -> dict[str, object]:
    """Return how many tokens were read."""
    num_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def listed(
    run: Run, outputs: Sequence[RequestOutput], data: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the answer of a route that lists one item per input."""
    created = int(time.time())
    return {
        "id": run.name,
        "object": "list",
        "created": created,
        "model": run.model,
        "data": list(data),
        "usage": usage(outputs),
    }


def json_response(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def bytes_response(
    run: Run, request: EmbeddingRequest, outputs: Sequence[RequestOutput]
) -> Response:
    """Return the numbers of all outputs as bytes, joined. With the format `bytes`, a header says
    where each begins."""
    dtype = request.embed_dtype
    endianness = request.endianness
    parts = [packed(output.embedding, dtype, endianness) for output in outputs]
    headers = {}
    if request.encoding_format == "bytes":
        shapes = [output.embedding_shape or () for output in outputs]
        headers["metadata"] = metadata(
            run.name, int(time.time()), run.model, shapes, usage(outputs), dtype, endianness
        )
    return Response(b"".join(parts), headers=headers, media_type="application/octet-stream")
