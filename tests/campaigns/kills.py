"""A campaign: kills the processes of a server at random moments, and looks at what the clients get
and at what stays.

    python tests/campaigns/kills.py --count 100

Each round starts `pegboard serve` on a small model, puts it under load, and sends a signal to one
process: the engine, the server, an API process, or all of them. Right is: every client gets a whole
answer, an error that says what happened, or a closed connection, within a limit; a server that a
signal may not stop goes on; no process, file, socket or shared memory stays; and the next server,
with the same port and the same folder, comes up and answers. If all processes are killed at once,
the next server removes what they left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

import damaged_checkpoints
import httpx
from server_process import MODEL, PATIENCE_S, Server, free_port, processes, wait_until

LIMIT_S = 15.0
"""How long after the signal a client may wait for the end of its answer, if the signal ends the
server."""

SHUTDOWN_S = 4.0
STOPPED_S = 1.0
"""How long a process is stopped (SIGSTOP) before it goes on."""

MOMENTS = ("start", "idle", "prefill", "decode", "draining")
ENGINE = b"pegboard.engine.boundary.process"
API = b"pegboard_server.api_process"


@dataclass(frozen=True)
class Round:
    """One round. victim: engine, server (the process that was started), api (one of several API
    processes) or group (all at once). moment: when the signal comes. wait: where in that moment,
    from 0 to 1."""

    victim: str
    number: signal.Signals
    moment: str
    num_apis: int = 1
    wait: float = 0.5

    def __str__(self) -> str:
        apis = f", {self.num_apis} API processes" if self.num_apis > 1 else ""
        return f"{self.number.name} to the {self.victim}, {self.moment} {self.wait:.2f}{apis}"

    @property
    def ends_the_server(self) -> bool:
        """Whether the server must end. It goes on after SIGSTOP and SIGCONT, and a SIGTERM to a
        child means nothing: the parent decides."""
        is_ignored = self.number == signal.SIGTERM and self.victim in ("engine", "api")
        return self.moment == "draining" or not (self.number == signal.SIGSTOP or is_ignored)

    @property
    def may_leave_folder(self) -> bool:
        """Whether nobody may be left to remove the folder of the engine process, so that the next
        server does it. While it drains, the server may be killed just after its engine has
        ended."""
        return self.victim == "group" or (self.victim == "server" and self.moment == "draining")

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """What the server may exit with, if this round ends it."""
        if self.victim in ("server", "group") and self.number in (signal.SIGKILL, signal.SIGSEGV):
            # it may have drained before
            return (-self.number, 0) if self.moment == "draining" else (-self.number,)
        if self.number in (signal.SIGTERM, signal.SIGSTOP):
            return (0, 128 + signal.SIGTERM, -signal.SIGTERM) if self.moment == "start" else (0,)
        return (0, 1) if self.moment == "draining" else (1,)


def draw_round(draw: random.Random) -> Round:
    num_apis = draw.choice((1, 2))
    victim = draw.choice(
        ("engine", "engine", "server", "server", "group", "api")[: 5 + (num_apis > 1)]
    )
    number = draw.choice([signal.SIGKILL] * 4 + [signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP])
    return Round(victim, number, draw.choice(MOMENTS), num_apis, draw.random())


# --- the clients ----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What the clients got. ends: seconds from the signal to the end of each answer."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def make_request(draw: random.Random, moment: str) -> tuple[str, dict[str, Any]]:
    """Return (path, body): long prompts for the moment "prefill", long answers otherwise; streamed
    or not."""
    is_prefill = moment == "prefill"
    words = draw.randint(1200, 1900) if is_prefill else draw.randint(1, 40)
    text = " ".join(draw.choices(("the", "in", "er", "a river", "hé"), k=words))
    body = {
        "model": MODEL,
        "max_tokens": draw.randint(1, 40) if is_prefill else draw.randint(300, 2500),
        "ignore_eos": True,
        "stream": draw.random() < 0.6,
        "temperature": 1.0,
    }
    if draw.random() < 0.5:
        return "/v1/completions", {**body, "prompt": text, "n": draw.choice((1, 1, 3))}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}


async def ask(
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    on_begin: Callable[[], None] = lambda: None,
) -> tuple[str, str]:
    """Return (kind, detail) of what a client gets: answered, told (an error), closed, or something
    wrong. on_begin is called when the answer begins."""
    data = b""
    try:
        async with http.stream("POST", path, json=body) as response:
            async for part in response.aiter_bytes():
                if not data:
                    on_begin()
                data += part
    except httpx.TransportError as error:
        return "closed", type(error).__name__
    if response.status_code == 200 and body["stream"]:
        events = [line.removeprefix(b"data: ") for line in data.splitlines() if line]
        if events[-1:] != [b"[DONE]"]:
            return "wrong", f"a stream of {len(events)} events ends without [DONE]: {data[-300:]!r}"
        last = json.loads(events[-2])
        return message_of(last) if "error" in last else ("answered", "")
    try:
        return (
            message_of(json.loads(data))
            if response.status_code != 200
            else whole(json.loads(data), body)
        )
    except (ValueError, KeyError):
        return "wrong", f"{response.status_code}: {data[-300:]!r}"


def message_of(body: dict[str, Any]) -> tuple[str, str]:
    message = body["error"]["message"]
    return (
        ("told", message)
        if "engine" in message or "server" in message or "model" in message
        else ("wrong", message)
    )


def whole(body: dict[str, Any], asked: dict[str, Any]) -> tuple[str, str]:
    complete = len(body["choices"]) == asked.get("n", 1) and all(
        choice["finish_reason"] for choice in body["choices"]
    )
    return ("answered", "") if complete else ("wrong", f"not all choices are complete: {body}")


class Load:
    """Clients that ask until `stop` is set: `await wait(...)` then returns what all of them got."""

    def __init__(self, url: str, moment: str, draw: random.Random, num_clients: int) -> None:
        self._url = url
        self._moment = moment
        self._draw = draw
        self._outcome = Outcome()
        self._stopping = False
        self.num_sent = self.num_begun = 0
        self.killed_at: float | None = None
        self._clients = [asyncio.create_task(self._client()) for _ in range(num_clients)]

    async def _client(self) -> None:
        async with httpx.AsyncClient(
            base_url=self._url, timeout=None, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http:
            # one API process would accept connections that come at once
            await asyncio.sleep(self._draw.random() * 0.3)
            while not self._stopping:
                path, body = make_request(self._draw, self._moment)
                self.num_sent += 1
                kind, detail = await ask(http, path, body, self._begin)
                self._take(kind, detail)
                if kind != "answered":  # it asks again, as real clients do
                    await asyncio.sleep(0.1)

    def _begin(self) -> None:
        self.num_begun += 1

    async def wait_until_begun(self) -> None:
        """Wait until some answers have begun, or for the moment "prefill" until the requests have
        been sent."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._outcome.bad:
            if self.num_begun >= len(self._clients) / 4 or (
                self._moment == "prefill" and self.num_sent >= len(self._clients)
            ):
                return
            assert time.monotonic() < deadline, "no answer has begun"
            await asyncio.sleep(0.01)

    def _take(self, kind: str, detail: str) -> None:
        self._outcome.counts[kind] += 1
        if detail:
            self._outcome.errors[detail[:200]] += 1
        if kind == "wrong" or (
            self.killed_at is None and kind != "answered" and self._moment != "start"
        ):
            self._outcome.bad.append(f"{kind} {detail}")
        if self.killed_at is not None:
            self._outcome.slowest_s = max(
                self._outcome.slowest_s, time.monotonic() - self.killed_at
            )

    async def wait(self, limit_s: float) -> Outcome:
        """Let the clients finish what they have asked."""
        self._stopping = True
        if self._clients:
            _, late = await asyncio.wait(self._clients, timeout=limit_s)
            for task in late:
                task.cancel()
                self._outcome.bad.append(f"hang: a client got no end of its answer in {limit_s} s")
            for result in await asyncio.gather(*self._clients, return_exceptions=True):
                if isinstance(result, Exception):
                    self._outcome.bad.append(f"{type(result).__name__}: {result}")
        return self._outcome


