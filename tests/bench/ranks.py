"""Measures what dividing a model costs and gains on this machine.

    python tests/bench/ranks.py [--write]

One rank with N threads is compared with two ranks of N / 2 threads, the executor `mp` with `uni`,
and whole experts on each rank with a share of every expert, in turns. Each number is the median of
ROUNDS rounds. Then the exchange of tensors between two processes. --write puts the tables on
docs/scaling.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from machine import cpu
from page import put
from random_checkpoints import write

from pegboard import LLM, SamplingParams
from pegboard.env import usable_cpus
from pegboard.interfaces.collective import CollectiveSetup
from pegboard.plugins.importing import import_object

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BEGIN = "<!-- ranks: written by tests/bench/ranks.py --write -->"
END = "<!-- end of ranks -->"
ROUNDS = 5
BATCHES = (1, 8, 32)
NUM_TOKENS = 64
PROMPT = 2000
"""Tokens of the prompt whose rate is measured."""
EXCHANGES = ((1, 576), (32, 576), (512, 576), (512, 4096))
COLLECTIVES = {
    "shared_memory": "pegboard_kernel_cpu.collective:SharedMemoryCollective",
    "gloo": "pegboard_collective_torch.collective:TorchCollective",
}


def rates(llm: LLM, number: int) -> list[float]:
    """Return tokens per second of decode by batch size, and of a prompt."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    numbers = []
    for count in BATCHES:
        prompts = [{"prompt_token_ids": [5 + i, 6, 7, 8]} for i in range(count)]
        numbers.append(count * NUM_TOKENS / seconds(llm, prompts, params))
    ids = [(7 * i + 13 * number) % 4000 + 5 for i in range(PROMPT)]
    one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    return [*numbers, PROMPT / seconds(llm, [{"prompt_token_ids": ids}], one)]


def seconds(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> float:
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


def compare(
    model: str | None, num_threads: int, ways: Sequence[dict[str, Any]]
) -> list[list[float]]:
    """Return the rates of each way to run a model. ways: settings."""
    common = {
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 29,
        "max_model_len": 4096,
        "num_threads": num_threads,
    }
    if model is not None:
        common |= {"model": model, "skip_tokenizer_init": True, "generation_config": "vllm"}
    llms = [LLM(**{**common, **way}) for way in ways]
    measured: list[list[list[float]]] = [[] for _ in llms]
    for number in range(ROUNDS + 1):
        for numbers, llm in zip(measured, llms, strict=True):
            numbers.append(rates(llm, number))
    for llm in llms:
        llm.shutdown()
    return [[statistics.median(each) for each in zip(*n[1:], strict=True)] for n in measured]


def exchange(name: str, rank: int, address: str) -> list[float]:
    """Return the microseconds of all_reduce on one of two ranks, by shape."""
    torch.set_num_threads(1)
    setup = CollectiveSetup("tensor", (0, 1), rank, address, "cpu", 60.0)
    collective = import_object(COLLECTIVES[name])(None, setup)
    medians = []
    for shape in EXCHANGES:
        x = torch.ones(shape)
        times = []
        for _ in range(300 if shape[0] < 512 else 60):
            x.fill_(1.0)
            started = time.perf_counter()
            collective.all_reduce(x)
            times.append(time.perf_counter() - started)
        medians.append(statistics.median(times[20:]) * 1e6)
    return medians


def exchanges(folder: Path) -> list[str]:
    """Return the lines of a table of exchanges between two processes."""
    shapes = " | ".join(f"{rows} × {columns}" for rows, columns in EXCHANGES)
    lines = [f"| all_reduce over 2 ranks, µs | {shapes} |", "|---|" + "---|" * len(EXCHANGES)]
    with get_context("spawn").Pool(2) as ranks:
        for name in COLLECTIVES:
            address = (folder / name).as_uri()
            calls = [(name, rank, address) for rank in range(2)]
            medians = ranks.starmap(exchange, calls, chunksize=1)[0]
            lines.append(f"| `{name}` | {' | '.join(f'{median:,.0f}' for median in medians)} |")
    return lines


def report(num_threads: int, folder: Path) -> str:
    machine = cpu()
    batches = " | ".join(f"batch {count}" for count in BATCHES)
    lines = [
        f"Tokens per second ({machine['cpu']}, {machine['flags']}; {num_threads} threads in all). "
        "In brackets: relative to one rank in the engine's process.",
        "",
        f"| model | ranks | {batches} | prompt of {PROMPT:,} |",
        "|---|---|" + "---|" * (len(BATCHES) + 1),
    ]
    checkpoint = folder / "qwen3"
    write("qwen3", "bfloat16", checkpoint)
    mixture = folder / "mixture"
    write("qwen3_moe", "bfloat16", mixture)
    two: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": max(1, num_threads // 2)}
    staged: dict[str, Any] = {**two, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    shared: dict[str, Any] = {**two, "tensor_parallel_size": 1, "prefill_context_parallel_size": 2}
    apart = {"distributed_executor_backend": "mp"}
    ways = {
        "1": {},
        "1, executor `mp`": apart,
        "2": two,
        "2 pipeline stages": staged,
        "2, shared-out rows": shared,
    }
    of_experts = {"1": {}, "2": two, "2, whole experts": {**two, "enable_expert_parallel": True}}
    for name, model, chosen in (
        ("SmolLM2-135M, Q4_1", None, ways),
        ("Qwen3 of 12 layers, bfloat16", str(checkpoint), ways),
        ("Qwen3-MoE of 32 experts, bfloat16", str(mixture), of_experts),
    ):
        lines += rows(name, model, num_threads, chosen)
    return "\n".join([*lines, "", *exchanges(folder)])


def rows(
    name: str, model: str | None, num_threads: int, ways: dict[str, dict[str, Any]]
) -> list[str]:
    """Return the lines of a model. ways: settings by name, the first of which is the base."""
    base, *others = compare(model, num_threads, list(ways.values()))
    first, *names = ways
    more = [row("", way, rates, base) for way, rates in zip(names, others, strict=True)]
    return [row(name, first, base), *more]


def row(name: str, way: str, numbers: list[float], base: list[float] | None = None) -> str:
    cells = [f"{number:,.0f}" for number in numbers]
    if base is not None:
        cells = [f"{c} ({n / b:.2f})" for c, n, b in zip(cells, numbers, base, strict=True)]
    return f"| {name} | {way} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"to the page {PAGE.name}")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = report(len(usable_cpus()), Path(folder))
    print(text)
    if chosen.write:
        PAGE.write_text(put(PAGE.read_text("utf-8"), text, BEGIN, END), "utf-8")


if __name__ == "__main__":
    main()
