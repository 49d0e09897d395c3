"""Puts a running server under load: sends each request at its time, and records when each part of
its answer arrives."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pegboard.errors import PegboardError
from pegboard_command_bench.bodies import Target, content_of
from pegboard_command_bench.datasets import BenchRequest
from pegboard_command_bench.http_stream import Answer, request


@dataclass
class Measured:
    """The measurement of one request. Times are in seconds. Without tokens, ttft is 0.0 and itl is
    empty. start_s is a time of perf_counter."""

    prompt_len: int
    start_s: float = 0.0
    success: bool = False
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_tokens: int = 0
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class Arrivals:
    """The times at which requests are sent. rate: requests per second; infinite = all at once.
    burstiness: the shape of the gamma distribution of the intervals (1 = Poisson, larger = more
    even). ramp: "linear" or "exponential" from `start` to `end` requests per second."""

    rate: float = float("inf")
    burstiness: float = 1.0
    ramp: str | None = None
    start: float = 0.0
    end: float = 0.0

    def times(self, count: int, rng: np.random.Generator) -> list[float]:
        """Returns the send times in ascending order, in seconds after the start."""
        rates = [self._rate(index / max(count, 1)) for index in range(count)]
        gaps = np.array(
            [
                0.0
                if rate == float("inf")
                else rng.gamma(self.burstiness, 1 / (rate * self.burstiness))
                for rate in rates
            ]
        )
        times = np.cumsum(gaps)
        if self.ramp is None and self.rate != float("inf") and times[-1] > 0:
            # so that the rate is met exactly over the whole run
            times *= count / self.rate / times[-1]
        return [float(value) for value in times]

    def _rate(self, progress: float) -> float:
        if self.ramp is None:
            return self.rate
        if self.ramp == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    arrivals: Arrivals,
    *,
    max_concurrency: int | None,
    seed: int,
    show: bool,
) -> tuple[list[Measured], float]:
    """Send all requests. Returns the measurements in the order of `requests`, and the total time in
    seconds."""
    from tqdm import tqdm

    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    times = arrivals.times(len(requests), np.random.default_rng(seed))
    started = time.perf_counter()
    with tqdm(total=len(requests), desc="Requests", file=sys.stderr, disable=not show) as bar:

        async def one(asked: BenchRequest, at_s: float) -> Measured:
            await asyncio.sleep(max(0.0, started + at_s - time.perf_counter()))
            if gate is not None:
                async with gate:
                    measured = await send(target, asked)
            else:
                measured = await send(target, asked)
            bar.update(1)
            return measured

        measured = await asyncio.gather(
            *(one(asked, at_s) for asked, at_s in zip(requests, times, strict=True))
        )
    return measured, time.perf_counter() - started


async def send(target: Target, asked: BenchRequest) -> Measured:
    """Send one request, streamed if it asks for text. An error is recorded in `Measured.error`."""
    kind, content = content_of(target, asked)
    measured = Measured(asked.prompt_len, time.perf_counter())
    headers = {"Content-Type": kind, **target.headers}
    try:
        async with request("POST", target.url, headers, content, verify=target.verify) as answer:
            if answer.status != 200:
                measured.error = (
                    f"{answer.status}: {(await answer.body()).decode('utf-8', 'replace')[:500]}"
                )
                return measured
            if target.pools:
                await _whole(measured, answer)
            else:
                await _follow(measured, _events(answer.lines()))
    except (OSError, PegboardError, ValueError, asyncio.IncompleteReadError) as error:
        measured.error = f"{type(error).__name__}: {error}"
    return measured


async def _whole(measured: Measured, answer: Answer) -> None:
    """Read an answer that has no tokens, and how many it counted in the request."""
    body = await answer.body()
    measured.latency = time.perf_counter() - measured.start_s
    measured.success = True
    if "json" in answer.headers.get("content-type", ""):
        usage = json.loads(body).get("usage") or {}
        measured.prompt_len = (
            usage.get("prompt_tokens") or usage.get("total_tokens") or measured.prompt_len
        )


async def _events(lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)


async def _follow(measured: Measured, events: AsyncIterator[dict[str, Any]]) -> None:
    last_s = measured.start_s
    num_events = 0
    async for event in events:
        now = time.perf_counter()
        if "error" in event:
            measured.error = str(event["error"])
            return
        if usage := event.get("usage"):
            measured.output_tokens = usage.get("completion_tokens") or 0
            measured.prompt_len = usage.get("prompt_tokens") or measured.prompt_len
        for choice in event.get("choices") or ():
            piece = _text_of(choice)
            if piece is None:
                continue
            num_events += 1
            if measured.ttft == 0.0:
                measured.ttft = now - measured.start_s
            else:
                measured.itl.append(now - last_s)
            last_s = now
            measured.text += piece
    measured.latency = last_s - measured.start_s
    measured.output_tokens = measured.output_tokens or num_events
    measured.success = num_events > 0
    if not measured.success:
        measured.error = "the answer had no tokens"


def _text_of(choice: Mapping[str, Any]) -> str | None:
    """Returns the text of an event that has tokens. Returns None for an event without tokens (only
    a role or a finish reason)."""
    if "text" in choice:
        return choice["text"] if choice["text"] or choice.get("finish_reason") is None else None
    delta = choice.get("delta") or {}
    pieces = [
        delta[name] for name in ("content", "reasoning", "reasoning_content") if delta.get(name)
    ]
    return "".join(pieces) if pieces else None


async def wait_until_ready(
    target: Target, asked: BenchRequest, patience_s: float, note: Callable[[str], None]
) -> None:
    """Send one request that must succeed. It is tried again for `patience_s` seconds. Raises
    PegboardError."""
    deadline = time.perf_counter() + patience_s
    while True:
        measured = await send(target, asked)
        if measured.success:
            return
        if time.perf_counter() >= deadline:
            raise PegboardError(f"{target.url} does not answer: {measured.error}")
        note(measured.error)
        await asyncio.sleep(1)
