"""The limits of one engine: the resolved form of the settings. Built once at start-up, then passed on whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pegboard.errors import ConfigError

NO_LIMIT = 2**31 - 1
"""The value of a limit that was not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Plain numbers, in tokens unless the name says otherwise. Nothing here is None or "auto"; `NO_LIMIT` says "no limit".

    max_model_len: longest prompt plus output. max_num_batched_tokens: most tokens computed in one step. max_num_seqs: most
    running requests, which is the number of rows. block_size: wanted tokens per KV block. max_in_flight: steps submitted before
    the oldest is awaited. max_num_queued_reqs: completions that may wait before new requests are refused.
    long_prefill_token_threshold: most tokens of one prompt in one step. max_num_partial_prefills: most prompts computed in parts
    at once, of which max_long_partial_prefills may be longer than the threshold. target_itl_s: how long a step with decodes
    should last at most, in seconds; prefill chunks are cut to fit; 0 = no bound. max_drafts: most draft tokens per row and step.
    max_loras: adapters resident at once, 0 = LoRA off. kv_metrics_share: share of the KV blocks whose stay is measured, 0 = none.

    Raises ConfigError, naming the setting.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_in_flight: int = 1
    max_num_queued_reqs: int = NO_LIMIT
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = NO_LIMIT
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    target_itl_s: float = 0.0
    enable_prefix_caching: bool = True
    hash_algo: str = "sha256"
    max_drafts: int = 0
    max_loras: int = 0
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_metrics_share: float = 0.0

    def __post_init__(self) -> None:
        positive = ("max_model_len", "vocab_size", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_in_flight",
                    "max_num_queued_reqs", "long_prefill_token_threshold", "max_num_partial_prefills",
                    "max_long_partial_prefills")  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "one decoding token per row would not fit a step; raise the first or lower the second"
            )

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one request that are computed before blocks that its window has left can be dropped."""
        return self.max_num_batched_tokens * self.max_in_flight
