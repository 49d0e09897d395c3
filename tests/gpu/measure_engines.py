"""The parts of `measure.py` that run the default model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from measure_run import Run


def tokens_equal_the_cpu(run: Run) -> dict[str, Any]:
    """The default model in float32 on the device and on the CPU, with and without recorded
    steps."""
    if run.tiny:
        return {"skipped": "too large for the interpreter"}
    from pegboard import LLM, SamplingParams

    def generate(**settings: Any) -> tuple[list[list[int]], float]:
        with LLM(dtype="float32", kv_cache_dtype="float32", max_model_len=512, **settings) as llm:
            started = time.perf_counter()
            params = SamplingParams(temperature=0, max_tokens=48)
            done = llm.generate(
                ["The capital of France is", "1, 1, 2, 3, 5,"] * 8, params, use_tqdm=False
            )
            return [
                list(output.outputs[0].token_ids) for output in done
            ], time.perf_counter() - started

    (expected, _) = generate(device="cpu")
    (eager, _) = generate(device=run.platform, enforce_eager=True)
    captured, seconds = generate(device=run.platform)
    equal = {
        name: sum(map(list.__eq__, rows, expected))
        for name, rows in (("eager", eager), ("captured", captured))
    }
    right = expected == eager == captured
    return {
        "right": right,
        "equal": equal,
        "rows": len(expected),
        "tokens_per_s": sum(map(len, captured)) / seconds,
    }


def bench_generate(run: Run, **settings: Any) -> dict[str, Any]:
    """The default model in its default type: seconds to start, output tokens per second of 1 to 256
    short prompts that run together, short prompts per second, one after another, with one token
    each, and input tokens per second of long prompts, first computed and then found in the prefix
    cache. Each rate is the best of three."""
    if run.tiny:
        return {"skipped": "too large for the interpreter"}
    from pegboard import LLM, SamplingParams

    started = time.perf_counter()
    with LLM(device=run.platform, max_model_len=2048, **settings) as llm:
        found: dict[str, Any] = {
            "start_s": round(time.perf_counter() - started, 2),
            "output_tokens_per_s": {},
        }

        def rate(prompts: list[Any], params: SamplingParams, tokens: int) -> float:
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return round(tokens / (time.perf_counter() - started), 1)

        greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
        sampled = SamplingParams(
            temperature=0.8, top_p=0.95, top_k=50, max_tokens=128, ignore_eos=True
        )
        for name, count, params in (
            (("1"), 1, greedy),
            (("8"), 8, greedy),
            (("32"), 32, greedy),
            (("256"), 256, greedy),
            (("256 sampled"), 256, sampled),
        ):
            prompts = [f"{index}. Write about the river and the town:" for index in range(count)]
            found["output_tokens_per_s"][name] = max(
                rate(prompts, params, 128 * count) for _ in range(3)
            )
            run.note(found)
        one = SamplingParams(temperature=0, max_tokens=1)

        def short() -> float:
            started = time.perf_counter()
            for _ in range(20):
                llm.generate([torch.randint(100, 40_000, (30,)).tolist()], one, use_tqdm=False)
            return round(20 / (time.perf_counter() - started), 1)

        found["prompts_per_s"] = max(short() for _ in range(3))
        rows = 32
        length = 1500
        computed = 0.0
        cached = 0.0
        for _ in range(3):
            prompts = [torch.randint(100, 40_000, (length,)).tolist() for _ in range(rows)]
            computed = max(computed, rate(prompts, one, rows * length))
            cached = max(cached, rate(prompts, one, rows * length))
        found["input_tokens_per_s"] = {"computed": computed, "cached": cached}
    return found


CHECKS: dict[str, Callable[[Run], dict[str, Any]]] = {"tokens_equal_the_cpu": tokens_equal_the_cpu}
BENCHES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "bench_generate": bench_generate,
    "bench_generate_eager": lambda run: bench_generate(run, enforce_eager=True),
    **{
        f"bench_generate_{mode}": lambda run, mode=mode: bench_generate(run, recording_mode=mode)
        for mode in ("full_decode_only", "full", "piecewise")
    },
}
