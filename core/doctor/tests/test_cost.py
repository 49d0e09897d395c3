"""`pegboard plugins cost`."""

from __future__ import annotations

import json

import pytest

from pegboard.cli.main import command_setup
from pegboard.errors import ConfigError
from pegboard.installed import Entry
from pegboard.plugins import discovery
from pegboard_doctor import cost
from pegboard_doctor.cost import Cost
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

LARGE = "import time\nkept = b'x' * (40 << 20)\ntime.sleep(0.2)\nclass Sampler: ...\n"


def run(*words: str) -> int:
    return Cost(None, command_setup("plugins-cost")).run(words)


def test_costs_are_measured_alone(
    fake_distributions: FakeDistributions,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(discovery, "scan", fake_distributions.scan)
    specs = "".join(
        spec_source("sampler", name.upper(), implementation=f"cost_{name}:Sampler")
        for name in ("small", "large", "broken", "ends")
    )
    points = {name: f"cost_specs:{name.upper()}" for name in ("small", "large", "broken", "ends")}
    fake_distributions.add("acme", {"sampler": points}, {"cost_specs": specs})
    fake_distributions.write(
        cost_small="class Sampler: ...\n",
        cost_large=LARGE,
        cost_broken="import nothing_like_it",
        cost_ends="import os; os._exit(3)",
    )
    assert run("sampler", "--json") == 1
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert found["large"]["code_ms"] > 200 > found["small"]["code_ms"]
    assert found["large"]["kilobytes"] > 40_000 > found["small"]["kilobytes"]
    assert (
        "nothing_like_it" in found["broken"]["error"]
        and "ended the process" in found["ends"]["error"]
    )
    assert run("sampler:small") == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 and table[1].startswith("sampler:small ") and " MB " in table[1]
    with pytest.raises(ConfigError, match="no plugin sampler:smal is installed"):
        run("sampler:smal")


def test_a_hanging_import_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry("sampler", "hangs", "acme", "1.0", "nothing:SPEC", "pegboard.sampler.v1")

    def hang(entry: Entry) -> cost.ImportCost:
        import time

        time.sleep(20)
        raise AssertionError

    monkeypatch.setattr(cost, "LIMIT_S", 1)
    monkeypatch.setattr(cost, "_imported", hang)
    assert cost._alone(entry).error == "it takes more than 1 s"
