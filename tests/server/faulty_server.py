"""A whole server in this process: the real API application, client, message loop and engine. All
its plugins can fail."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import zmq
from faulty_plugins import install

from pegboard.config.schema import EngineConfig, PluginConfig, Settings
from pegboard.engine.boundary import process
from pegboard.engine.boundary.client import EngineLink
from pegboard.engine.boundary.messages import Ready, Stop, encode
from pegboard.engine.build import build_engine
from pegboard.engine.metrics.sinks import SampleRelay
from pegboard.front.async_llm import AsyncLLM
from pegboard.plan.engine_plan import resolve
from pegboard.plugins import discovery
from pegboard.plugins.discovery import Scan
from pegboard_server.app import open_app
from pegboard_server.engine_watch import EngineWatch
from pegboard_server.http_metrics import HTTP_METRICS
from pegboard_server.settings import ServerConfig
from pegboard_server.watchdog import LoopGuard

APIS = ("pegboard-api-openai", "pegboard-api-responses")
WORDS = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0.0}
ENGINE = EngineConfig(
    model="acme:tiny",
    device="acme",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=4,
    kv_cache_memory_bytes=1 << 20,
    distributed_executor_backend="acme",
    scheduling_policy="acme",
    sampler="acme",
    kv_connectors=["acme"],
    spec_method="acme",
    spec_tokens=1,
    logits_processors=["acme"],
    tool_call_parser="acme",
    reasoning_parser="acme",
    served_model_name=["tiny"],
    structured_outputs_config={"enable_in_reasoning": True},
    max_loras=1,
)
ENABLED = ["api:probe", "metrics:acme", "metrics:acme-api", "builtin_tool:acme", "hooks:acme"]


class Clock:
    """Seconds that pass only when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class InProcess(EngineLink):
    """The client's end of an engine that runs in a thread of this process, with the real message
    loop."""

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(f"ipc://{folder}/engine", linger_ms=0)
        self.engine = engine
        self._server = self._context.socket(zmq.DEALER)
        self._server.bind(f"ipc://{folder}/engine")
        self.thread = threading.Thread(target=self._run, args=(engine,), daemon=True)

    def _run(self, engine: Any) -> None:
        relay = SampleRelay()
        engine.attach(relay)
        self._server.send(encode(Ready(engine.stats(), list(relay.metrics))))
        try:
            process._serve(self._server, engine, relay)
        finally:
            engine.stop()
            self._server.close(linger=0)

    def attach(self, *callbacks: Any) -> None:
        super().attach(*callbacks)
        self.thread.start()

    def stop(self) -> None:
        if self._socket.closed:
            return
        self.send(Stop())
        if self.thread.ident is not None:
            self.thread.join(20)
            assert not self.thread.is_alive()
        self._server.close(linger=0)
        self.close()


class Served:
    """A server that runs: its client, its application, and the watchdog of its engine."""

    def __init__(
        self, client: AsyncLLM, link: InProcess, app: Any, watch: EngineWatch, clock: Clock
    ) -> None:
        self.client = client
        self.link = link
        self.clock = clock
        self.watch = watch
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://x", timeout=20)

    async def ask(self, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        if path.startswith("/probe"):
            return await self.http.get(path)
        return await self.http.post(path, json={"model": "tiny", **(more or WORDS)})

    async def stalled(self) -> str:
        """What the watchdog says when the present call in the engine takes a minute, "" if there is
        none."""
        self.watch._thread = self.link.thread.ident
        self.watch.beat()
        await asyncio.sleep(0.03)
        self.clock.now += 61
        return self.watch.beat().what


class Faults:
    """Starts servers, and makes their plugins fail."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        site = folder / "site"
        site.mkdir()
        self.folder = folder
        self.caplog = caplog
        self.num_started = 0
        monkeypatch.syspath_prepend(str(site))
        apis = [entry for entry in discovery.scan().entries if entry.distribution in APIS]
        fakes = install(site).scan()
        assert not fakes.unusable, fakes.unusable
        monkeypatch.setattr(
            discovery, "scan", lambda: Scan(entries=(*fakes.entries, *apis), hooks=fakes.hooks)
        )

    @property
    def module(self) -> ModuleType:
        import acme_fault  # type: ignore[import-not-found]

        return acme_fault  # type: ignore[no-any-return]

    @contextmanager
    def failing(self, place: str, fault: str) -> Iterator[None]:
        """In the block, the call at `place` fails."""
        self.caplog.clear()
        self.module.RELEASE.clear()
        self.module.SEEN.clear()
        self.module.SWITCH[:] = [place, fault]
        try:
            yield
        finally:
            self.module.SWITCH[:] = ["", ""]
            self.module.RELEASE.set()

    @asynccontextmanager
    async def server(self) -> AsyncIterator[Served]:
        """A server with an engine of its own."""
        self.num_started += 1
        folder = self.folder / str(self.num_started)
        folder.mkdir()
        plan, registry = resolve(
            Settings(
                ENGINE,
                PluginConfig(enable=ENABLED),
                {"server": ServerConfig(lora_resolvers=["acme"])},
            )
        )
        engine = build_engine(plan)
        engine._grammars.compiler._timeout_s = 0.2
        clock = Clock()
        watch = EngineWatch(folder / "heart", engine._life.modules, log_after_s=10, clock=clock)
        link = InProcess(engine, folder)
        try:
            client = AsyncLLM.of_plan(plan, registry, link, metrics=HTTP_METRICS)
            app = await open_app(client, publish=client.publish)
            async with client:
                with LoopGuard(registry.modules, 0.5, tick_s=0.05).active():
                    yield Served(client, link, app, watch, clock)
        finally:
            link.stop()

    def told(self) -> str:
        """What the log says, with tracebacks."""
        formatter = logging.Formatter("%(message)s")
        return "\n".join(formatter.format(record) for record in self.caplog.records)


@pytest.fixture
def faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Faults]:
    yield Faults(tmp_path, monkeypatch, caplog)
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


async def until(condition: Any, what: str) -> None:
    """Wait until the condition is true, at most 20 s."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"waited in vain until {what}")
