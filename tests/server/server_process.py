"""A separate `pegboard serve` for tests: starts it, reads its numbers through a probe, stops it,
and checks that it leaves nothing."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from pegboard_testing.fake_distributions import FakeDistributions

PATIENCE_S = 120.0
"""How long anything may take before a test fails. A passing test never waits this long."""

MODEL = "smol"
"""The name under which the model is served."""

SIZES = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "536870912", "--max-num-seqs", "64")

PROBE_MODULE = "acme_probe"

PROBE_SOURCE = '''
from starlette.responses import JSONResponse
from starlette.routing import Route

from pegboard.interfaces.api import ApiSpec

SPEC = ApiSpec(api="1.0", implementation="acme_probe:Probe", public_paths=("/probe/stats",))


class Probe:
    """GET /probe/ACTION: the engine's answer to a control action."""

    def __init__(self, options, setup):
        self.client = setup.client

    def routes(self):
        return [Route("/probe/{action}", self.control)]

    def error_body(self, status, message, parameter):
        return {"error": message}

    async def control(self, request):
        return JSONResponse(await self.client.control(request.path_params["action"]))
'''


def install_probe(folder: Path) -> Path:
    """Write a third-party api plugin to `folder`, which must then be on the server's PYTHONPATH."""
    folder.mkdir(exist_ok=True)
    FakeDistributions(folder).add(
        "acme-probe",
        {"api": {"probe": f"{PROBE_MODULE}:SPEC"}},
        {PROBE_MODULE: PROBE_SOURCE},
        requires=["pegboard", "starlette"],
    )
    return folder


HTTP = httpx.Client(
    timeout=PATIENCE_S, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
)
"""A client for simple requests, each on its own connection."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Returns the first true result of `condition`. Fails naming `what` when there is none for a
    long time."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)
    return result


def short_folder(folder: Path) -> Path:
    """Make a folder that belongs to `folder`. Its path is short: a server puts sockets there, whose
    paths have at most 107 bytes, and pytest's may be longer."""
    made = (
        Path(tempfile.gettempdir())
        / f"server-{hashlib.blake2s(str(folder).encode(), digest_size=6).hexdigest()}"
    )
    made.mkdir(exist_ok=True)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def cli(*words: str, timeout: float = PATIENCE_S, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `pegboard WORDS` to its end."""
    command = [sys.executable, "-m", "pegboard.cli.main", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **env}
    )


class Server:
    """A running server in its own process group. log: a file for its output, in `folder`. temp: for
    its temporary files, the same for all servers with the same `folder`. port: default any free
    one."""

    def __init__(
        self,
        model: Path | str,
        folder: Path,
        *flags: str,
        probe: Path | None = None,
        port: int | None = None,
        **env: str,
    ) -> None:
        self.folder = folder
        self.temp = short_folder(folder)
        self.log = folder / "log"
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._clients = contextlib.ExitStack()
        words = [
            "serve",
            str(model),
            "--port",
            str(self.port),
            "--served-model-name",
            MODEL,
            "--disable-access-log",
        ]
        words += [*SIZES, *flags]
        more = {"TMPDIR": str(self.temp), **env}
        if probe is not None:
            words += ["--plugins-enable", "api:probe"]
            more["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(probe), os.environ.get("PYTHONPATH")])
            )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pegboard.cli.main", *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **more},
                start_new_session=True,
            )

    def wait_until_ready(self) -> "Server":
        wait_until(self._is_ready_or_gone, "the server is healthy")
        return self

    def _is_ready_or_gone(self) -> bool:
        assert self.process.poll() is None, (
            f"the server exited with {self.process.returncode}:\n{self.log.read_text()}"
        )
        return self.status("/health") == 200

    def status(self, path: str) -> int | None:
        """Returns the status of a GET, or None when there is no answer."""
        try:
            return HTTP.get(self.url + path).status_code
        except httpx.TransportError:
            return None

    def client(self, api_key: str = "any") -> openai.OpenAI:
        """Returns the official client. It is closed after the server: the connection of one that
        nobody closes may be left to the garbage collector, which warns in some later test."""
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=PATIENCE_S
        )
        self._clients.callback(client.close)
        return client

    def async_client(self) -> openai.AsyncOpenAI:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        http = httpx.AsyncClient(limits=limits, timeout=PATIENCE_S)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="any", max_retries=0, http_client=http
        )

    def stats(self) -> dict[str, Any]:
        """Returns the engine's current numbers. This needs the probe."""
        return dict(HTTP.get(f"{self.url}/probe/stats").raise_for_status().json())

    def wait_until_idle(self) -> None:
        """Wait until the engine is idle and no request holds a block. A request that its client has
        left may still arrive, so all numbers are read at once."""
        wait_until(lambda: not any(self._load()), "no request runs and no block is held")

    def _load(self) -> list[object]:
        held = (
            "num_requests_running",
            "num_requests_waiting",
            "num_steps_in_flight",
            "kv_cache_usage_perc",
            "blocks_of",
        )
        stats = self.stats()
        return [stats[name] for name in held]

    def engine_pid(self) -> int:
        """Returns the process of the only engine."""
        (engine,) = self.engine_pids()
        return engine

    def engine_pids(self) -> list[int]:
        """Returns the engines' processes, which are children of the server, in their order."""
        children = [pid for pid, parent, _ in processes() if parent == self.process.pid]
        return [
            pid
            for pid in sorted(children)
            if b"pegboard.engine.boundary.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def signal_group(self, number: signal.Signals) -> None:
        """Sends the signal that a terminal sends on Ctrl-C, or a supervisor to stop it."""
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def check_nothing_left(self) -> None:
        """Checks that the whole process group and everything in the temporary folder are gone."""
        wait_until(lambda: not self._members(), "no process of the server is left")
        assert list(self.temp.iterdir()) == []
        assert self.status("/health") is None

    def _members(self) -> list[int]:
        return [pid for pid, _, group in processes() if group == self.process.pid]

    def stop(self) -> int:
        """Returns the exit code after SIGTERM. Processes that do not end are killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.wait()
        finally:
            for pid in self._members():
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._clients:
            self.stop()


def processes() -> Sequence[tuple[int, int, int]]:
    """Returns (pid, parent's pid, process group) of every process that is not a zombie."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # the process ended in the meantime
            continue
        state, parent, group = text.rpartition(")")[2].split()[:3]
        if state not in "ZX":
            found.append((int(stat.parent.name), int(parent), int(group)))
    return found
