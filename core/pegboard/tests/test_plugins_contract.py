"""The generic contract check accepts a good plugin, and its errors name what is wrong with a bad
one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.config.schema import PluginConfig
from pegboard.errors import PluginBroken
from pegboard.plugins import discovery
from pegboard.plugins.registry import Registry
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

PARTS = """
from pydantic import BaseModel, ConfigDict
from pegboard.interfaces.spec import Ok
class Good(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = 4
class Loose(BaseModel):
    model_config = ConfigDict(frozen=True)
class Thawed(BaseModel):
    model_config = ConfigDict(extra="forbid")
class Wrong(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int = "many"
class Rows:
    def add(self, row, params, seed, token_ids, num_prompt_tokens): pass
    def remove(self, rows): pass
    def sample(self, logits, step): pass
class Sampler(Rows):
    def __init__(self, options, setup): self.score = max
class Half(Rows):
    def __init__(self, options, setup): pass
def made(name, *bases): return type(name, bases, {"sample": max})
Made = made("Made", Rows)
class Odd(Sampler):
    def __init__(self, setup): pass
def probe(facts): return Ok()
def shy(facts): return None
def suits(need): return []
def suits_two(need, more): return []
"""


@pytest.fixture
def fakes(
    fake_distributions: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> FakeDistributions:
    fake_distributions.write(contract_parts=PARTS)
    monkeypatch.setattr(discovery, "scan", fake_distributions.scan)
    return fake_distributions


def check(fakes: FakeDistributions, head: str = "", **fields: object) -> None:
    given = {"implementation": "contract_parts:Sampler", **fields}
    fakes.add(
        "acme",
        {"sampler": {"s": "contract_spec:SPEC"}},
        {"contract_spec": head + spec_source("sampler", **given)},
    )
    check_entry(installed_entry("sampler", "s"))


def test_a_good_plugin_passes(fakes: FakeDistributions) -> None:
    check(
        fakes,
        options="contract_parts:Good",
        probe="contract_parts:probe",
        suits="contract_parts:suits",
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"api": "1.9"}, "1.9"),
        ({"api": "one"}, "major.minor"),
        ({"tier": "best"}, "tier 'best'"),
        ({"platforms": {"cpu"}}, "frozenset"),
        ({"replaces": ("known",)}, "distribution:name"),
        ({"implementation": "contract_parts:Odd"}, r"Implementation\(options, setup\)"),
        (
            {"implementation": "contract_parts:Half"},
            r"has no score, which pegboard.interfaces.sampler.Sampler needs",
        ),
        ({"implementation": "contract_parts:Made"}, "Made' has no score"),
        ({"flags": frozenset({"quick"})}, "flags has 'quick', which sampler does not know"),
        ({"supports": {"head_dim": True}}, "supports has 'head_dim', which sampler does not know"),
        ({"suits": "contract_parts:suits_two"}, "exactly one argument"),
        ({"probe": "contract_parts:shy"}, "returned None"),
        ({"options": "contract_parts:Loose"}, "forbid unknown keys"),
        ({"options": "contract_parts:Thawed"}, "frozen"),
        ({"options": "contract_parts:Sampler"}, "not a pydantic model"),
        ({"head": "import pydantic\n"}, "imports pydantic"),
        ({"head": "import logging\nlogging.getLogger().setLevel(5)\n"}, "the root logger"),
        ({"head": "for _ in range(3 * 10**6): pass\n"}, "budget 20 ms"),
    ],
)
def test_a_bad_plugin_is_told_why(
    fakes: FakeDistributions, fields: dict[str, object], match: str
) -> None:
    with pytest.raises((AssertionError, PluginBroken), match=match):
        check(fakes, **fields)  # type: ignore[arg-type]


def test_wrong_default_and_missing_part(fakes: FakeDistributions) -> None:
    with pytest.raises(ValueError, match="many"):
        check(fakes, options="contract_parts:Wrong")


def test_part_that_does_not_import(fakes: FakeDistributions) -> None:
    with pytest.raises(PluginBroken, match="contract_parts:Nothing"):
        check(fakes, implementation="contract_parts:Nothing")


def test_not_installed(fakes: FakeDistributions) -> None:
    with pytest.raises(AssertionError, match="not installed"):
        installed_entry("sampler", "s")


WORKERS = """
class Scheduler:
    def __init__(self, options, setup): pass
    def match(self, request, num_local_tokens): pass
    def allocated(self, request, blocks, num_external_tokens): pass
    def plan(self, batch): pass
    def released(self, request, blocks, why): pass
    def update(self, reports): pass
    def reset(self): pass
class Worker:
    def __init__(self, options, setup): pass
    def register(self, views, groups): pass
    def save(self, plan): pass
    def begin(self, plan): pass
    def end(self): pass
    def close(self): pass
class Bare:
    def __init__(self, options, setup): pass
"""


@pytest.mark.parametrize(
    ("worker", "match"),
    [
        ("connector_parts:Worker", ""),
        ("connector_parts:Nobody", "has no attribute .Nobody."),
        (
            "connector_parts:Bare",
            "worker 'connector_parts:Bare' has no register, save, begin, end, close",
        ),
        ("connector_none:Worker", "No module named 'connector_none'"),
    ],
)
def test_the_worker_half_of_a_connector(fakes: FakeDistributions, worker: str, match: str) -> None:
    spec = spec_source("kv_connector", implementation="connector_parts:Scheduler", worker=worker)
    fakes.add(
        "acme",
        {"kv_connector": {"k": "contract_spec:SPEC"}},
        {"contract_spec": spec, "connector_parts": WORKERS},
    )
    if not match:
        check_entry(installed_entry("kv_connector", "k"))
        return
    with pytest.raises((AssertionError, PluginBroken), match=match):
        check_entry(installed_entry("kv_connector", "k"))


CONNECTOR = (
    WORKERS.replace("Scheduler", "Whole").replace("Worker", "Other")
    + """
class Short(Whole):
    def match(self, request): pass
class Less:
    def __init__(self, options, setup): self.plan = self.allocated = self.released = self.update = self.reset = print
def function(options, setup): return Less(options, setup)
class Wide(Whole):
    def match(self, *anything, **more): pass
    def allocated(self, request, blocks, num_external_tokens, more=None): pass
    plan = print
"""  # noqa: E501
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Whole", ""),
        ("Wide", ""),
        ("Less", "has no match, which pegboard.interfaces.kv_connector.KVConnectorScheduler needs"),
        (
            "function",
            "has no match, which pegboard.interfaces.kv_connector.KVConnectorScheduler needs",
        ),
        (
            "Short",
            (
                r"has match\(request\), and it is called as match\(self, request: .*too many "
                r"positional arguments"
            ),
        ),
    ],
)
def test_what_does_not_fit_its_interface_is_not_built(
    fakes: FakeDistributions, tmp_path: Path, name: str, message: str
) -> None:
    """Also of an installed plugin, whose class no contract test has seen, and with the same words
    as for a file."""
    spec = spec_source(
        "kv_connector", implementation=f"built_parts:{name}", worker="built_parts:Other"
    )
    fakes.add(
        "acme",
        {"kv_connector": {"k": "built_spec:SPEC"}},
        {"built_spec": spec, "built_parts": CONNECTOR},
    )
    registry = Registry.discover(PluginConfig())
    entry = registry.find("kv_connector", "k")
    if not message:
        assert registry.build(entry, None) is not None
        return
    with pytest.raises(
        PluginBroken, match=rf"^kv_connector:k \(acme 1.0\): 'built_parts:{name}' {message}"
    ):
        registry.build(entry, None)
    if name == "Short":
        file = tmp_path / "mine.py"
        told = (
            "class Short(Whole):\n    plugin, spec_fields = 'kv_connector:mine', {'worker': "
            "'mine:Other'}"
        )
        file.write_text(CONNECTOR.replace("class Short(Whole):", told))
        registry = Registry.discover(PluginConfig(files=[str(file)]))
        with pytest.raises(PluginBroken, match=message):
            registry.build(registry.find("kv_connector", "mine"), None)
