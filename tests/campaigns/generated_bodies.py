"""A campaign: sends generated requests to all routes of a server, and measures what other clients
notice of them.

    python tests/campaigns/generated_bodies.py --count 100000

`pegboard serve` runs with every installed API and a tiny model, with `--pooling` one that makes
vectors. Clients send the requests of tests/hostile/generated_requests.py and abandon some of them
at every point. A process of its own asks for `/health` every 50 ms. Right is: no status 500, no
connection closed without an answer, every answer within a time and a size, `/health` within half a
second, and as much memory at the end as after the warm-up. `--only N` sends request number N alone.
`--report FILE` gets every request that went wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import httpx
from damaged_checkpoints import CONFIG, write_healthy
from generated_requests import Generator, Request
from server_process import MODEL, Server, install_probe, processes

LIMIT_S = 30.0
"""How long an answer may take, however wrong or large the request is."""
LIMIT_BYTES = 16 * 1024 * 1024
HEALTH_S = 0.5
PROBE_EVERY_S = 0.05
GROWTH = 1.05
AT_ONCE = 12
"""Connections of one client process."""
FLAGS = (
    "--kv-cache-memory-bytes",
    str(16 << 20),
    "--dtype",
    "float32",
    "--tool-call-parser",
    "hermes",
    "--reasoning-parser",
    "qwen3",
    "--api.responses.max-stored",
    "64",
    "--plugins-enable",
    "api:admin",
    "api:tokenizer_info",
    "api:probe",
)
OK = frozenset({200, 307, 400, 404, 405, 408, 413, 431})


def write_model(directory: Path) -> Path:
    """Write a Llama of two layers that reads up to 1024 tokens."""
    write_healthy(directory)
    config = {**CONFIG, "max_position_embeddings": 1024, "rope_scaling": None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


# --- a client -------------------------------------------------------------------------------------


@dataclass
class Result:
    """What the clients saw. bad: (request, why)."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[Request, str]] = field(default_factory=list)
    slowest: list[tuple[float, int]] = field(default_factory=list)

    def took(self, seconds: float, number: int) -> None:
        self.slowest = sorted([*self.slowest, (round(seconds, 3), number)], reverse=True)[:5]


