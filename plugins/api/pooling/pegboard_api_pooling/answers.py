"""Parts of requests and answers that several routes have."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.data.output import RequestOutput
from pegboard.errors import RequestError
from pegboard_api_pooling.fields import PoolingFields


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
