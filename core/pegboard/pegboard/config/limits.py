"""The limits of one engine: the resolved form of the settings. They are built once at start-up and
passed on as one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pegboard.errors import ConfigError

NO_LIMIT = 2**31 - 1
"""The value of a limit that was not set."""


AUTO_LEN = ("auto", -1)
"""The values of the setting max_model_len that mean: as long as the model allows and the memory can
hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resolved limits as plain numbers, in tokens unless the name says otherwise. No field is None
    or "auto"; `NO_LIMIT` means "no limit".

    max_model_len: maximum length of prompt plus output. max_num_batched_tokens: maximum number of
    tokens computed in one step. max_num_seqs: maximum number of running requests, which is also the
    number of rows. block_size: requested number of tokens per KV block. max_in_flight: how many
    steps are submitted before the engine waits for the oldest. max_num_queued_reqs: completions
    that may wait before new requests are refused. long_prefill_token_threshold: maximum number of
    tokens of one prompt in one step. max_num_partial_prefills: how many prompts may be computed in
    chunks at the same time; max_long_partial_prefills of them may be longer than the threshold.
    target_itl_s: the longest time, in seconds, that a step with decodes should take; prefill chunks
    are made small enough; 0 = no bound. max_drafts: maximum number of draft tokens per row and
    step. drafts_ahead: the workers keep drafts on the device, and propose as many as are promised
    when the step is scheduled. max_draft_rows: no drafts in steps with more rows. max_draft_len: no
    drafts after this length. stored_drafts: how many tokens after those of a step a draft model
    stores, if there are blocks for them. max_loras: number of adapters that can be loaded at the
    same time; 0 = LoRA off. max_cpu_loras: number of adapters that are kept in memory, at least
    max_loras. kv_metrics_share: fraction of the KV blocks whose residency is measured; 0 = none.
    num_stages: pipeline stages. If there are several, each request is in one step in flight at a
    time, unless it computes its prompt. in_lockstep: this engine takes every step together with
    others. max_num_encoder_input_tokens: how many rows of images, audio and video a step may
    encode; 0 = the model has only text. encoder_cache_size: how many of them the workers keep.
    disable_chunked_mm_input: no step computes only a part of such an item. whole: what no step
    computes only the first part of, because its tokens attend to those after them.

    Raises ConfigError, which names the setting, if a value is out of range.
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
    drafts_ahead: bool = False
    max_draft_rows: int = NO_LIMIT
    max_draft_len: int = NO_LIMIT
    stored_drafts: int = 0
    max_loras: int = 0
    max_cpu_loras: int = 0
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_metrics_share: float = 0.0
    num_stages: int = 1
    in_lockstep: bool = False
    max_num_encoder_input_tokens: int = 0
    encoder_cache_size: int = 4096
    disable_chunked_mm_input: bool = False
    whole: Literal["items", "prompt"] | None = None

    def __post_init__(self) -> None:
        positive = (
            "max_model_len",
            "vocab_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_in_flight",
            "max_num_queued_reqs",
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: a step could not hold one decoding token per "
                "row; raise the first or lower the second"
            )

    @property
    def chunk_tokens(self) -> int:
        """The largest number of tokens of one request that can be computed before the blocks
        outside its window are dropped."""
        return self.max_num_batched_tokens * self.max_in_flight
