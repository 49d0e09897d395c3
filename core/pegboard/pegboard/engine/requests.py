"""The engine's state of one completion of a request, and when a completion ends. It knows nothing
about scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from pegboard.data.media import MediaItem
from pegboard.data.pooling_params import PoolingParams
from pegboard.data.prompt_embeds import PromptEmbeds
from pegboard.data.request import EngineRequest, LoRARequest, RequestDelta
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.whole_spans import Span, whole_spans
from pegboard.interfaces.scheduling_policy import RequestStatus

LOAD_FAILED = (
    "a KV connector could not load the request's prefix, and kv_load_failure_policy is 'fail'"
)

BAD_TOKENS = (
    "the sampler returned {}, which are not token ids; -1 means that the model's logits are not "
    "numbers (NaN)"
)

BAD_VECTOR = "the last token's hidden state has values that are not finite (NaN or infinity)"


class HashSpan(NamedTuple):
    """The hashes of the blocks with the tokens start … stop depend on this key, too."""

    start: int
    stop: int
    key: tuple[str | int, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Only the scheduler and the KV cache change it. Plugins see it as `RequestView`.

    num_computed_tokens: tokens whose KV is written, or will be when the steps in flight are done.
    num_in_flight_tokens: how many of those are scheduled but not yet confirmed. They are in
    num_in_flight_steps steps. num_loading_tokens: how many of those a KV connector loads within the
    first of these steps. block_hashes: the chain of hashes, one per KVPlan.hash_block_size
    confirmed tokens. hash_spans: the other keys of these hashes, in order; None = no block was
    hashed yet. whole: see `whole_spans`.
    parent: the completion whose prompt this one will share, as long as it waits for that.
    num_waiting_children of the parent counts such completions. num_drafts: how many drafts it has
    after its last step in flight, with `Limits.drafts_ahead`. num_external_tokens: how many of
    num_cached_tokens KV connectors load, without those whose load has failed. uses_connectors:
    becomes False when a KV load has failed; the prefix is then computed here. key: the unique name
    in the engine,
    "<request_id>" for n = 1 and "<index>_<request_id>" otherwise.
    """

    index: int
    parent: "Request | None"
    request_id: str
    params: SamplingParams
    prompt_token_ids: list[int]
    priority: int
    arrival_s: float
    cache_salt: str | None
    lora: LoRARequest | None
    kv_transfer_params: dict[str, Any] | None
    trace_headers: dict[str, str] | None
    client: str
    prompt_embeds: tuple[PromptEmbeds, ...] = ()
    token_inputs: dict[str, list[int]] = field(default_factory=dict)
    pooling: PoolingParams | None = None
    media: tuple[MediaItem, ...] = ()
    whole: tuple[Span, ...] = ()
    key: str = ""
    seed: int | None = None
    stop_token_ids: set[int] = field(default_factory=set)
    all_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    row: int | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_external_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_in_flight_steps: int = 0
    num_loading_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    hash_spans: list[HashSpan] | None = None
    draft_token_ids: list[int] = field(default_factory=list)
    num_drafts: int = 0
    grammar: Any = None
    num_waiting_children: int = 0
    uses_connectors: bool = True
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @classmethod
    def of(
        cls, source: EngineRequest, *, index: int = 0, parent: "Request | None" = None
    ) -> "Request":
        """Create completion `index` of a request. The first completion is the parent of the
        others."""
        request = cls(index=index, parent=parent, **msgspec.structs.asdict(source))
        params = source.params
        request.key = f"{index}_{source.request_id}" if params.n > 1 else source.request_id
        request.all_token_ids = list(source.prompt_token_ids)
        request.seed = None if params.seed is None else params.seed + index
        request.stop_token_ids = params.all_stop_token_ids
        return request

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens and confirmed output tokens."""
        return len(self.all_token_ids)

    @property
    def num_confirmed_tokens(self) -> int:
        """The number of tokens whose KV no step in flight can still change."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.key!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens)"
        )

    # --- its end ----------------------------------------------------------------------------------

    def output_room(self, max_model_len: int) -> int:
        """Return how many tokens can still be sampled before max_tokens or max_model_len ends the
        completion."""
        room = max_model_len - len(self.all_token_ids)
        most = self.params.max_tokens
        if most is None:
            return room
        left = most - len(self.output_token_ids)
        return left if left < room else room  # called for each row and step, so min is slow

    def leave_parent(self) -> None:
        """The completion no longer waits for its parent's prompt blocks."""
        if self.parent is not None:
            self.parent.num_waiting_children -= 1
            self.parent = None

    def not_loaded(self, first_bad_token: int = 0) -> None:
        """Compute the rest here: ask no connector again, and stop counting the external tokens from
        this one on as cached."""
        self.uses_connectors = False
        num_cached = self.num_cached_tokens or 0
        num_lost = min(max(0, num_cached - first_bad_token), self.num_external_tokens)
        self.num_external_tokens -= num_lost
        self.num_cached_tokens = num_cached - num_lost

    def failed(self, error: str | None, parameter: str | None = None) -> RequestDelta:
        """Return the last delta of a request without a result. parameter: the field that is
        wrong."""
        return RequestDelta(
            request_id=self.request_id, index=self.index, error=error, error_parameter=parameter
        )

    def embedded(self, vector: np.ndarray) -> tuple[RequestDelta, str]:
        """Return the last delta of a pooling request, and its finish reason. vector: float32
        [size], or [tokens, size]. One with values that are not finite is an error."""
        delta = RequestDelta(request_id=self.request_id, num_cached_tokens=self.num_cached_tokens)
        if not np.isfinite(vector).all():
            delta.error = BAD_VECTOR
            return delta, "error"
        delta.embedding = vector.tobytes()
        delta.embedding_shape = vector.shape
        return delta, "stop"

    def append_until_stop(
        self, token_ids: list[int], max_model_len: int
    ) -> tuple[list[int], str | None]:
        """Append tokens one at a time. The first one that ends the completion is the last one that
        is kept. Return the kept tokens and the finish reason ("stop", "length" or None), and set
        `stop_reason`.

        The order of the checks and the reasons are vLLM's. End of sequence and stop tokens have an
        effect only once there are `min_tokens` outputs. For a stop token, stop_reason is its id;
        for end of sequence it stays None. Stop strings are found in A, where the text is.
        """
        params = self.params
        for count, token in enumerate(token_ids, 1):
            self.output_token_ids.append(token)
            self.all_token_ids.append(token)
            if token in self.stop_token_ids and len(self.output_token_ids) >= params.min_tokens:
                is_eos = token in params.eos_token_ids and not params.ignore_eos
                self.stop_reason = None if is_eos else token
                return token_ids[:count], "stop"
            if self.output_room(max_model_len) <= 0:
                return token_ids[:count], "length"
        return token_ids, None


def completions_of(
    source: EngineRequest, whole: Literal["items", "prompt"] | None = None
) -> Iterator[Request]:
    """Create the n completions of a request. The first one is the parent, whose prompt blocks the
    others share. whole: see `Limits`."""
    parent = Request.of(source)
    parent.whole = tuple(whole_spans(source, whole))
    yield parent
    params = source.params
    for index in range(1, params.n):
        child = Request.of(source, index=index, parent=parent)
        child.whole = parent.whole
        if params.prompt_logprobs is not None:  # the parent reports them for all completions
            child.params = params.clone(prompt_logprobs=None, skip_reading_prefix_cache=None)
        yield child
