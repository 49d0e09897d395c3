"""The lock: a child uses the parent's choices without a scan, and notices other versions."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pegboard.config.schema import PluginConfig
from pegboard.errors import PluginBroken
from pegboard.interfaces.attention import AttentionNeed
from pegboard.plugins.registry import PluginLock, Registry
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

CHILD = """
import pickle, sys
import pegboard.installed as installed
import pegboard.plugins.discovery as discovery
def refuse(*_): raise SystemExit("the child scanned")
discovery.scan = discovery.scan_path = installed.distributions = refuse
from pegboard.interfaces.attention import AttentionNeed
from pegboard.plugins.registry import Registry
registry = Registry.from_lock(pickle.load(sys.stdin.buffer))
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
class Implementation(dict): kv_spec = attach = bind = plan = print
def implementation(options, setup): return Implementation(options=options, setup=setup)
def here(facts):
    from pegboard.interfaces.spec import Ok
    return Ok()
"""


@pytest.fixture
def fakes(fake_distributions: FakeDistributions) -> FakeDistributions:
    fields = {
        "implementation": "locked_parts:implementation",
        "options": "locked_parts:Options",
        "supports": {"head_dim": True},
    }
    source = spec_source("attention", "A", probe="locked_parts:here", **fields)
    source += spec_source("attention", "B", tier="reference", **fields)
    points = {"attention": {"a": "locked_specs:A", "b": "locked_specs:B"}}
    fake_distributions.add("acme", points, {"locked_specs": source, "locked_parts": MODULE})
    return fake_distributions


def child(fakes: FakeDistributions, lock: PluginLock) -> subprocess.CompletedProcess[bytes]:
    path = os.pathsep.join([str(fakes.root), str(Path(__file__).parents[1])])
    environment = {"PYTHONPATH": path, "PEGBOARD__ATTENTION__B__BLOCK": "99"}
    return subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps(lock),
        capture_output=True,
        env=environment,
    )


def test_child_repeats_the_parents_choice_without_a_scan(
    fakes: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEGBOARD__ATTENTION__B__BLOCK", "7")
    parent = Registry(fakes.scan(), PluginConfig(deny=[]))
    parent.choose("attention", AttentionNeed(head_dim=64), prefers=("b",))
    monkeypatch.undo()
    result = child(fakes, parent.lock())
    # The same need gets the parent's choice (b, by preference). For another need the child chooses.
    # Options are the parent's.
    assert result.stdout.split() == [b"acme:b", b"True", b"acme:a", b"7", b"False"], result.stderr


@given(st.sampled_from([64, 80, 96]), st.sampled_from(["", "other"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_the_same_question_gets_the_parents_answer(
    fakes: FakeDistributions, head_dim: int, key: str
) -> None:
    parent = Registry(fakes.scan())
    parent.choose("attention", AttentionNeed(head_dim=64), prefers=("b",))
    made = Registry.from_lock(parent.lock()).choose(
        "attention", AttentionNeed(head_dim=head_dim), key=key
    )
    is_same = (head_dim, key) == (64, "")
    assert made.require().name == ("b" if is_same else "a") and ("locked" in made.rank) == is_same


def test_child_refuses_another_version(fakes: FakeDistributions) -> None:
    registry = Registry(fakes.scan())
    registry.choose("attention", AttentionNeed(head_dim=64))
    lock = registry.lock()
    entries = tuple(dataclasses.replace(entry, version="0.9") for entry in lock.scan.entries)
    older = dataclasses.replace(
        lock, scan=dataclasses.replace(lock.scan, entries=entries), decisions=()
    )
    result = child(fakes, older)
    assert (
        result.returncode != 0
        and b"version 0.9 is locked, but 1.0 is installed on this host" in result.stderr
    )
    stale = Registry.from_lock(older)
    with pytest.raises(PluginBroken, match="0.9 is locked, but 1.0"):
        stale.spec(stale.find("attention", "a"))
