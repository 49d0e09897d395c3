"""The main loop of a side's process: reads jobs, times them and prints results. Runs under the
peer's own Python, so it uses only the standard library."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Job = Callable[[dict[str, Any]], dict[str, Any]]
Generate = Callable[[list[list[int]], list[int]], None]
Stream = Callable[[list[int], int], list[float]]


def serve(generate: Generate, stream: Stream, others: dict[str, Job] | None = None) -> None:
    """Serve jobs. generate(prompts, max_tokens) completes all prompts. stream(prompt, max_tokens)
    completes one prompt and returns the perf_counter times at which output tokens arrived. others:
    further jobs by name."""
    stream(list(range(1000, 1008)), 1)
    _say({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        if job["job"] == "generate":
            started = time.perf_counter()
            generate(job["prompts"], job["max_tokens"])
            _say({"seconds": time.perf_counter() - started})
        elif job["job"] == "stream":
            started = time.perf_counter()
            times = stream(job["prompts"][0], job["max_tokens"][0])
            gaps = sorted(later - earlier for earlier, later in zip(times, times[1:], strict=False))
            _say(
                {
                    "ttft_ms": 1e3 * (times[0] - started),
                    "tokens_per_s": (len(times) - 1) / (times[-1] - times[0]),
                    "median_itl_ms": 1e3 * gaps[len(gaps) // 2],
                }
            )
        else:
            _say((others or {})[job["job"]](job))


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
