"""The class from which vLLM's stat loggers derive (`vllm.v1.metrics.loggers`), and what they are
given (`vllm.v1.metrics.stats`). Only fields that Pegboard measures are there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class StatLogger(ABC):
    """Takes measurements."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take what was measured since the last call."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """Called once, when the engine is ready."""

    def log(self) -> None:
        """Called every ten seconds."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Called when the engine falls asleep or wakes up."""


StatLoggerFactory = Callable[..., StatLogger]
"""(vllm_config, engine_index) → a stat logger."""


class _Measured:
    """Says of a field of vLLM's that it is not measured."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"Pegboard does not measure {type(self).__name__}.{name}; docs/vllm_scripts.md lists "
            "what it measures"
        )


@dataclass
class PrefixCacheStats(_Measured):
    """Tokens that were looked up and found."""

    queries: int = 0
    hits: int = 0


@dataclass
class MultiModalCacheStats(_Measured):
    """Images, audio and videos that were looked up and found."""

    queries: int = 0
    hits: int = 0


@dataclass
class SpecDecodingStats(_Measured):
    """What became of drafts. num_accepted_tokens_per_pos: by position in the draft."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass
class SchedulerStats(_Measured):
    """The state of an engine. kv_cache_usage: 0 to 1. spec_decoding_stats: None without drafts."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    spec_decoding_stats: SpecDecodingStats | None = None


@dataclass
class FinishedRequestStats(_Measured):
    """A request that has ended, with all its completions. Times are in seconds.

    is_corrupted: always False, as in vLLM without VLLM_COMPUTE_NANS_IN_LOGITS.
    """

    request_id: str
    finish_reason: str
    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    max_tokens_param: int | None
    queued_time: float
    prefill_time: float
    inference_time: float
    decode_time: float
    mean_time_per_output_token: float
    is_corrupted: bool = False


@dataclass
class PromptTokenStats(_Measured):
    """Where prompt tokens came from."""

    computed: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    total: int = 0


@dataclass
class IterationStats(_Measured):
    """What happened since the last record. iteration_timestamp: seconds, as `time.time()` has
    them. num_corrupted_reqs: see `FinishedRequestStats.is_corrupted`."""

    iteration_timestamp: float
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preempted_reqs: int = 0
    num_corrupted_reqs: int = 0
    prompt_token_stats: PromptTokenStats = field(default_factory=PromptTokenStats)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
