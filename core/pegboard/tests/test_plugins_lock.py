"""The lock: what the parent resolved, as text; a child uses it without scanning, and notices other versions."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pegboard.errors import ConfigError, PluginBroken
from pegboard.interfaces.attention import AttentionNeed
from pegboard.plugins.discovery import Entry
from pegboard.plugins.lock import LockedDecision, PluginLock
from pegboard.plugins.policy import PluginPolicy
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

WORDS = st.text("abX9-_.*é", min_size=1, max_size=5)
ENTRIES = st.builds(Entry, WORDS, WORDS, WORDS, WORDS, WORDS, WORDS)
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=3)
OPTIONS = st.dictionaries(st.tuples(WORDS, WORDS), st.dictionaries(WORDS, VALUES, max_size=3), max_size=3)
PATTERNS = st.lists(WORDS, max_size=3).map(tuple)
LOCKS = st.builds(
    PluginLock,
    entries=st.lists(ENTRIES, max_size=3).map(tuple),
    hooks=st.lists(ENTRIES, max_size=2).map(tuple),
    policy=st.builds(PluginPolicy, allow=st.none() | PATTERNS, deny=PATTERNS, override=PATTERNS, options=OPTIONS),
    options=OPTIONS,
    decisions=st.lists(st.builds(LockedDecision, WORDS, WORDS, WORDS, st.none() | WORDS, WORDS), max_size=2).map(tuple),
)


@given(LOCKS)
@settings(suppress_health_check=[HealthCheck.too_slow])  # the first text of a process builds hypothesis' tables of characters
def test_json_round_trip(lock: PluginLock) -> None:
    again = PluginLock.from_json(lock.to_json())
    assert again == lock and again.to_json() == lock.to_json()


def test_format_and_values_are_checked() -> None:
    empty = PluginLock((), (), PluginPolicy())
    with pytest.raises(ConfigError, match="format 99"):
        PluginLock.from_json(empty.to_json().replace('"format":1', '"format":99'))
    with pytest.raises(ConfigError, match="not plain data"):
        dataclasses.replace(empty, options={("a", "b"): {"c": object()}}).to_json()


CHILD = """
import sys
import pegboard.plugins.discovery as discovery
def refuse(*_): raise SystemExit("the child scanned")
discovery.scan = discovery.scan_path = discovery._collect = refuse
from pegboard.interfaces.attention import AttentionNeed
from pegboard.plugins.lock import PluginLock
from pegboard.plugins.registry import Registry
registry = Registry.from_lock(PluginLock.from_json(sys.stdin.read()))
decision = registry.choose("attention", AttentionNeed(head_dim=64))
other = registry.choose("attention", AttentionNeed(head_dim=80), key="other")
built = registry.build(decision.require(), "setup")
print(decision.require().qualified, "locked" in decision.rank, other.require().qualified)
print(built["options"].block, "torch" in sys.modules)
"""

MODULE = """
from pydantic import BaseModel, ConfigDict
class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    block: int = 1
def implementation(options, setup): return {"options": options, "setup": setup}
def here(facts):
    from pegboard.interfaces.spec import Ok
    return Ok()
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDistributions:
    monkeypatch.syspath_prepend(str(tmp_path))
    fakes = FakeDistributions(tmp_path)
    fields = {"implementation": "locked_parts:implementation", "options": "locked_parts:Options", "supports": {"head_dim": True}}
    source = spec_source("attention", "A", probe="locked_parts:here", **fields)
    source += spec_source("attention", "B", tier="reference", **fields)
    points = {"attention": {"a": "locked_specs:A", "b": "locked_specs:B"}}
    fakes.add("acme", points, {"locked_specs": source, "locked_parts": MODULE})
    return fakes


def child(fakes: FakeDistributions, lock: PluginLock) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(fakes.root), str(Path(__file__).parents[1])])
    environment = {"PYTHONPATH": path, "PEGBOARD__ATTENTION__B__BLOCK": "99"}
    return subprocess.run([sys.executable, "-c", CHILD], input=lock.to_json(), capture_output=True, text=True, env=environment)


def test_child_repeats_the_parents_choice_without_a_scan(fakes: FakeDistributions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGBOARD__ATTENTION__B__BLOCK", "7")
    parent = Registry(fakes.scan(), PluginPolicy(deny=()))
    parent.choose("attention", AttentionNeed(head_dim=64), prefers=("b",))
    monkeypatch.undo()
    result = child(fakes, parent.lock())
    # The same need gets the parent's choice (b by preference), another need is chosen anew; options are the parent's.
    assert result.stdout.split() == ["acme:b", "True", "acme:a", "7", "False"], result.stderr


def test_child_refuses_another_version(fakes: FakeDistributions) -> None:
    registry = Registry(fakes.scan())
    registry.choose("attention", AttentionNeed(head_dim=64))
    lock = registry.lock()
    older = dataclasses.replace(lock, entries=tuple(dataclasses.replace(entry, version="0.9") for entry in lock.entries))
    result = child(fakes, older)
    assert result.returncode != 0 and "version 0.9 is locked, but 1.0 is installed here" in result.stderr
    stale = Registry.from_lock(older)
    with pytest.raises(PluginBroken, match="0.9 is locked, but 1.0"):
        stale.spec(stale.find("attention", "a"))
