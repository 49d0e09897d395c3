"""A campaign: clients send hostile constraints and leave. Another client measures its first token,
and the memory is watched.

    python tests/campaigns/hostile_constraints.py

Starts a server with the default model. Prints the memory of all its processes before, during and
after ten schemas with 20,000 properties and ten that the backends do compile, from clients that
leave after one second; and the time to the first token of a request with a small schema, alone and
meanwhile. At last, it generates from ambiguous grammars and prints the longest time between two
tokens of another stream.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_process import MODEL, Server

SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SLOW = [
    {"grammar": 'root ::= root root | "a"'},
    {"grammar": "root ::= root root | [^\\n]"},
    {"grammar": 'root ::= (([a-z ]?){1,50}){1,50} "!"'},
    {"grammar": "start: start start | /[^\\n]/"},
    {"regex": r"(([a-z]+ ?)+,? ?)+\."},
    {"regex": "(.{1,100}a){1,20}"},
    {"regex": ".{1,500}"},
]


def refused(i: int) -> dict[str, Any]:
    """A schema with 20,000 properties."""
    return {
        "type": "object",
        "properties": {f"p{i}_{j}": {"type": "string"} for j in range(20_000)},
    }


def large(i: int) -> dict[str, Any]:
    """A schema that takes xgrammar seconds."""
    names = [f"p{i}_{j}" for j in range(1500)]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
    }


def tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in tree(int(child)))]


def memory_mib(pid: int) -> int:
    """The memory of the process and its descendants that is in RAM and private to them, in MiB."""
    total = 0
    for each in tree(pid):
        fields = dict(
            line.split(":")
            for line in Path(f"/proc/{each}/status").read_text().splitlines()
            if ":" in line
        )
        total += int(fields.get("RssAnon", "0 kB").split()[0])
    return total >> 10


class Campaign:
    def __init__(self, server: Server) -> None:
        self.server = server

    def body(self, structure: Any, max_tokens: int = 8, stream: bool = False) -> dict[str, Any]:
        body = {
            "model": MODEL,
            "prompt": "A person:",
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        return {**body, "structured_outputs": structure} if structure else body

    def send(self, structure: Any, timeout: float | None, **more: Any) -> httpx.Response | None:
        """Send a request; None if the client leaves after `timeout` seconds."""
        try:
            return httpx.post(
                f"{self.server.url}/v1/completions",
                json=self.body(structure, **more),
                timeout=timeout,
            )
        except httpx.TimeoutException:
            return None

    def first_token_s(self, i: int) -> float:
        """The time to the first token with a small schema that was never compiled before."""
        schema = {**SMALL, "title": f"{time.time()} {i}"}
        started = time.perf_counter()
        with httpx.stream(
            "POST",
            f"{self.server.url}/v1/completions",
            json=self.body({"json": schema}, stream=True),
            timeout=120,
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if "error" in line:
                        raise AssertionError(line)
                    return time.perf_counter() - started
        raise AssertionError("no token")

    def row(self, what: str, schemas: list[Any], num_first: int = 10) -> tuple[list[float], int]:
        """Send the schemas from clients that leave after a second, and measure first tokens
        meanwhile. Returns the sorted times of `num_first` first tokens, and how many MiB stay."""
        before = memory_mib(self.server.process.pid)
        clients = [
            threading.Thread(target=self.send, args=[{"json": schema}, 1.0]) for schema in schemas
        ]
        for client in clients:
            client.start()
        times = [self.first_token_s(i) for i in range(num_first)]
        highest = memory_mib(self.server.process.pid)
        for client in clients:
            client.join()
        end = time.monotonic() + 60
        while (
            after := memory_mib(self.server.process.pid)
        ) > before + 32 and time.monotonic() < end:
            highest = max(highest, after)
            time.sleep(1)
        times.sort()
        print(
            f"{what}: first token {statistics.median(times):.2f} s (slowest {times[-1]:.2f}), "
            f"memory {before} MiB before, {highest} highest, {after} after",
            flush=True,
        )
        return times, after - before

    def slow(self, structures: list[Any], seconds: float) -> list[str]:
        """Generate from ambiguous grammars, and measure the gaps between the tokens of another
        stream. Returns how each ended."""
        answers: list[str] = []

        def generate(structure: Any) -> None:
            answer = self.send(structure, 300, max_tokens=150)
            error = answer is not None and answer.json().get("error", {}).get("message")
            answers.append(f"  {json.dumps(structure)}: {error or 'ended'}"[:220])

        clients = [threading.Thread(target=generate, args=[structure]) for structure in structures]
        gaps = []
        started = time.perf_counter()
        last = 0.0
        for client in clients:
            client.start()
        while (
            any(client.is_alive() for client in clients) and time.perf_counter() - started < seconds
        ):
            body = self.body({}, 200, stream=True)
            with httpx.stream(
                "POST",
                f"{self.server.url}/v1/completions",
                json={**body, "ignore_eos": True},
                timeout=300,
            ) as answer:
                last = time.perf_counter()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        gaps.append(time.perf_counter() - last)
                        last = time.perf_counter()
        for client in clients:
            client.join()
        print("\n".join(sorted(answers)))
        gaps.sort()
        print(
            (
                f"another stream: {len(gaps)} tokens, median {gaps[len(gaps) // 2]:.3f} s, "
                f"slowest {gaps[-1]:.2f} s"
            ),
            flush=True,
        )
        return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="how long the grammars may run")
    parser.add_argument("--model", type=Path, help="default: Pegboard's default model")
    arguments = parser.parse_args()
    if arguments.model is None:
        from pegboard.config.schema import Settings
        from pegboard.plan.engine_plan import resolve

        arguments.model = resolve(Settings())[0].checkpoint.path
    with tempfile.TemporaryDirectory() as folder:
        server = Server(arguments.model, Path(folder)).wait_until_ready()
        try:
            campaign = Campaign(server)
            campaign.first_token_s(0)
            campaign.row("no others", [])
            campaign.row("10 schemas of 20,000 properties", [refused(i) for i in range(10)])
            campaign.row("10 schemas of 1,500 properties", [large(i) for i in range(10)])
            campaign.slow(SLOW, arguments.seconds)
        finally:
            server.process.kill()
            server.process.wait()


if __name__ == "__main__":
    main()
