"""Plugins that fail in a running server: what the client sees, what the log says, and that the plugin is named.

OUTCOMES is the table of docs/reliability.md, which a test compares with it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import MODEL, PATIENCE_S, PROBE_MODULE, PROBE_SOURCE, Server, wait_until

from pegboard_testing.fake_distributions import FakeDistributions

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
LIMITS = ("--engine-stall-s", "2", "--engine-end-s", "6", "--plugin-call-s", "1")
FAULTS = ("raise", "wrong type", "slow", "hang", "exit")

REQUEST, OFF, ENGINE, OK = "the request fails", "the sink is switched off", "the engine ends", "no effect"
STALL, SERVER = "/health is 503, then the engine ends", "the server ends"

OUTCOMES: dict[tuple[str, str], tuple[str, ...]] = {
    # (kind, method): the outcome of each of FAULTS
    ("scheduling_policy", "budget"): (ENGINE, ENGINE, OK, STALL, ENGINE),
    ("logits_processor", "apply"): (ENGINE, ENGINE, OK, STALL, ENGINE),
    ("logits_processor", "validate"): (REQUEST, REQUEST, OK, REQUEST, SERVER),
    ("metrics", "publish in the engine"): (OFF, OK, OK, STALL, ENGINE),
    ("metrics", "publish in the API process"): (OFF, OK, OK, OFF, SERVER),
    ("reasoning_parser", "feed"): (REQUEST, REQUEST, OK, REQUEST, SERVER),
    ("api", "a route"): (REQUEST, REQUEST, OK, REQUEST, SERVER),
}
NAMES = {
    "scheduling_policy": "scheduling_policy:acme",
    "logits_processor": "logits_processor:acme",
    "metrics": "metrics:acme",
    "reasoning_parser": "reasoning_parser:acme",
    "api": "api:probe",
}

SPECS = """
from pegboard.interfaces.logits_processor import LogitsProcessorSpec
from pegboard.interfaces.metrics import MetricsSpec
from pegboard.interfaces.output_parser import OutputParserSpec
from pegboard.interfaces.scheduling_policy import SchedulingPolicySpec

PROCESSOR = LogitsProcessorSpec(api="1.0", implementation="acme_processor:Processor", validate="acme_validate:validate")
POLICY = SchedulingPolicySpec(api="1.0", implementation="acme_policy:Policy")
SINK = MetricsSpec(api="1.0", implementation="acme_sink:Sink")
API_SINK = MetricsSpec(api="1.0", implementation="acme_api_sink:Sink", process="api")
PARSER = OutputParserSpec(api="1.0", implementation="acme_parser:Parser")
"""

FAULT = '''
import os, time

def fault(here):
    """Do what the file FAULT says, "place:fault", if it is meant for this place."""
    path = os.environ["FAULT"]
    place, _, what = open(path).read().partition(":") if os.path.exists(path) else ("", "", "")
    if place != here:
        return False
    if what == "raise":
        raise ZeroDivisionError("no luck")
    if what == "slow":
        time.sleep(0.2)
    while what == "hang":
        pass
    if what == "exit":
        os._exit(7)
    return what == "wrong type"
'''

PROCESSOR = """
from acme_fault import fault

class Processor:
    argmax_invariant = False

    def __init__(self, options, setup): ...

    def update(self, added, removed): ...

    def apply(self, logits, rows, depth):
        return "nothing" if fault("logits_processor/apply") else logits
"""

VALIDATE = """
from acme_fault import fault

def validate(params):
    return 5 if fault("logits_processor/validate") else None
"""

POLICY = """
from acme_fault import fault
from pegboard_testing.fake_policy import FakePolicy

class Policy(FakePolicy):
    def __init__(self, options, setup):
        super().__init__(setup)

    def budget(self, load):
        return 17 if fault("scheduling_policy/budget") else super().budget(load)

    def observe(self, load, times): ...
"""

SINK = """
from acme_fault import fault

class Sink:
    def __init__(self, options, setup): ...

    def declare(self, metrics): ...

    def close(self): ...

    def publish(self, sample):
        return 5 if fault("metrics/PLACE") else None
"""

PARSER = """
from acme_fault import fault
from pegboard_testing.fake_parsers import FakeReasoningParser

class Parser(FakeReasoningParser):
    def feed(self, text, token_ids):
        return None if fault("reasoning_parser/feed") else super().feed(text, token_ids)
