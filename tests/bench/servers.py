"""Servers as a user starts them: the time until they answer, their streams to several clients at
once, and the memory that they take."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from side import process_tree
from workload import Workload

PATIENCE_S = 600
SAMPLE_EVERY_S = 0.5


class ServerFailed(Exception):
    """A server ended or never answered; the message contains the end of its log."""


class Server:
    """One server process. health_s: seconds from its start to the first HTTP answer on /health,
    whatever its status. first_token_s: seconds to the first streamed token. `--port` and a free
    port are appended to the command."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - read on failure
        started = time.perf_counter()
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **(environment or {})},
        )
        try:
            self.health_s = self._wait("GET", "/health", None, started)
            body = {
                "model": "bench",
                "prompt": [1500, 1600],
                "max_tokens": 1,
                "temperature": 0,
                "stream": True,
            }
            self.first_token_s = self._wait("POST", "/v1/completions", json.dumps(body), started)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def load(self, workload: Workload, concurrency: int) -> dict[str, float]:
        """Stream all requests from `concurrency` clients. Each client sends its next request when
        the previous one is answered."""
        started = time.perf_counter()
        answers = asyncio.run(self._load(workload, concurrency))
        seconds = time.perf_counter() - started
        gaps = [
            later - earlier
            for _, times in answers
            for earlier, later in zip(times, times[1:], strict=False)
        ]
        firsts = [times[0] - sent for sent, times in answers]
        return {
            "tokens_per_s": workload.num_output_tokens / seconds,
            **{f"itl_ms_p{p}": 1e3 * _percentile(gaps, p) for p in (50, 90, 99)},
            **{f"ttft_ms_p{p}": 1e3 * _percentile(firsts, p) for p in (50, 90, 99)},
        }

    async def _load(self, workload: Workload, concurrency: int) -> list[tuple[float, list[float]]]:
        todo = list(zip(workload.prompts, workload.max_tokens, strict=True))[::-1]
        answers: list[tuple[float, list[float]]] = []

        async def client() -> None:
            while todo:
                prompt, max_tokens = todo.pop()
                body = {
                    "prompt": prompt,
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                }
                sent = time.perf_counter()
                answers.append(
                    (sent, await self._stream(json.dumps({"model": "bench", **body}).encode()))
                )

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return answers

    async def _stream(self, body: bytes) -> list[float]:
        """Stream one request. Returns the times at which its pieces of text arrived."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: "
            f"close\r\nContent-Length: {len(body)}\r\n"
        )
        times: list[float] = []
        try:
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            status = (await reader.readline()).split()[1:2]
            while line := await reader.readline():
                if line.startswith(b"data: {") and b'"choices":[]' not in line:
                    times.append(time.perf_counter())
        finally:
            writer.close()
        if status != [b"200"] or len(times) < 2:
            raise ServerFailed(
                f"a request was answered with status {status} and {len(times)} pieces{self._tail()}"
            )
        return times

    def _wait(self, method: str, path: str, body: str | None, started: float) -> float:
        """Wait until the server answers. Returns the seconds since `started` until the first
        answer: with any status, or with a token if the request has a body."""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                if body is None or (
                    answer.status == 200 and answer.readline().startswith(b"data: {")
                ):
                    return time.perf_counter() - started
            except (OSError, http.client.HTTPException):
                pass  # the server does not listen yet, or does not answer with HTTP yet
            finally:
                connection.close()
            if self.process.poll() is not None or time.perf_counter() - started > PATIENCE_S:
                raise ServerFailed(
                    f"no answer to {method} {path}; exit status "
                    f"{self.process.returncode}{self._tail()}"
                )
            time.sleep(0.01)

    def _tail(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return "; the server's log ends:\n" + "".join(self._log.readlines()[-15:])


class MemoryWatch:
    """Samples the memory of a process and all its descendants while the block runs. rss_mib counts
    pages that two processes share in both, and pss_mib counts them once. Both are the largest sums
    seen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.rss_mib = 0.0
        self.pss_mib = 0.0
        self._done = Event()
        self._thread = Thread(target=self._watch)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            sums = [_memory_kib(pid) for pid in process_tree(self.pid)]
            self.rss_mib = max(self.rss_mib, sum(rss for rss, _ in sums) / 1024)
            self.pss_mib = max(self.pss_mib, sum(pss for _, pss in sums) / 1024)
            if self._done.wait(SAMPLE_EVERY_S):
                return


def measure_server(server: Server, workload: Workload, concurrency: int) -> dict[str, Any]:
    """Measure one load and the memory that it takes."""
    with MemoryWatch(server.process.pid) as memory:
        numbers = server.load(workload, concurrency)
    return {**numbers, "rss_mib": memory.rss_mib, "pss_mib": memory.pss_mib}


def median_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median by key."""
    return {key: statistics.median(values[key] for values in rounds) for key in rounds[0]}


def _memory_kib(pid: int) -> tuple[int, int]:
    """Returns RSS and PSS of a process, or zeros if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return values.get("Rss:", 0), values.get("Pss:", 0)


def _percentile(values: list[float], percent: int) -> float:
    """Returns a percentile by nearest rank."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
