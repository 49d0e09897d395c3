"""Start a server on the default model, stream one chat answer through the official openai client,
and stop the server.

Prints the answer, the time to the first token and the tokens per second.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai

QUESTION = "In two sentences: what is a pegboard good for?"
START_LIMIT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server is ready. Raises RuntimeError if it exits or takes too long."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(
                f"the server exited with code {server.returncode} before it was ready"
            )
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready after {START_LIMIT_S} s")


def stream_answer(url: str) -> tuple[float, int, float]:
    """Print the answer as it arrives. Returns (seconds to the first token, tokens, seconds in
    total)."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    started = time.perf_counter()
    first = 0.0
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=80,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
    print()
    return first, tokens, time.perf_counter() - started


def main() -> int:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    quiet = ["--disable-access-log", "--disable-log-stats"]
    server = subprocess.Popen(
        [sys.executable, "-m", "pegboard.cli.main", "serve", "--port", str(port), *quiet]
    )
    try:
        wait_until_healthy(url, server)
        print(f"server ready after {time.perf_counter() - started:.1f} s\n\n> {QUESTION}")
        first, tokens, total = stream_answer(url)
        rate = (tokens - 1) / (total - first) if tokens > 1 else 0.0
        print(f"\ntime to first token {first * 1000:.0f} ms, {rate:.1f} tokens/s ({tokens} tokens)")
    finally:
        server.terminate()
        code = server.wait(timeout=30)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
