"""Parts of requests and answers that several routes have."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from pegboard.data.output import RequestOutput
from pegboard.errors import RequestError
from pegboard_api_pooling.encodings import base64_of, metadata, packed
from pegboard_api_pooling.fields import EmbeddingRequest, PoolingFields
from pegboard_chat.off_loop import off_loop
from pegboard_server.json_api import in_pieces
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


async def results(
    run: Run, request: EmbeddingRequest, outputs: Sequence[RequestOutput], kind: str, field: str
) -> Response:
    """Return the answer with what the model made of inputs: JSON, or the bytes of all, joined.
    kind, field: what an item is called, and where it has its numbers. A long answer is written in a
    thread."""
    size = sum(len(output.embedding) for output in outputs)
    return await off_loop(size, lambda: _results(run, request, outputs, kind, field))


def _results(
    run: Run, request: EmbeddingRequest, outputs: Sequence[RequestOutput], kind: str, field: str
) -> Response:
    dtype = request.embed_dtype
    endianness = request.endianness
    if request.encoding_format in ("bytes", "bytes_only"):
        return _joined(run, request, outputs)
    numbers: Sequence[Any] = (
        [output.pooled().tolist() for output in outputs]
        if request.encoding_format == "float"
        else [base64_of(output.embedding, dtype, endianness) for output in outputs]
    )
    data = [{"index": index, "object": kind, field: each} for index, each in enumerate(numbers)]
    return json_response(in_pieces(listed(run, outputs, data)))


def _joined(run: Run, request: EmbeddingRequest, outputs: Sequence[RequestOutput]) -> Response:
    """Return the numbers of all outputs as bytes. With the format `bytes`, a header says where each
    begins."""
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
