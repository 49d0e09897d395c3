"""Plugins that fail in a running server: what the client sees, what the log says, and that the
plugin is named.

ROWS is the table of docs/reliability.md, which a test compares with it. Its cells are measured in
this process, with a model of two layers. What ends or stops a process is tested with real ones:
"exit" and what follows a stall depend only on the process.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from faulty_plugins import install
from faulty_server import WORDS, Faults, Served, faults, until  # noqa: F401  faults is a fixture
from server_process import MODEL, PATIENCE_S, Server, wait_until

from pegboard.errors import PegboardError
from pegboard.interfaces import KINDS
from pegboard.interfaces.executor import WorkerDeath

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
FAULTS = ("raise", "wrong type", "slow", "hang", "exit")

REQUEST = "the request fails"
OFF = "the sink is switched off"
ENGINE = "the engine ends"
OK = "no effect"
STALL = "/health is 503, then the engine ends"
SERVER = "the server ends"
START = "the server does not start"
WAIT = "the server does not become ready"
LEFT = "the plugin is left out"
TOLD = "the model reads the error"

IN_ENGINE = (ENGINE, ENGINE, OK, STALL, ENGINE)
IN_API = (REQUEST, REQUEST, OK, REQUEST, SERVER)
AT_START = (START, START, OK, WAIT, SERVER)
HOOK = (LEFT, OK, OK, WAIT, SERVER)

ROWS: dict[tuple[str, str], tuple[str, ...]] = {
    # (kind, call): the outcome of each of FAULTS
    ("model_source", "fetch"): AT_START,
    ("weight_loader", "describe"): AT_START,
    ("weight_loader", "tensors"): AT_START,
    ("platform", "start"): AT_START,
    ("executor", "start"): AT_START,
    ("quantization", "linear"): AT_START,
    ("quantization", "accept"): (START, OK, OK, WAIT, SERVER),
    ("attention", "kv_spec"): AT_START,
    ("builtin_tool", "start"): AT_START,
    ("hooks", "amend_config"): HOOK,
    ("hooks", "model_loaded"): HOOK,
    ("executor", "submit"): IN_ENGINE,
    ("model", "forward"): IN_ENGINE,
    ("model", "logits"): IN_ENGINE,
    ("attention", "plan"): IN_ENGINE,
    ("attention", "the bound call"): IN_ENGINE,
    ("quantization", "the bound call"): IN_ENGINE,
    ("kernel", "an op"): IN_ENGINE,
    ("sampler", "add"): (ENGINE, OK, OK, STALL, ENGINE),
    ("sampler", "sample"): IN_ENGINE,
    ("logits_processor", "apply"): IN_ENGINE,
    ("draft", "propose"): IN_ENGINE,
    ("kv_connector", "match"): IN_ENGINE,
    ("kv_connector", "plan"): IN_ENGINE,
    ("kv_connector", "end in the worker"): IN_ENGINE,
    ("scheduling_policy", "budget"): IN_ENGINE,
    ("scheduling_policy", "waiting"): IN_ENGINE,
    ("structured_output", "reject"): (REQUEST, REQUEST, OK, STALL, ENGINE),
    ("structured_output", "compile"): (REQUEST, REQUEST, OK, REQUEST, ENGINE),
    ("structured_output", "fill"): (REQUEST, OK, OK, STALL, ENGINE),
    ("structured_output", "accept"): (REQUEST, REQUEST, OK, STALL, ENGINE),
    ("metrics", "publish in the engine"): (OFF, OK, OK, STALL, ENGINE),
    ("metrics", "publish in the API process"): (OFF, OK, OK, OFF, SERVER),
    ("tokenizer", "render"): IN_API,
    ("tokenizer", "encode"): IN_API,
    ("tokenizer", "push"): IN_API,
    ("reasoning_parser", "feed"): IN_API,
    ("tool_parser", "feed"): IN_API,
    ("tool_parser", "finish"): IN_API,
    ("logits_processor", "validate"): IN_API,
    ("builtin_tool", "session"): IN_API,
    ("builtin_tool", "run"): (TOLD, TOLD, OK, TOLD, SERVER),
    ("lora_resolver", "resolve"): IN_API,
    ("api", "a route"): IN_API,
}

BLAMED_FOR = {
    ("attention", "the bound call"),
    ("quantization", "the bound call"),
    ("kernel", "an op"),
}
"""What these return goes into other plugins, which fail. PEGBOARD_CHECK=1 names the right one
(test_check_mode.py)."""

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<call calc_add>{"x": 1, "y": 2}</call>'
REQUESTS: dict[str, dict[str, Any]] = {
    "tool_parser": {**WORDS, "tools": [TOOL]},
    "tokenizer/encode": {"path": "/v1/completions", "prompt": "Hi", "max_tokens": 2},
    "builtin_tool": {
        "path": "/v1/responses",
        "input": "Hi",
        "tools": [{"type": "mcp", "server_label": "calc"}],
        "logit_bias": {"1": 100},  # the end token: calls are run only in a message that has ended
    },
    "api": {"path": "/probe/stats"},
}


def is_at_start(row: tuple[str, ...]) -> bool:
    return WAIT in row


def request_of(place: str) -> dict[str, Any]:
    """The request that reaches a call. Every constraint and adapter is a new one, because what was
    compiled or found is kept."""
    kind = place.partition("/")[0]
    if kind == "lora_resolver":
        return {**WORDS, "model": f"adapter{time.time_ns()}"}
    if kind == "structured_output":
        return {**WORDS, "structured_outputs": {"grammar": f"3:0:{time.time_ns()}"}}
    return REQUESTS.get(place) or REQUESTS.get(kind, {})


def named(text: str, place: str) -> bool:
    """Whether `text` names the plugin with its distribution and version."""
    return re.search(rf"{place.partition('/')[0]}:\S+ \(acme-faults 1\.0\)", text) is not None


async def outcome(served: Served, faults: Faults, place: str, fault: str) -> str:  # noqa: F811
    """Make a call fail in one request, and return what comes of it. Everything but "no effect" must
    name the plugin in the answer, and in the log with a traceback."""
    seen = faults.module.SEEN
    stall = ""
    if place == "builtin_tool/run":
        faults.module.SAYS.append(CALL)
    with faults.failing(place, fault):
        asked = asyncio.create_task(served.ask(**request_of(place)))
        await until(lambda: seen or asked.done(), f"{place} is called")
        assert seen, f"{place} was not called: {asked.result().text}"
        if fault == "hang":
            in_loop = seen[0][1]
            while not (asked.done() or in_loop or stall):
                stall = await served.stalled()
            if not in_loop:
                faults.module.RELEASE.set()
        answer = await asked
        if place == "metrics/publish in the API process":
            await until(
                lambda: "is off for" in faults.told() or fault == "wrong type", "the sink is off"
            )
        told = faults.told()
    if stall:
        assert f"plugin {place.partition('/')[0]}:" in stall and named(stall, place), (place, stall)
        return STALL
    if served.client.errored or answer.status_code != 200:
        assert answer.status_code in (500, 400), answer.text
        # the constraint is to blame: it takes too long
        if (place, fault) != ("structured_output/compile", "hang"):
            if fault != "wrong type" or tuple(place.split("/")) not in BLAMED_FOR:
                assert named(answer.text, place) and named(told, place), (
                    place,
                    fault,
                    answer.text,
                    told,
                )
            assert "File " in told, (place, fault, told)
    if served.client.errored:
        return ENGINE
    if "calc_add failed" in answer.text:
        assert (
            answer.status_code == 200
            and named(answer.text, place)
            and named(told, place)
            and "File " in told
        ), told
        return TOLD
    if "is off for the rest" in told:
        assert named(told, place) and answer.status_code == 200, told
        return OFF
    again = await served.ask()
    assert again.status_code == 200, (place, fault, again.text)
    return OK if answer.status_code == 200 else REQUEST


def test_every_call_that_fails_while_serving(faults: Faults) -> None:  # noqa: F811
    cases = [
        (f"{kind}/{call}", fault, row[FAULTS.index(fault)])
        for (kind, call), row in ROWS.items()
        if not is_at_start(row)
        for fault in ("raise", "wrong type", "hang")
    ]
    cases.sort(key=lambda case: case[2] in (ENGINE, OFF))
    wrong: list[Any] = []

    async def serve() -> None:
        """Until a fault has changed the server."""
        async with faults.server() as served:
            while cases:
                place, fault, expected = cases.pop(0)
                try:
                    found = await outcome(served, faults, place, fault)
                except AssertionError as error:
                    found = f"wrong: {error}"
                wrong.extend([(place, fault, found)] if found != expected else [])
                if found in (ENGINE, OFF) or served.client.errored:
                    return

    while cases:
        asyncio.run(serve())
    assert not wrong, "\n".join(map(str, wrong))


def test_everything_slow_is_only_slow(faults: Faults) -> None:  # noqa: F811
    """One request of each form, with all calls slow at once. All of them were made, in the process
    that the table says."""

    async def serve() -> set[tuple[str, bool]]:
        async with faults.server() as served:
            with faults.failing("*", "slow"):
                faults.module.SAYS.append(CALL)
                for place in (
                    "builtin_tool/run",
                    "tool_parser/feed",
                    "structured_output/fill",
                    "tokenizer/encode",
                    "lora_resolver/resolve",
                ):
                    more = (
                        {"structured_outputs": {"grammar": "3:0:3"}}
                        if place.startswith("structured")
                        else {}
                    )
                    answer = await served.ask(**{**request_of(place), **more})
                    assert answer.status_code == 200, (place, answer.text)
                assert (await served.ask("/probe/stats")).status_code == 200
                return set(faults.module.SEEN)

    seen = {tuple(place.split("/")) for place, _ in asyncio.run(serve())}
    assert seen == {place for place, row in ROWS.items() if not is_at_start(row)}


def test_what_fails_at_the_start_is_named(faults: Faults) -> None:  # noqa: F811
    wrong: list[Any] = []
    for (kind, call), row in ROWS.items():
        if not is_at_start(row):
            continue
        for fault, expected in zip(("raise", "wrong type", "slow"), row, strict=False):
            found = OK
            with faults.failing(f"{kind}/{call}", fault):
                try:
                    asyncio.run(_start(faults))
                except Exception as error:  # noqa: BLE001  it is judged here
                    found = START
                    is_named = isinstance(error, PegboardError) and named(str(error), kind)
                    wrong.extend([] if is_named else [(kind, call, fault, repr(error))])
                else:
                    told = faults.told()
                    found = (
                        LEFT
                        if "is left out" in told and named(told, kind) and "File " in told
                        else OK
                    )
                wrong.extend([] if faults.module.SEEN else [(kind, call, "was not called")])
            wrong.extend([(kind, call, fault, found)] if found != expected else [])
    assert not wrong, "\n".join(map(str, wrong))


async def _start(faults: Faults) -> None:  # noqa: F811
    async with faults.server():
        pass


# --- real processes -------------------------------------------------------------------------------

FLAGS = (
    "--engine-stall-s",
    "2",
    "--engine-end-s",
    "6",
    "--plugin-call-s",
    "1",
    "--max-model-len",
    "64",
    "--max-num-seqs",
    "4",
    "--kv-cache-memory-bytes",
    "1048576",
    "--device",
    "acme",
    "--dtype",
    "float32",
    "--distributed-executor-backend",
    "acme",
    "--scheduling-policy",
    "acme",
    "--sampler",
    "acme",
    "--attention-backend",
    "acme",
    "--plugins-enable",
    "api:probe",
    "--plugins-deny",
    "pegboard-quantization-integer",
)


class Faulty:
    """A server whose plugins fail on demand."""

    def __init__(self, folder: Path) -> None:
        site = folder / "site"
        site.mkdir()
        install(site)
        self.switch = folder / "fault"
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        self.server = Server("acme:tiny", folder, *FLAGS, PYTHONPATH=path, FAULT=str(self.switch))

    @contextmanager
    def failing(self, place: str, fault: str) -> Iterator[None]:
        """In the block, the call at `place` fails."""
        self.switch.write_text(f"{place}:{fault}")
        try:
            yield
        finally:
            self.switch.unlink()

    def ask(self, path: str = "/v1/chat/completions") -> httpx.Response | None:
        """Returns the answer, or None if the connection broke."""
        try:
            if path.startswith("/probe"):
                return httpx.get(self.server.url + path, timeout=PATIENCE_S)
            return httpx.post(
                self.server.url + path, json={"model": MODEL, **WORDS}, timeout=PATIENCE_S
            )
        except httpx.TransportError:
            return None


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Faulty]:
    made = Faulty(tmp_path)
    made.server.wait_until_ready()
    yield made
    made.server.stop()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("place", "fault"),
    [("model/forward", "raise"), ("model/forward", "exit"), ("api/a route", "exit")],
)
def test_faults_that_end_the_server(faulty: Faulty, place: str, fault: str) -> None:
    """The request gets an error that names the plugin, or says how the process ended. The server
    exits and leaves nothing."""
    with faulty.failing(place, fault):
        answer = faulty.ask("/probe/stats" if place.startswith("api") else "/v1/chat/completions")
        code = faulty.server.wait()
    told = faulty.server.log.read_text()
    faulty.server.check_nothing_left()
    if place.startswith("api"):  # os._exit: nothing can say more
        assert (answer, code) == (None, 7)
        return
    assert code == 1 and answer is not None and answer.status_code == 500, (answer, told)
    if fault == "exit":
        assert "the engine process exited (code 7)" in answer.text
    else:
        assert named(answer.text, place) and named(told, place) and "File " in told, (
            answer.text,
            told,
        )


def test_an_engine_that_does_not_run_is_noticed_and_ended(faulty: Faulty) -> None:
    """SIGSTOP: /health answers 503 after the limit, and 200 again when the process runs again. New
    requests get 503. A plugin that hangs: the same, then the engine is ended, and the request gets
    an error that names the plugin."""
    server = faulty.server
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: server.status("/health") == 503, "the stopped engine is noticed")
    answer = faulty.ask()
    assert answer is not None and answer.status_code == 503 and "does not run" in answer.text
    os.kill(engine, signal.SIGCONT)
    wait_until(lambda: server.status("/health") == 200, "the engine answers again")
    answer = faulty.ask()
    assert answer is not None and answer.status_code == 200
    with faulty.failing("model/forward", "hang"):
        answer = faulty.ask()
        assert server.wait() == 1
    told = server.log.read_text()
    server.check_nothing_left()
    assert (
        answer is not None and answer.status_code == 500 and named(answer.text, "model/forward")
    ), (answer, told)
    assert (
        "the engine is stalled" in told
        and "the engine was ended" in told
        and named(told, "model/forward")
        and "File " in told
    )


def table() -> str:
    """The table of docs/reliability.md."""
    lines = ["| kind | call | " + " | ".join(FAULTS) + " |", "|" + "---|" * (len(FAULTS) + 2)]
    lines += [f"| `{kind}` | {call} | {' | '.join(row)} |" for (kind, call), row in ROWS.items()]
    return "\n".join(lines)


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text(), f"docs/reliability.md must hold this table:\n{table()}"


def test_the_table_has_every_kind() -> None:
    """Kinds whose code runs in a server that generates text, and hooks. Model families are data,
    and commands are not servers. Poolers: tests/parity/test_pooling_parity.py. Collectives: their
    contract, and test_lifecycle.py for ranks that die or hang. Processors of images:
    core/pegboard/tests/test_media.py. Encoder connectors:
    tests/parity/test_encoder_connector.py. IO processors: tests/parity/test_io_processor.py.
    Weight transfers: tests/parity/test_weight_transfer.py."""
    left_out = {"model_family", "command", "pooler", "io_processor", "collective"}
    left_out |= {"multimodal_processor", "encoder_connector", "weight_transfer"}
    assert {kind for kind, _ in ROWS} == set(KINDS) - left_out | {"hooks"}


def test_an_executor_that_reports_a_dead_worker_ends_an_idle_engine(faults: Faults) -> None:  # noqa: F811
    async def serve() -> None:
        async with faults.server() as served:
            await served.ask()
            death = WorkerDeath(0, "out of memory")
            threading.Thread(target=served.link.engine._life._on_death, args=(death,)).start()
            await until(
                lambda: not served.client.health().is_alive, "the client hears of the death"
            )
            told = "executor:acme (acme-faults 1.0) reports that worker 0 died: out of memory"
            assert (
                told in (served.client.health().reason or "") and "the engine died" in faults.told()
            )

    asyncio.run(serve())
