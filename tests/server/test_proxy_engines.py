"""`pegboard proxy` before one server with two engines: a prefix goes to the engine that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import Server, wait_until
from test_data_parallel import TWO, by_engine, complete
from test_proxy_vllm import num_cached, proxy


@pytest.mark.slow
def test_a_prefix_goes_to_its_engine(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """The proxy starts after the first prompt, so it hears of it by the replay."""
    events, replay = (f"ipc://{tmp_path}/{name}" for name in ("events", "replay"))
    published = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay}
    flags = ("--kv-events-config", json.dumps(published), "--enable-prompt-tokens-details")
    server = start_server(*TWO, *flags)
    prompts = [f"{name} wrote a prompt that is long enough to matter. " * 60 for name in "AB"]
    complete(server, prompts[0], rank=1)
    words = ["--server", server.url]
    for end in ("", "_dp1"):
        words += ["--kv-events", f"{server.url}={events}{end},{replay}{end}"]
    with proxy(tmp_path / "proxy.log", *words) as url:
        wait_until(lambda: num_cached(url, prompts[0]) > 500, "the proxy knows the first prefix")
        complete(server, prompts[1], rank=0)
        wait_until(lambda: num_cached(url, prompts[1]) > 500, "the proxy knows the second one")
        before = by_engine(server, "generation_tokens_total")
        for prompt in prompts * 3:
            assert num_cached(url, prompt) > 500
        after = by_engine(server, "generation_tokens_total")
    assert [after[engine] - before[engine] for engine in "01"] == [36, 36]
