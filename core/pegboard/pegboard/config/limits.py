"""What bounds one engine. Plain numbers, judged once; tokens unless the name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pegboard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """max_model_len: longest prompt plus output. max_num_batched_tokens: most tokens computed in one step. max_num_seqs: rows.
    max_in_flight: steps submitted before the oldest is awaited. max_num_queued_reqs: completions that may wait before new
    requests are refused. max_drafts: most draft tokens per row and step. num_lookahead_tokens: extra slots a draft proposer
    writes behind the last token. max_loras: adapters resident at once, 0 = LoRA off.

    encoder_cache_tokens: capacity of the worker's encoder cache; max_encoder_tokens: most media tokens encoded per step (None =
    the capacity). never_split_media: a chunk of a prompt never ends inside a media item.
    target_itl_s: how long a step with decodes should last at most; prefill chunks are cut to fit. None = no bound.
    grammar_timeout_s: time to compile one grammar. record_kv_events: keep block events for `control("kv_events")`.
    kv_metrics_share: share of the KV blocks whose stay is measured, 0 = none.
    Raises ConfigError, naming the setting.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    vocab_size: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    target_itl_s: float | None = None
    max_in_flight: int = 1
    max_num_queued_reqs: int | None = None
    enable_prefix_caching: bool = True
    hash_algo: str = "sha256"
    max_drafts: int = 0
    num_lookahead_tokens: int = 0
    max_loras: int = 0
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    encoder_cache_tokens: int = 0
    max_encoder_tokens: int | None = None
    never_split_media: bool = False
    grammar_timeout_s: float = 60.0
    record_kv_events: bool = False
    kv_metrics_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "vocab_size", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "one decoding token per row would not fit a step; raise the first or lower the second"
            )
        if self.kv_load_failure_policy not in ("recompute", "fail"):
            raise ConfigError(f"kv_load_failure_policy must be 'recompute' or 'fail', got {self.kv_load_failure_policy!r}")

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one request that are computed before its blocks behind a window can be dropped."""
        return self.max_num_batched_tokens * self.max_in_flight
