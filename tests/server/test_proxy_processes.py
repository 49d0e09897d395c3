"""The example with two servers for prompts, two that answer and a proxy, of which one dies."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from server_process import HTTP, MODEL, PATIENCE_S, free_port, wait_until
from transformers import AutoConfig, AutoModelForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples/disaggregated_prefill/serve.py"
FLAGS = (
    *("--served-model-name", MODEL, "--disable-access-log", "--skip-tokenizer-init"),
    *("--max-model-len", "17000", "--kv-cache-memory-bytes", "64M", "--num-threads", "1"),
)


class Example:
    """The running example. url: of the proxy. servers: (role, url, process) of each."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        port = self._free_ports()
        self.url = f"http://127.0.0.1:{port}"
        self.blocks = folder / "blocks"
        self.log = folder / "log"
        words = ["--prefill", "2", "--decode", "2", "--port", str(port), *flags]
        words += ["--blocks", str(self.blocks), str(model), "--", *FLAGS]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE), *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(folder)},
            )

    @staticmethod
    def _free_ports() -> int:
        """Return the first of nine ports, all of which are free."""
        while True:
            first = free_port()
            if all(free_port_is(first + index) for index in range(9)):
                return first

    def servers(self) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = HTTP.get(f"{self.url}/servers").json()["servers"]
        return shown

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return all(server["is_healthy"] for server in self.servers())
            except httpx.TransportError:
                return False

        wait_until(is_ready, "all servers are healthy")

    def progress(self, url: str) -> float:
        """A number that grows when the server at `url` has made blocks."""
        files = len(list(self.blocks.rglob("*.safetensors")))
        return files + metric(url, "kv_cache_usage_perc")

    def pid(self, url: str) -> int:
        line = re.search(rf"{url} \(process (\d+)\)", self.log.read_text())
        assert line is not None
        return int(line[1])

    def tokens(self, prompt: list[int], url: str | None = None, **body: Any) -> list[int]:
        """Return the tokens of a stream. url: of a server, default the proxy."""
        with openai.OpenAI(
            base_url=f"{url or self.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S
        ) as client:
            extra = {"return_token_ids": True, "ignore_eos": True, **body}
            stream = client.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=12,
                temperature=0,
                stream=True,
                extra_body=extra,
            )
            return [
                token
                for event in stream
                for choice in event.choices
                for token in getattr(choice, "token_ids", None) or ()
            ]

    def check(self, prompts: list[list[int]], answers: list[list[int]], url: str) -> None:
        """The answers are those of one server that has no blocks of the prompts."""
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == 12
            assert self.tokens(prompt, url, cache_salt="alone") == answer


def free_port_is(port: int) -> bool:
    with socket.socket() as probe:
        return 0 < port < 65536 and probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture(params=["folder", pytest.param("p2p", marks=pytest.mark.slow)])
def example(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Example]:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        initializer_range=0.5,
    )
    torch.manual_seed(7)
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    example = Example(model, tmp_path, *(["--p2p"] if request.param == "p2p" else []))
    try:
        example.wait_until_ready()
        yield example
    finally:
        example.process.terminate()
        example.process.wait(PATIENCE_S)


def metric(url: str, name: str) -> float:
    line = re.search(rf"^vllm:{name}\{{.+\}} (\S+)", HTTP.get(f"{url}/metrics").text, re.M)
    assert line is not None
    return float(line[1])


def is_idle(url: str) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metric(url, name) for name in names)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(3, 131, (length,), generator=seeded(seed)).tolist()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_answers_are_those_of_one_engine(example: Example) -> None:
    """The second servers load what the first ones compute, also when one of these is killed while
    it computes and writes."""
    first, second = (
        [server["url"] for server in example.servers() if server["role"] == role]
        for role in ("prefill", "decode")
    )
    prompts = [prompt_of(200 + 7 * seed, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(example.tokens, prompts))
    assert [server["requests"] for server in example.servers()] == [2, 2, 2, 2]
    example.check(prompts, answers, first[0])
    for url in second:
        assert metric(url, "external_prefix_cache_hits_total") >= 2 * 192

    seen = example.progress(first[0])
    prompts = [prompt_of(16000, seed) for seed in (10, 11)]
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(example.tokens, prompt) for prompt in prompts]
        wait_until(lambda: example.progress(first[0]) > seen, "blocks are being written")
        assert not any(each.done() for each in running)
        os.kill(example.pid(first[0]), signal.SIGKILL)
        answers = [each.result() for each in running]
    gone = [server["url"] for server in example.servers() if not server["is_healthy"]]
    assert gone == first[:1]
    assert sum(server["requests"] for server in example.servers()[:2]) == 4 + 2 + 1
    example.check(prompts, answers, first[1])
    for url in (first[1], *second):
        wait_until(partial(is_idle, url), "no request runs and no block is held")
