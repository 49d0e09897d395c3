"""`pegboard proxy` before two servers of vLLM, which publish KV events. Opt-in: see
vllm_process.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from request_generator import MODEL
from server_process import HTTP, free_port, wait_until
from vllm_process import PYTHON, needs_vllm, vllm_server

FLAGS = (
    *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8"),
    "--enable-prompt-tokens-details",
)


@contextmanager
def vllm_with_events(log: Path) -> Iterator[tuple[str, str]]:
    """Yield the address of a server, and --kv-events for it."""
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events,
        "replay_endpoint": replay,
    }
    with vllm_server(log, *FLAGS, "--kv-events-config", json.dumps(published)) as url:
        yield url, f"{url}={events},{replay}"


@contextmanager
def proxy(log: Path, *words: str) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "pegboard", "proxy", "--port", str(port), *words]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            wait_until(lambda: is_healthy(url), "the proxy has servers")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def is_healthy(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def has_nixl() -> bool:
    asked = "from importlib.util import find_spec as f; raise SystemExit(f('nixl') is None)"
    return PYTHON is not None and not subprocess.run([PYTHON, "-c", asked]).returncode


def metric(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    lines = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", HTTP.get(f"{url}/metrics").text, re.M)
    return sum(map(float, lines))


def completion(url: str, prompt: str, **more: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    answer = HTTP.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(url: str, prompt: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        events = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        return "".join(event.choices[0].text for event in events if event.choices)


def num_cached(url: str, prompt: str) -> int:
    details = completion(url, prompt)["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


@needs_vllm
def test_requests_follow_their_prefix_and_survive_a_server(tmp_path: Path) -> None:
    with ExitStack() as stack, ExitStack() as second:
        first_url, first_events = stack.enter_context(vllm_with_events(tmp_path / "first.log"))
        last_url, last_events = second.enter_context(vllm_with_events(tmp_path / "last.log"))
        words = [word for url in (first_url, last_url) for word in ("--server", url)]
        words += ["--kv-events", first_events, "--kv-events", last_events]

        prompts = [f"Story {number}. " + "Once upon a time " * 120 for number in range(4)]
        answers = [completion(last_url, prompt)["choices"][0]["text"] for prompt in prompts]
        url = stack.enter_context(proxy(tmp_path / "proxy.log", *words))

        # the blocks of the last server were there before the proxy
        wait_until(lambda: num_cached(url, prompts[0]) > 256, "the prefix is followed")
        for prompt, answer in zip(prompts, answers, strict=True):
            assert num_cached(url, prompt) > 256
            assert streamed(url, prompt) == answer
        assert num_cached(first_url, prompts[1]) == 0, "no request of this prefix came here"

        second.close()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert streamed(url, prompt) == answer


@needs_vllm
@pytest.mark.skipif(not has_nixl(), reason="the environment of vLLM has no nixl")
def test_separate_prefill_and_decode(tmp_path: Path) -> None:
    """With vLLM's NixlConnector. The server that decodes computes no prompts."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    flags = (*FLAGS, "--kv-transfer-config", json.dumps(transfer))
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                vllm_server(
                    tmp_path / f"{name}.log", *flags, VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port())
                )
            )
            for name in ("prefill", "decode")
        )
        words = ["--prefill", prefill, "--decode", decode]
        url = stack.enter_context(proxy(tmp_path / "proxy.log", *words))
        prompts = [f"Story {number}. " + "Once upon a time " * 120 for number in range(4)]
        shown = [streamed(url, prompt) for prompt in prompts]
        assert metric(decode, "vllm:external_prefix_cache_hits_total") > 4 * 256
        assert metric(prefill, "vllm:generation_tokens_total") == 4
        for prompt, answer in zip(prompts, shown, strict=True):
            assert completion(prefill, prompt)["choices"][0]["text"] == answer
