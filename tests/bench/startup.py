"""How long it takes until something is there: the import, the command's help, the first token of a server."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

SERVER_WAIT_S = 300


def import_ms(times: int) -> float:
    """Median milliseconds of `import pegboard` in a fresh interpreter, without the interpreter's own start."""
    code = "import time; t = time.perf_counter(); import pegboard; print(1e3 * (time.perf_counter() - t))"
    return statistics.median(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(times))


def help_ms(times: int) -> float:
    """Median milliseconds of `pegboard --help`, the whole process."""
    command = [str(Path(sys.executable).parent / "pegboard"), "--help"]
    return statistics.median(_run_ms(command) for _ in range(times))


def _run_ms(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return 1e3 * (time.perf_counter() - started)


def serve_first_token_s(model: str | None) -> float:
    """Seconds from the start of `pegboard serve` to the first streamed token over HTTP."""
    port = _free_port()
    command = [str(Path(sys.executable).parent / "pegboard"), "serve", *([model] if model else [])]
    command += ["--port", str(port), "--served-model-name", "bench"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for_token(port, server, started + SERVER_WAIT_S)
            return time.perf_counter() - started
        finally:
            server.terminate()


def _wait_for_token(port: int, server: subprocess.Popen[bytes], deadline: float) -> None:
    """Ask for one token until somebody answers. The server may accept before it is ready; then the request waits."""
    body = json.dumps({"model": "bench", "prompt": "Hello", "max_tokens": 1, "temperature": 0, "stream": True})
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SERVER_WAIT_S)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200 and answer.readline().startswith(b"data: {"):
                return
        except OSError:
            pass  # nobody listens yet
        finally:
            connection.close()
        if server.poll() is not None or time.perf_counter() > deadline:
            raise RuntimeError(f"pegboard serve gave no token; its exit status is {server.returncode}")
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
