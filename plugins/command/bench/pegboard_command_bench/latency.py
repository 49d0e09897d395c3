"""`pegboard bench latency`: measures the time of one batch of equal requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import UsageError
from pegboard.interfaces.command import CommandSetup
from pegboard_command_bench.datasets import random_ids
from pegboard_command_bench.results import engine_parser, percentiles, write_json

if TYPE_CHECKING:
    from pegboard import LLM


def main(words: Sequence[str], setup: CommandSetup) -> int:
    """Measure and print the result. The prefix cache is off by default, because every iteration
    runs the same batch."""
    parser = engine_parser(
        setup, "latency", "Measure the time of one batch of equal requests, in seconds."
    )
    parser.add_argument(
        "--input-len", type="number", default=32, help="tokens of each prompt (default %(default)s)"
    )
    parser.add_argument(
        "--output-len",
        type="number",
        default=128,
        help="tokens of each output (default %(default)s)",
    )
    parser.add_argument(
        "--batch-size", type="number", default=8, help="requests (default %(default)s)"
    )
    parser.add_argument(
        "--n",
        type="number",
        default=1,
        help="completions, or beams, per request (default %(default)s)",
    )
    parser.add_argument("--use-beam-search", action="store_true", help="beam search with n beams")
    parser.add_argument(
        "--num-iters-warmup",
        type="number",
        default=10,
        help="batches before measuring (default %(default)s)",
    )
    parser.add_argument(
        "--num-iters", type="number", default=30, help="batches measured (default %(default)s)"
    )
    parser.add_argument(
        "--disable-detokenize", action="store_true", help="do not detokenize the outputs"
    )
    defaults = {"engine": {"enable_prefix_caching": False, "disable_log_stats": True}}
    settings, arguments = parser.parse_settings(words, defaults)
    if arguments.num_iters < 1:
        raise UsageError(f"--num-iters must be at least 1, got {arguments.num_iters}")

    from pegboard import LLM

    with LLM.from_settings(settings) as llm:
        latencies = measure(llm, arguments)
    result: dict[str, Any] = {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": percentiles(latencies),
    }
    print(f"Avg latency: {result['avg_latency']} seconds")
    for percentage, value in result["percentiles"].items():
        print(f"{percentage}% percentile latency: {value} seconds")
    if arguments.output_json:
        write_json(arguments.output_json, result)
    return 0


def measure(llm: "LLM", arguments: Any) -> list[float]:
    """Seconds of every measured batch."""
    from tqdm import tqdm

    from pegboard import BeamSearchParams, SamplingParams

    rng = np.random.default_rng(0)
    vocabulary = llm.llm_engine.plan.vocab_size
    prompts: list[Any] = [
        {"prompt_token_ids": random_ids(rng, arguments.input_len, vocabulary)}
        for _ in range(arguments.batch_size)
    ]
    length = arguments.output_len
    detokenize = not arguments.disable_detokenize
    params = SamplingParams(
        n=arguments.n, temperature=1.0, ignore_eos=True, max_tokens=length, detokenize=detokenize
    )
    beams = BeamSearchParams(beam_width=arguments.n, max_tokens=length, ignore_eos=True)

    def run() -> float:
        started = time.perf_counter()
        if arguments.use_beam_search:
            llm.beam_search(prompts, beams)
        else:
            llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    for _ in tqdm(
        range(arguments.num_iters_warmup),
        "Warm-up",
        file=sys.stderr,
        disable=arguments.disable_tqdm,
    ):
        run()
    bar = tqdm(
        range(arguments.num_iters), "Iterations", file=sys.stderr, disable=arguments.disable_tqdm
    )
    return [run() for _ in bar]
