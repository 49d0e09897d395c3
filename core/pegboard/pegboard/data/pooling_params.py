"""PoolingParams: what a request asks of a pooling model (provisional; no pooler ships yet)."""

from __future__ import annotations

import msgspec


class PoolingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag="pooling"):
    """dimensions: truncate the embedding (Matryoshka models); use_activation: normalise or softmax the result;
    task: embed, classify, score, token_embed or token_classify."""

    dimensions: int | None = None
    use_activation: bool | None = None
    task: str | None = None