# --- one round ------------------------------------------------------------------------------------


def start(model: Path, folder: Path, port: int, num_apis: int) -> Server:
    flags = (
        "--api-server-count",
        str(num_apis),
        "--shutdown-timeout-s",
        str(SHUTDOWN_S),
        "--max-model-len",
        "8192",
        "--kv-cache-memory-bytes",
        str(64 << 20),
        "--max-num-seqs",
        "16",
        "--dtype",
        "float32",
    )
    return Server(model, folder, *flags, port=port)


def children(server: Server, mark: bytes) -> list[int]:
    """Return the children of the server whose command line has the mark."""
    found = []
    for pid, parent, _ in processes():
        try:
            if parent == server.process.pid and mark in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:  # it has ended
            continue
    return sorted(found)


def victims(server: Server, victim: str) -> list[int]:
    """Return the processes to send the signal to. While the server starts, there may be none
    yet."""
    if victim == "server":
        return [server.process.pid]
    if victim == "group":
        return [pid for pid, _, group in processes() if group == server.process.pid]
    return children(server, {"engine": ENGINE, "api": API}[victim])[:1]


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


async def play(
    model: Path,
    folder: Path,
    port: int,
    this: Round,
    draw: random.Random,
    start_s: float,
    limit_s: float,
    num_clients: int,
) -> Outcome:
    """Play one round. start_s: how long a start takes, to find a moment in it."""
    with start(model, folder, port, this.num_apis) as server:
        if this.moment == "start":
            load = Load(server.url, this.moment, draw, 3)
            await asyncio.to_thread(
                wait_until, lambda: victims(server, this.victim), "there is a process to kill"
            )
            await asyncio.sleep(this.wait * start_s)
        else:
            await asyncio.to_thread(server.wait_until_ready)
            load = Load(server.url, this.moment, draw, 0 if this.moment == "idle" else num_clients)
            await load.wait_until_begun()
            await asyncio.sleep(this.wait * {"idle": 0.2, "prefill": 0.5}.get(this.moment, 2.0))
        if this.moment == "draining":
            load.killed_at = time.monotonic()
            os.kill(server.process.pid, signal.SIGTERM)
            await asyncio.sleep(this.wait * SHUTDOWN_S)
        load.killed_at = time.monotonic()
        pids = victims(server, this.victim)  # while it drains, the server may have ended before
        send(pids, this.number)
        if this.number == signal.SIGSTOP:
            await asyncio.sleep(STOPPED_S)
            send(pids, signal.SIGCONT)
        ends = this.ends_the_server and (bool(pids) or this.moment == "draining")
        if not ends:
            await asyncio.to_thread(server.wait_until_ready)
        outcome = await load.wait(limit_s if ends else PATIENCE_S)
        if not ends:
            outcome.bad += [
                f"the server should go on, but a client got: {text}"
                for text in outcome.errors
                if this.moment != "start"
            ]
            answer = await asyncio.to_thread(answer_of, server)
            if answer != "answered":
                outcome.bad.append(f"the server goes on, but answers: {answer}")
            server.process.terminate()
        code = await asyncio.to_thread(server.wait)
        if code not in (this.exit_codes if ends else (0,)):
            outcome.bad.append(f"the server exited with {code}")
        outcome.bad += await asyncio.to_thread(left_by, server, code < 0 and this.may_leave_folder)
        return outcome


