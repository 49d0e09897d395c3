"""The outputs that a user gets: vLLM's output classes, with the same fields where both have the
class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar


@dataclass(slots=True)
class Logprob:
    """logprob: natural log; rank: 1 = most likely; decoded_token: text of this id alone."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. finish_reason: "stop", "length", "abort" or "error"; None while it is
    running. stop_reason: the stop string or stop token id that ended it; None for end of sequence.
    logprobs: one {token_id: Logprob} per output token."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStats:
    """Times of one request, in seconds as `time.time()` gives them. vLLM calls this class
    RequestStateStats."""

    arrival_time: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        return self.first_token_ts - self.arrival_time if self.first_token_ts else 0.0


@dataclass(slots=True)
class RequestOutput:
    """The state of one request. prompt_logprobs: one entry per prompt token; the first entry is
    None. embedding: the float32 values that a PoolingParams asked for. embedding_shape: of these
    values; None = there are none."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStats | None = None
    lora_request: Any = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    embedding: bytes = b""
    embedding_shape: tuple[int, ...] | None = None

    def pooled(self) -> Any:
        """Return what a PoolingParams asked for: a float32 NumPy array [size], or [tokens, size] of
        a task of tokens. There is one unless `embedding_shape` is None."""
        import numpy as np

        assert self.embedding_shape is not None, "the request was not for a vector"
        return np.frombuffer(self.embedding, np.float32).reshape(self.embedding_shape).copy()


@dataclass(slots=True)
class PoolingOutput:
    """What the model makes of a prompt. data: a float32 NumPy array [size], or [tokens, size]."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """One number for each class of the model."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts belong together."""

    score: float


Pooled = TypeVar("Pooled")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """The result of `LLM.encode` for one prompt; of other methods in subclasses."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int] | None
    num_cached_tokens: int | None = None
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """The result of `LLM.embed` for one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """The result of `LLM.classify` for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The result of `LLM.score` for one pair."""


@dataclass(slots=True)
class MetricValue:
    """One time series of a metric. The name is vLLM's, without "_total"
    ("vllm:num_requests_running")."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(MetricValue):
    value: int


@dataclass(slots=True)
class Vector(MetricValue):
    """Counters for positions 0, 1, 2, … (vllm:spec_decode_num_accepted_tokens_per_pos)."""

    values: list[int]


@dataclass(slots=True)
class Gauge(MetricValue):
    value: float


@dataclass(slots=True)
class Histogram(MetricValue):
    """A histogram. buckets: upper limit as text → number of observations up to it; "+Inf" is last.
    count, sum: of all observations."""

    count: int
    sum: float
    buckets: dict[str, int]
