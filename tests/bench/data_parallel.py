"""Measures what several engines cost and gain on this machine.

    python tests/bench/data_parallel.py [--write]

A server with two engines of N / 2 threads is compared with a server of one engine with N threads,
in turns, with the default model and CLIENTS clients. Each number is the median of ROUNDS rounds.
--write puts the table on docs/scaling.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from machine import cpu
from page import put
from prometheus_client.parser import text_string_to_metric_families
from servers import Server

from pegboard.env import usable_cpus

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BEGIN = "<!-- data parallel: written by tests/bench/data_parallel.py --write -->"
END = "<!-- end of data parallel -->"
ROUNDS = 5
CLIENTS = 16
NUM_REQUESTS = 32
NUM_TOKENS = 64
WORKLOADS = {"prompts of 60 tokens": (0, 60), "1,000 common tokens and 60 others": (1000, 60)}
"""How many tokens all prompts of a round share, and how many follow."""


def prompts(shared: int, own: int, number: int) -> list[list[int]]:
    """The prompts of a round. No two rounds share tokens, so each begins without cached blocks."""
    common = [(7 * i + 13 * number) % 4000 + 5 for i in range(shared)]
    return [
        common + [(11 * i + 17 * request + 19 * number) % 4000 + 5 for i in range(own)]
        for request in range(NUM_REQUESTS)
    ]


async def rate(server: Server, requests: Sequence[list[int]]) -> float:
    """Return generated tokens per second of CLIENTS clients that share the requests."""
    waiting = iter(requests)
    async with httpx.AsyncClient(timeout=600) as http:

        async def client() -> None:
            for ids in waiting:
                body = {
                    "model": "bench",
                    "prompt": ids,
                    "max_tokens": NUM_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                url = f"http://127.0.0.1:{server.port}/v1/completions"
                (await http.post(url, json=body)).raise_for_status()

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return len(requests) * NUM_TOKENS / (time.perf_counter() - started)


def cached(server: Server) -> tuple[float, float]:
    """Return how many tokens of prompts were looked up in the prefix cache, and were found."""
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    sums = dict.fromkeys(("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    queries, hits = sums.values()
    return queries, hits


def report(num_threads: int) -> str:
    common = ["pegboard", "serve", "--served-model-name", "bench", "--max-model-len", "4096"]
    common += ["--kv-cache-memory-bytes", str(1 << 30), "--disable-access-log"]
    ways = {
        "1": ["--num-threads", str(num_threads)],
        "2": ["--data-parallel-size", "2", "--num-threads", str(max(1, num_threads // 2))],
    }
    servers = {way: Server([*common, *flags]) for way, flags in ways.items()}
    machine = cpu()
    lines = [
        f"Tokens per second of {CLIENTS} clients over HTTP, each with {NUM_TOKENS} tokens to a "
        f"request ({machine['cpu']}, {machine['flags']}; {num_threads} threads in all). "
        "In brackets: relative to one engine.",
        "",
        "| engines | workload | tokens/s | prompt tokens from the prefix cache |",
        "|---|---|---|---|",
    ]
    try:
        for name, (shared, own) in WORKLOADS.items():
            before = {way: cached(server) for way, server in servers.items()}
            rates: dict[str, list[float]] = {way: [] for way in servers}
            for number in range(ROUNDS):
                requests = prompts(shared, own, number + 100 * shared)
                for way, server in servers.items():
                    rates[way].append(asyncio.run(rate(server, requests)))
            for way, server in servers.items():
                queries, hits = (b - a for a, b in zip(before[way], cached(server), strict=True))
                median = statistics.median(rates[way])
                ratio = statistics.median(
                    two / one for one, two in zip(rates["1"], rates[way], strict=True)
                )
                shown = "" if way == "1" else f" ({ratio:.2f})"
                lines.append(f"| {way} | {name} | {median:,.0f}{shown} | {hits / queries:.0%} |")
    finally:
        for server in servers.values():
            server.stop()
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"to the page {PAGE.name}")
    chosen = parser.parse_args()
    text = report(len(usable_cpus()))
    print(text)
    if chosen.write:
        PAGE.write_text(put(PAGE.read_text("utf-8"), text, BEGIN, END), "utf-8")


if __name__ == "__main__":
    main()