"""

PROBE = PROBE_SOURCE.replace(
    "        return JSONResponse(",
    "        from acme_fault import fault\n        if fault('api/a route'):\n            return 5\n        return JSONResponse(",
)

MODULES = {
    "acme_specs": SPECS,
    "acme_fault": FAULT,
    "acme_processor": PROCESSOR,
    "acme_validate": VALIDATE,
    "acme_policy": POLICY,
    "acme_sink": SINK.replace("PLACE", "publish in the engine"),
    "acme_api_sink": SINK.replace("PLACE", "publish in the API process"),
    "acme_parser": PARSER,
    PROBE_MODULE: PROBE,
}
ENTRIES = {
    "logits_processor": {"acme": "acme_specs:PROCESSOR"},
    "scheduling_policy": {"acme": "acme_specs:POLICY"},
    "metrics": {"acme": "acme_specs:SINK", "acme-api": "acme_specs:API_SINK"},
    "reasoning_parser": {"acme": "acme_specs:PARSER"},
    "api": {"probe": f"{PROBE_MODULE}:SPEC"},
}
FLAGS = (
    *LIMITS, "--logits-processors", "acme", "--scheduling-policy", "acme", "--reasoning-parser", "acme",
    "--plugins-enable", "api:probe", "--plugins-enable", "metrics:acme", "--plugins-enable", "metrics:acme-api",
)  # fmt: skip


class Faulty:
    """A server whose plugins fail on demand."""

    def __init__(self, model: Path, folder: Path) -> None:
        site = folder / "site"
        site.mkdir()
        FakeDistributions(site).add("acme-faults", ENTRIES, MODULES, requires=["pegboard", "starlette"])
        self.switch = folder / "fault"
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        self.server = Server(model, folder, *FLAGS, PYTHONPATH=path, FAULT=str(self.switch))

    @contextmanager
    def failing(self, place: str, fault: str) -> Iterator[None]:
        """In the block, the plugin at `place` fails."""
        self.switch.write_text(f"{place}:{fault}")
        try:
            yield
        finally:
            self.switch.unlink()

    def ask(self, **fields: Any) -> httpx.Response | None:
        """Returns the answer to a chat, or None if the connection broke."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **fields}
        try:
            return httpx.post(f"{self.server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        except httpx.TransportError:
            return None

    def probe(self) -> httpx.Response | None:
        try:
            return httpx.get(f"{self.server.url}/probe/stats", timeout=PATIENCE_S)
        except httpx.TransportError:
            return None


@pytest.fixture
def start_faulty(smollm2_gguf: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[Faulty] = []

    def start() -> Faulty:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Faulty(smollm2_gguf, folder))
        started[-1].server.wait_until_ready()
        return started[-1]

    yield start
    for faulty in started:
        faulty.server.stop()


def cases(*outcomes: str) -> list[tuple[str, str, str]]:
    return [
        (f"{kind}/{method}", fault, outcome)
        for (kind, method), row in OUTCOMES.items()
        for fault, outcome in zip(FAULTS, row, strict=True)
        if outcome in outcomes
    ]


def named(text: str, place: str) -> bool:
    """Whether `text` names the plugin with its distribution and version."""
    return re.search(re.escape(NAMES[place.partition("/")[0]]) + r"\S* \(acme-faults 1\.0\)", text) is not None


def test_faults_that_end_only_one_request(start_faulty: Any) -> None:
    """The client gets an error that names the plugin, the log has the traceback, and the next request is answered."""
    faulty = start_faulty()
    for place, fault, outcome in cases(REQUEST, OK):
        before = len(faulty.server.log.read_text())
        with faulty.failing(place, fault):
            answer = faulty.probe() if place.startswith("api") else faulty.ask()
        assert answer is not None, (place, fault)
        told = faulty.server.log.read_text()[before:]
        if outcome == OK:
            assert answer.status_code == 200, (place, fault, answer.text, told)
            continue
        assert answer.status_code == 500, (place, fault, answer.text)
        assert named(answer.text, place), (place, fault, answer.text)
        assert named(told, place) and "File " in told, (place, fault, told)
        assert faulty.ask().status_code == 200, (place, fault)
    for place, fault, _ in cases(OFF):
        before = len(faulty.server.log.read_text())
        with faulty.failing(place, fault):
            assert faulty.ask().status_code == 200
            wait_until(lambda seen=before: "is off for the rest" in faulty.server.log.read_text()[seen:], f"{place} {fault}")
        if place.endswith("API process"):
            break  # the sink stays off
    assert faulty.server.status("/health") == 200


@pytest.mark.parametrize(("place", "fault", "outcome"), cases(ENGINE, STALL, SERVER))
def test_faults_that_end_the_server(start_faulty: Any, place: str, fault: str, outcome: str) -> None:
    """The request gets an error that names the plugin. The server exits with 1 and leaves nothing."""
    faulty = start_faulty()
    with faulty.failing(place, fault):
        answer = faulty.probe() if place.startswith("api") else faulty.ask()
        code = faulty.server.wait()
    told = faulty.server.log.read_text()
    faulty.server.check_nothing_left()
    if outcome == SERVER:  # os._exit: nothing can say more
        assert (answer, code) == (None, 7)
        return
    assert code == 1 and answer is not None and answer.status_code == 500, (answer, told)
    if fault == "exit":
        assert "the engine process exited (code 7)" in answer.text
        return
    assert named(answer.text, place), (answer.text, told)
    assert named(told, place) and "File " in told, told
    if outcome == STALL:
        assert "the engine is stalled" in told and "the engine was ended" in told


def test_a_stopped_engine_process_is_noticed(start_faulty: Any) -> None:
    """SIGSTOP: /health answers 503 after the limit, and 200 again when the process runs again. New requests get 503."""
    faulty = start_faulty()
    server = faulty.server
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: server.status("/health") == 503, "the stopped engine is noticed")
    answer = faulty.ask()
    assert answer is not None and answer.status_code == 503 and "does not run" in answer.text
    os.kill(engine, signal.SIGCONT)
    wait_until(lambda: server.status("/health") == 200, "the engine answers again")
    assert faulty.ask().status_code == 200
    os.kill(engine, signal.SIGSTOP)
    assert server.wait() == 1
    server.check_nothing_left()


def table() -> str:
    """The table of docs/reliability.md."""
    lines = ["| kind | call | " + " | ".join(FAULTS) + " |", "|" + "---|" * (len(FAULTS) + 2)]
    lines += [f"| `{kind}` | {method} | {' | '.join(row)} |" for (kind, method), row in OUTCOMES.items()]
    return "\n".join(lines)


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text(), f"docs/reliability.md must hold this table:\n{table()}"