class Connection:
    """A connection that is kept while the server keeps it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: Request) -> tuple[int | None, bytes, str]:
        """Return the status, the body of the answer, and its media type. Without a status, the
        client left first. Raises ConnectionError, TimeoutError."""
        async with asyncio.timeout(LIMIT_S + 5):
            is_kept = self._writer is not None
            try:
                return await self._ask(request)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.close()
                if not is_kept:
                    raise
            return await self._ask(request)  # the server had closed the kept connection, as it may

    async def _ask(self, request: Request) -> tuple[int | None, bytes, str]:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=1 << 20
            )
        assert self._reader is not None
        head, body = request.encoded()
        left = {
            "in the head": head[: len(head) // 2],
            "in the body": head + body[: len(body) // 2],
        }.get(request.leave)
        self._writer.write(head + body if left is None else left)
        if request.leave:
            await self._leave(request)
            return None, b"", ""
        # the server may refuse a body before it has read it
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        status = 100
        headers = {}
        while status == 100:
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(lines[0].split()[1])
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:] if line)
            }
        data = b"" if request.method == "HEAD" else await self._body(headers)
        if headers.get("connection") == "close":
            self.close()
        return status, data, headers.get("content-type", "")

    async def _body(self, headers: dict[str, str]) -> bytes:
        assert self._reader is not None
        if headers.get("transfer-encoding") != "chunked":
            return await self._reader.readexactly(int(headers.get("content-length", "0")))
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readexactly(2)
        return b"".join(parts)

    async def _leave(self, request: Request) -> None:
        assert self._reader is not None and self._writer is not None
        with contextlib.suppress(ConnectionError, TimeoutError):
            if request.leave == "in the answer":
                async with asyncio.timeout(0.2):
                    await self._reader.read(100)
            elif len(request.body) > 100_000:
                await self._writer.drain()
        if request.resets:
            self._writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            self._writer.transport.abort()
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def why_wrong(status: int, data: bytes, media: str, request: Request) -> str:
    """Return what is wrong with an answer, or nothing."""
    if len(data) > LIMIT_BYTES:
        return f"an answer of {len(data)} bytes"
    if status == 503 or status not in OK:
        return f"status {status}: {data[:300]!r}"
    if status == 307 or request.method == "HEAD":
        return ""
    if status != 200:
        error = json.loads(data).get("error") if data else None
        return "" if error else f"status {status} without an error: {data[:300]!r}"
    if media.startswith("text/event-stream"):
        ends = (b"[DONE]\n\n", b'"type":"message_stop"}\n\n', b'"code":400}}\n\n')
        is_ended = (
            data.endswith(ends)
            or b"event: response." in data[-LIMIT_BYTES:]
            and b'"status":"' in data
        )
        if b'"code":500' in data or b"api_error" in data or b"server_error" in data or not is_ended:
            return f"a stream that ends with {data[-400:]!r}"
    elif media.startswith("application/json"):
        json.loads(data)
    return ""


async def send_all(
    port: int, generator: Generator, numbers: list[int], end: float = math.inf, told: Any = None
) -> Result:
    """Send requests over `AT_ONCE` connections, until the time `end`."""
    result = Result()
    left = iter(numbers)

    async def work() -> None:
        connection = Connection(port)
        for number in left:
            if time.time() > end:
                break
            request = generator.make(number)
            started = time.monotonic()
            try:
                status, data, media = await connection.ask(request)
                why = why_wrong(status, data, media, request) if status is not None else ""
            except (OSError, asyncio.IncompleteReadError, ValueError, TimeoutError) as error:
                status = None
                data = b""
                why = f"{type(error).__name__}: {error}"
                connection.close()
            took = time.monotonic() - started
            if took > LIMIT_S:
                why = why or f"took {took:.1f} s"
            result.took(took, number)
            result.kinds[request.kind] += 1
            result.statuses[str(status or (why and "no answer") or "left")] += 1
            if why:
                result.bad.append((request, why))
            if told is not None:
                told(request, status, data)
        connection.close()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return result


async def send_halves(port: int, count: int) -> list[float]:
    """Send `count` requests by half and wait. Returns after how many seconds the server closed each
    connection."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: server\r\n"
    halves = [
        b"",
        b"GET /hea",
        head,
        head + b'Content-Type: application/json\r\nContent-Length: 900\r\n\r\n{"prompt":',
    ]

    async def one(number: int) -> float:
        await asyncio.sleep(number / 1000)  # a thousand a second
        started = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(halves[number % len(halves)])
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()
        return time.monotonic() - started

    return await asyncio.gather(*(one(number) for number in range(count)))


# --- the prober -----------------------------------------------------------------------------------