def answer_of(server: Server) -> str:
    body = {"model": MODEL, "prompt": "the", "max_tokens": 3, "ignore_eos": True, "stream": False}

    async def asked() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            return " ".join(await ask(http, "/v1/completions", body)).strip()

    return asyncio.run(asked())


def left_by(server: Server, may_leave_folder: bool = False) -> list[str]:
    """Return what a server that has ended left, and errors in its log that it did not explain.
    may_leave_folder: the folder of the engine process may stay until the next start."""
    try:
        wait_until(lambda: not server._members(), "no process of the server is left")
    except AssertionError:
        return [f"processes are left: {server._members()}"]
    found = [f"{path} is left" for path in server.temp.rglob("*") if not may_leave_folder]
    found += [
        f"{path} is left"
        for path in Path("/dev/shm").glob("*")
        if "pegboard" in path.name and "kernels" not in path.name
    ]
    text = server.log.read_text(errors="replace")
    return found + ([f"the log has a traceback: …{text[-1500:]}"] if "Traceback" in text else [])


def run(
    rounds: Sequence[Round],
    folder: Path,
    *,
    limit_s: float = LIMIT_S,
    num_clients: int = 12,
    told: Callable[[Round, Outcome], None] = lambda this, outcome: None,
) -> list[str]:
    """Play the rounds. If the last one ends its server, start another one after it. Returns what
    was wrong."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder.mkdir(exist_ok=True)
    model = write_model(folder / "model")
    port = free_port()
    bad = []
    started = time.monotonic()
    start_s = 0.0
    if any(this.moment == "start" for this in rounds):
        with start(model, folder, port, 1) as server:
            server.wait_until_ready()
            start_s = time.monotonic() - started
    for index, this in enumerate(rounds):
        try:
            outcome = asyncio.run(
                play(model, folder, port, this, random.Random(index), start_s, limit_s, num_clients)
            )
        except AssertionError as error:  # it did not start
            outcome = Outcome(bad=[str(error)])
        told(this, outcome)
        bad += [f"{this}: {text}" for text in outcome.bad]
    if not rounds[-1].ends_the_server:
        return bad
    with start(model, folder, port, 1) as server:
        answer = answer_of(server.wait_until_ready())
    bad += [f"in the end: {text}" for text in left_by(server)]
    return bad + ([] if answer == "answered" else [f"the last server answers: {answer}"])


def write_model(folder: Path) -> Path:
    """Write a small model that can answer long."""
    damaged_checkpoints.write_healthy(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": 8192, "rope_scaling": None})
    )
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="rounds")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    sums: dict[str, Counter[str]] = {}
    slowest: Counter[str] = Counter()

    def told(this: Round, outcome: Outcome) -> None:
        print(
            this,
            dict(outcome.counts),
            f"{outcome.slowest_s:.1f} s",
            *outcome.errors,
            *outcome.bad,
            sep="; ",
            flush=True,
        )
        key = f"{this.victim} | {this.number.name}"
        sums.setdefault(key, Counter()).update(
            {**outcome.counts, "rounds": 1, "bad": len(outcome.bad)}
        )
        slowest[key] = max(slowest[key], round(outcome.slowest_s, 1))  # type: ignore[assignment]

    with tempfile.TemporaryDirectory() as folder:
        bad = run([draw_round(draw) for _ in range(arguments.count)], Path(folder), told=told)
    print(
        "| killed | signal | rounds | answered | error | closed | slowest end | wrong "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for key in sorted(sums):
        numbers = [sums[key][word] for word in ("rounds", "answered", "told", "closed")]
        print(
            "|",
            " | ".join([key, *map(str, numbers), f"{slowest[key]} s", str(sums[key]["bad"])]),
            "|",
        )
    for text in bad:
        print(f"bad: {text}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
