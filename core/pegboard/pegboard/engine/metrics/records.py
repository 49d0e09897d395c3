"""Puts the completions of a request together again, when the last one has ended: one record per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pegboard.data.batch import Batch, StepTimes
from pegboard.data.request import Request
from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.metrics import RequestRecord


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """longest: output tokens of the longest completion."""

    record: RequestRecord
    longest: int


@dataclass(slots=True)
class _Open:
    """What is known of a request that has completions running."""

    reasons: list[str] = field(default_factory=list)
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    longest: int = 0
    forward_s: float = 0.0
    execute_s: float = 0.0

    def add(self, request: Request) -> None:
        """One completion has ended."""
        self.reasons.append(request.finish_reason or "abort")
        self.first_scheduled_s = _earlier(self.first_scheduled_s, request.first_scheduled_s)
        self.first_token_s = _earlier(self.first_token_s, request.first_token_s)
        self.last_token_s = max(self.last_token_s, request.last_token_s)
        self.num_generated_tokens += request.num_output_tokens
        self.longest = max(self.longest, request.num_output_tokens)
        if request.parent is None:
            self.num_cached_tokens = request.num_cached_tokens or 0


class RequestRecords:
    """Requests of which a completion has ended, or which took part in a step."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def step(self, batch: Batch, times: StepTimes, by_row: Sequence[Request | None]) -> None:
        """The result of a step is in and not applied yet; every request counts the step once, whatever its completions."""
        execute_s = times.total_s
        rows = (by_row[row] for row in batch.rows.tolist())
        names = {request.request_id for request in rows if request is not None and not request.is_finished}
        for name in names:
            entry = self._open.setdefault(name, _Open())
            entry.forward_s += times.forward_s
            entry.execute_s += execute_s

    def finished(self, request: Request, now_s: float) -> EndedRequest | None:
        """A completion has ended; the request's record if it was the last one."""
        params = request.params
        n = params.n if isinstance(params, SamplingParams) else 1
        entry = self._open.setdefault(request.request_id, _Open())
        entry.add(request)
        if len(entry.reasons) < n:
            return None
        del self._open[request.request_id]
        record = RequestRecord(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            first_scheduled_s=entry.first_scheduled_s,
            first_token_s=entry.first_token_s,
            last_token_s=entry.last_token_s,
            finished_s=now_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=entry.num_cached_tokens,
            num_generated_tokens=entry.num_generated_tokens,
            finish_reasons=tuple(entry.reasons),
            n=n,
            max_tokens=params.max_tokens if isinstance(params, SamplingParams) else None,
            temperature=params.temperature if isinstance(params, SamplingParams) else None,
            top_p=params.top_p if isinstance(params, SamplingParams) else None,
            lora_name=request.lora.name if request.lora is not None else None,
            forward_s=entry.forward_s,
            execute_s=entry.execute_s,
            trace_headers=request.trace_headers,
        )
        return EndedRequest(record, entry.longest)


def _earlier(first: float, second: float) -> float:
    """The smaller of two times of which 0.0 means never."""
    return min(filter(None, (first, second)), default=0.0)
