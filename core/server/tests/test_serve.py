"""The command `serve`: its contract, and what happens before the server runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from pegboard.config.schema import Settings
from pegboard.config.sources import engine_settings
from pegboard.errors import ConfigError
from pegboard.front import async_llm
from pegboard.interfaces.command import Command, CommandSetup
from pegboard.plugins.registry import Registry
from pegboard_server import serve, watchdog
from pegboard_server.settings import ServerConfig
from pegboard_server.stopping import Termination
from pegboard_testing.contract_command import CommandContract, command_setup
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("command", "serve"))


class TestServe(CommandContract):
    word = "serve"

    def command(self, setup: CommandSetup) -> Command:
        return serve.Serve(None, setup)


def test_terminated_while_starting_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM before the server runs: the process exits and ends the engine process too."""
    script = (
        "import sys, time\n"
        "from pegboard.cli.main import main\n"
        "from pegboard.front import async_llm\n"
        "def slow(settings, engine, **more):\n"
        "    print(engine.pid, engine.folder, flush=True)\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    async_llm.start_engine = slow\n"
        "    sys.exit(main(['serve', '--port', '0']))\n"
    )
    path = tmp_path / "program.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with program:
        pid, _, folder = program.stdout.readline().strip().partition(" ")
        program.send_signal(signal.SIGTERM)
        _, errors = program.communicate(timeout=60)
    assert program.returncode == 143
    assert "Traceback" not in errors
    assert not os.path.exists(folder) and not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_plugin_that_hangs_before_the_engine_loads_is_told(
    num_processes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is found and fetched in the server's own process."""

    class Source:
        @staticmethod
        def fetch(*_: object, **__: object) -> None:
            while not caplog.records:
                time.sleep(0.05)
            raise ConfigError("enough")

    monkeypatch.setattr(async_llm, "start_engine", Source.fetch)
    monkeypatch.setattr(
        watchdog, "loading_watched", partial(watchdog.loading_watched, log_after_s=0.5)
    )
    monkeypatch.setattr(Registry, "modules", lambda self: {__name__: "model_source:x (acme 1.0)"})
    monkeypatch.setattr(watchdog, "WatchedEngine", FakeEngineProcess)
    config = ServerConfig(port=0, host="127.0.0.1", api_server_count=num_processes)
    settings = Settings(sections={"server": config})
    with pytest.raises(ConfigError, match="enough"):
        serve.serve(settings)
    assert (
        "plugin model_source:x (acme 1.0) has been in the same call" in caplog.text
        and "def fetch" not in caplog.text
    )


def test_a_sigterm_that_got_lost_is_repeated() -> None:
    termination = Termination()
    termination.repeat()
    before = signal.signal(signal.SIGTERM, termination)
    try:
        with contextlib.suppress(SystemExit):  # as code does that catches everything
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            termination.repeat()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM


HANGS = """
import asyncio, sys, time
from pegboard_server.settings import ServerConfig
from pegboard_server import serve, stopping
from pegboard_server.server import run_server
from pegboard_testing.contract_command import command_setup

stopping.LAST_S = 0.5

async def app(scope, receive, send):
    pass

async def main():
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
    config = ServerConfig(port=0, host="127.0.0.1")
    await run_server(app, config, on_ready=lambda _: print("ready", flush=True))
    print("stopped", flush=True)

serve.serve = lambda *_: asyncio.run(main())
serve.Serve(None, command_setup("serve")).run([])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_although_a_thread_hangs(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", HANGS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        assert program.stdout.readline() == "stopped\n"
        program.send_signal(number)
        _, errors = program.communicate(timeout=30)
    assert (
        program.returncode == 1
        and "time.sleep" not in errors
        and "most recent call first" in errors
    )


class FakeEngineProcess:
    folder = ""

    def stop(self) -> None:
        pass


def test_a_server_bounds_its_queue_and_llm_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEGBOARD_CONFIG", raising=False)
    command = serve.Serve(None, command_setup("serve"))
    seen = []
    monkeypatch.setattr(
        serve,
        "serve",
        lambda settings, on_started: seen.append(settings.engine.max_num_queued_reqs) or 0,
    )
    assert command.run(["model"]) == command.run(["model", "--max-num-queued-reqs", "7"]) == 0
    assert (
        seen == [serve.MAX_QUEUED, 7]
        and engine_settings("model", {}).engine.max_num_queued_reqs is None
    )
    with pytest.raises(ConfigError, match="max_num_queued_reqs must be at least 1"):
        command.run(["model", "--max-num-queued-reqs", "0"])