def probe(port: int) -> None:
    """Ask for /health until SIGTERM, then print what it took. late: how much later than asked for
    this process itself woke up, which is the machine's part."""
    with contextlib.suppress(OSError):
        os.nice(-5)
    times: list[tuple[float, float]] = []
    late = 0.0
    statuses = Counter[int]()
    is_over = False

    def stop(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGTERM, stop)
    due = time.monotonic()
    with httpx.Client(timeout=60) as http:
        print("ready", flush=True)
        while not is_over:
            wait = max(0.0, due - time.monotonic())
            before = time.monotonic()
            time.sleep(wait)
            started = time.monotonic()
            late = max(late, started - before - wait)
            statuses[http.get(f"http://127.0.0.1:{port}/health").status_code] += 1
            times.append((time.monotonic() - started, time.time()))
            due = max(due + PROBE_EVERY_S, started)
    ordered = sorted(took for took, _ in times)
    slowest = [
        (round(took, 3), time.strftime("%H:%M:%S", time.localtime(at)))
        for took, at in sorted(times, reverse=True)[:5]
    ]
    told = {
        "asked": len(times),
        "median_s": ordered[len(ordered) // 2],
        "p99_s": ordered[len(ordered) * 99 // 100],
        "slowest": slowest,
        "prober_late_s": late,
        "statuses": statuses,
    }
    print(json.dumps(told), flush=True)


@contextlib.contextmanager
def prober(port: int, found: dict[str, Any]) -> Iterator[None]:
    """Ask for /health while the block runs; then fill `found`."""
    running = subprocess.Popen(
        [sys.executable, __file__, "--probe", str(port)], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    try:
        yield
    finally:
        running.terminate()
        found.update(json.loads(running.communicate(timeout=90)[0] or "{}"))


# --- the server's memory --------------------------------------------------------------------------


def memory_of(server: Server) -> dict[str, int]:
    """Return the resident bytes of each process of the server, by what it runs."""
    found: Counter[str] = Counter()
    for pid, _, group in processes():
        if group == server.process.pid:
            with contextlib.suppress(OSError):  # the process ended in the meantime
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                names = [
                    word.decode()
                    for word in words[1:]
                    if b"." in word and b"/" not in word and b" " not in word
                ]
                name = names[0] if names else "other"
                found[name] += (
                    int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
                )
    return dict(found)


def memory_at_rest(server: Server) -> dict[str, int]:
    """Return the memory when no request runs and freed memory has been given back."""
    server.wait_until_idle()
    time.sleep(4)
    return memory_of(server)


# --- the campaign ---------------------------------------------------------------------------------


@dataclass
class Campaign:
    """All figures of a campaign."""

    result: Result = field(default_factory=Result)
    health: dict[str, Any] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    seconds: float = 0.0

    def growth(self) -> float:
        return sum(self.after.values()) / sum(self.before.values())


@contextlib.contextmanager
def served(folder: Path, *, pools: bool = False) -> Iterator[Server]:
    model = write_model(folder / "model")
    flags = (*FLAGS, "--runner", "pooling") if pools else FLAGS
    with Server(model, folder, *flags, probe=install_probe(folder / "probe")) as server:
        yield server.wait_until_ready()


def generator_for(port: int, seed: int) -> Generator:
    """Return the generator of what a server can do."""
    address = f"http://127.0.0.1:{port}"
    description = httpx.get(f"{address}/openapi.json").json()
    probed = httpx.post(f"{address}/v1/embeddings", json={"input": "the"})
    return Generator(seed, MODEL, description, pools=probed.status_code == 200)


def run(
    server: Server,
    count: int,
    *,
    seed: int = 0,
    warm_up: int = 0,
    num_clients: int = 1,
    seconds: float = math.inf,
) -> Campaign:
    """Send `warm_up` requests, then `count`, or as many as are answered within `seconds`, from
    processes of their own."""
    campaign = Campaign()
    if warm_up:
        send_from_processes(server, range(count, count + warm_up), seed, num_clients)
    campaign.before = memory_at_rest(server)
    started = time.monotonic()
    with prober(server.port, campaign.health):
        campaign.result = send_from_processes(
            server, range(count), seed, num_clients, campaign, seconds
        )
    campaign.seconds = time.monotonic() - started
    campaign.after = memory_at_rest(server)
    return campaign


def send_from_processes(
    server: Server,
    numbers: range,
    seed: int,
    num_clients: int,
    campaign: Campaign | None = None,
    seconds: float = math.inf,
) -> Result:
    end = str(time.time() + seconds)
    words = [sys.executable, __file__, "--client", str(server.port), str(seed), str(num_clients)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(num_clients)]
        clients = [
            subprocess.Popen(
                [*words, str(numbers.start + index), str(numbers.stop), str(file), end]
            )
            for index, file in enumerate(files)
        ]
        while any(client.poll() is None for client in clients):
            if campaign is not None:
                campaign.peak = max(campaign.peak, sum(memory_of(server).values()))
            time.sleep(0.5)
        result = Result()
        for file in files:
            told = json.loads(file.read_text())
            result.statuses.update(told["statuses"])
            result.kinds.update(told["kinds"])
            for took, number in told["slowest"]:
                result.took(took, number)
            for request, why in told["bad"]:
                result.bad.append(
                    (Request(**{**request, "body": base64.b64decode(request["body"])}), why)
                )
        return result


def client(words: list[str]) -> None:
    """Send every `step`th request from `first` to `last`, and write the result to a file."""
    port, seed, step, first, last = map(int, words[:5])
    numbers = list(range(first, last, step))
    result = asyncio.run(send_all(port, generator_for(port, seed), numbers, float(words[6])))
    bad = [
        ({**asdict(request), "body": base64.b64encode(request.body).decode()}, why)
        for request, why in result.bad
    ]
    told = {
        "statuses": result.statuses,
        "kinds": result.kinds,
        "slowest": result.slowest,
        "bad": bad,
    }
    Path(words[5]).write_text(json.dumps(told))


def report(campaign: Campaign) -> dict[str, Any]:
    result = campaign.result
    mib = 1 << 20
    return {
        "requests": sum(result.statuses.values()),
        "seconds": round(campaign.seconds),
        "statuses": dict(sorted(result.statuses.items())),
        "kinds": result.kinds,
        "slowest_answers": result.slowest,
        "wrong": len(result.bad),
        "health": campaign.health,
        "memory_mib": {
            name: [size // mib, campaign.after.get(name, 0) // mib]
            for name, size in campaign.before.items()
        },
        "growth": round(campaign.growth(), 4),
        "peak_mib": campaign.peak // mib,
    }


def main() -> int:
    if sys.argv[1:2] == ["--probe"]:
        probe(int(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["--client"]:
        client(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=50_000,
        help="requests before the memory is measured the first time",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop earlier, after this time"
    )
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument(
        "--report",
        type=Path,
        help="file for the requests that went wrong, one JSON object per line",
    )
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        help="send these requests, one after the other, and show the answers",
    )
    parser.add_argument(
        "--half-sent", type=int, metavar="N", help="instead: send N requests by half, all at once"
    )
    parser.add_argument("--log", type=Path, help="file that the server's log is copied to")
    parser.add_argument("--pooling", action="store_true", help="serve a model that makes vectors")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), pools=arguments.pooling) as server,
    ):
        try:
            if arguments.only:
                show(server, arguments)
                return 0
            if arguments.half_sent:
                show_halves(server, arguments.half_sent)
                return 0
            campaign = run(
                server,
                arguments.count,
                seed=arguments.seed,
                warm_up=arguments.warm_up,
                num_clients=arguments.clients,
                seconds=60 * arguments.minutes,
            )
        finally:
            if arguments.log:
                arguments.log.write_bytes(server.log.read_bytes())
    print(json.dumps(report(campaign), indent=1))
    lines = [
        {**asdict(request), "body": base64.b64encode(request.body).decode(), "why": why}
        for request, why in campaign.result.bad
    ]
    if arguments.report:
        arguments.report.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for request, why in campaign.result.bad[:20]:
        print(
            f"request {request.number} ({request.kind}): {request.method} {request.path} "
            f"{request.body[:300]!r}: {why}"
        )
    is_fast = campaign.health["slowest"][0][0] < HEALTH_S
    return 0 if not lines and is_fast and campaign.growth() < GROWTH else 1


def show_halves(server: Server, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 500), hard))
    before = memory_of(server)
    health = dict[str, Any]()
    with prober(server.port, health):
        times = asyncio.run(send_halves(server.port, count))
    told = {
        "half_sent": count,
        "closed_after_s": [round(min(times), 1), round(max(times), 1)],
        "health": health,
    }
    told["memory_mib"] = [sum(before.values()) >> 20, sum(memory_at_rest(server).values()) >> 20]
    print(json.dumps(told, indent=1))


def show(server: Server, arguments: argparse.Namespace) -> None:
    generator = generator_for(server.port, arguments.seed)
    for number in arguments.only:

        def told(request: Request, status: int | None, data: bytes) -> None:
            print(
                f"{request.number} {request.method} {request.path} {request.headers} "
                f"{request.leave}\n{request.body[:3000]!r}"
            )
            print(f"→ {status} {data[:3000]!r}")

        result = asyncio.run(send_all(server.port, generator, [number], told))
        print(result.bad and result.bad[0][1], result.slowest, flush=True)


if __name__ == "__main__":
    sys.exit(main())
