"""Long texts: their tokens are computed in chunks of the model's length, and the vector is the mean
of the chunks' vectors, weighted by their lengths. As vLLM's enable_chunked_processing does, but
each chunk has the special tokens of a text, and the mean is taken before the vectors are
normalized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from pegboard.data.output import RequestOutput
from pegboard.data.pooling_params import PoolingParams
from pegboard.errors import RequestError
from pegboard.interfaces.api import EngineClient, Prompt
from pegboard.interfaces.tokenizer import Tokenizer

MOST_TOKENS_OF_A_BYTE = 8
"""More than any normalization makes of a byte. A text of fewer bytes is not encoded to count its
tokens."""


@dataclass(frozen=True)
class Chunked:
    """One input. prompts: of its chunks. weights: the number of tokens in each, without special
    ones. params: of each chunk."""

    prompts: Sequence[Prompt]
    weights: Sequence[int]
    params: PoolingParams


def chunk(
    client: EngineClient, prompts: Sequence[Prompt], params: PoolingParams
) -> list[Chunked] | None:
    """Return the chunks of all inputs, or None if there are no long ones, or the model does not
    take them. Raises RequestError for an input that is too long even so."""
    model = client.models()[0]
    pooling = model.pooling
    if pooling is None or pooling.max_embed_len is None or params.truncate_prompt_tokens:
        return None
    raw = msgspec.structs.replace(params, use_activation=False)
    name = pooling.prompt_name if params.prompt_name is None else params.prompt_name
    head = pooling.prompts.get(name or "", "")
    most = max(pooling.max_embed_len, model.max_model_len)
    chunks = [_chunks(prompt, client, head, model.max_model_len, most, raw) for prompt in prompts]
    return chunks if any(len(each.prompts) > 1 for each in chunks) else None


def _chunks(
    prompt: Prompt,
    client: EngineClient,
    head: str,
    length: int,
    most: int,
    params: PoolingParams,
) -> Chunked:
    """head: what the model wants before a text. length, most: in tokens, of a chunk and of an
    input."""
    whole = Chunked([prompt], [1], params)
    before: list[int] = []
    after: list[int] = []
    if prompt.media:
        return whole
    if prompt.token_ids is not None:
        ids = list(prompt.token_ids)
    else:
        text = head + (prompt.text or "")
        if MOST_TOKENS_OF_A_BYTE * len(text.encode()) < length:
            return whole
        before, ids, after = encoded(client.tokenizer(), text, prompt.add_special_tokens)
    total = len(before) + len(ids) + len(after)
    if total <= length:
        return whole
    if total > most:
        raise RequestError(
            f"the input has {total} tokens, but max_embed_len is {most}: shorten it",
            parameter="input",
        )
    size = length - len(before) - len(after)
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    bare = replace(prompt, text=None, add_special_tokens=False)
    return Chunked(
        [replace(bare, token_ids=[*before, *part, *after]) for part in parts],
        [len(part) for part in parts],
        msgspec.structs.replace(params, prompt_name=None if prompt.text is None else ""),
    )


def encoded(
    tokenizer: Tokenizer, text: str, adds_special: bool
) -> tuple[list[int], list[int], list[int]]:
    """Return the special tokens before a text, its own tokens, and those after it."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    if not adds_special:
        return [], ids, []
    whole = list(tokenizer.encode(text, add_special_tokens=True))
    extra = len(whole) - len(ids)
    starts = [first for first in range(extra + 1) if whole[first : first + len(ids)] == ids]
    if not starts:  # the tokenizer joins the text with what is around it
        return [], whole, []
    return whole[: starts[0]], ids, whole[starts[0] + len(ids) :]


def joined(
    inputs: Sequence[Chunked],
    outputs: Sequence[RequestOutput],
    *,
    normalizes: bool,
) -> list[RequestOutput]:
    """Return one output for each input. outputs: of all chunks, with vectors that are not
    normalized."""
    import numpy as np

    left = iter(outputs)
    results = []
    for each in inputs:
        parts = [next(left) for _ in each.prompts]
        vectors = np.stack([part.pooled() for part in parts]).astype(np.float64)
        weights = np.array(each.weights, np.float64)
        mean = (vectors * weights[:, None]).sum(0) / weights.sum()
        if normalizes:
            mean /= max(float(np.linalg.norm(mean)), 1e-12)
        ids = [token_id for part in parts for token_id in part.prompt_token_ids or ()]
        data = mean.astype(np.float32).tobytes()
        results.append(replace(parts[0], embedding=data, prompt_token_ids=ids))
    return results
