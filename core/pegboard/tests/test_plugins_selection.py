"""Names, gates, ranking and errors of the registry."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.config.schema import PluginConfig
from pegboard.errors import (
    PluginBroken,
    PluginConflict,
    PluginFailure,
    PluginNotFound,
    PluginUnsuitable,
)
from pegboard.installed import Entry
from pegboard.interfaces.attention import AttentionNeed, AttentionSpec
from pegboard.interfaces.spec import TIERS, AtMost, Multiple, Need, Tier, unmet
from pegboard.plugins.discovery import Scan
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

PROBES = """
from pegboard.interfaces.spec import Absent, Broken, Ok
calls = []
def ok(facts): calls.append(facts); return Ok({"cores": facts.num_cpus})
def absent(facts): return Absent("no such device")
def broken(facts): return Broken("driver 535, need 550")
def raising(facts): raise RuntimeError("boom")
def nonsense(facts): return True
def picky(need): return ["only on Sundays"]
def rude(need): raise KeyError("x")
class Implementation:
    def __init__(self, options, setup):
        if setup == "explode": raise OSError("disk on fire")
        self.options, self.setup = options, setup
        self.add = self.remove = self.sample = self.score = print
number = 7
"""


@pytest.fixture
def fakes(fake_distributions: FakeDistributions) -> FakeDistributions:
    fake_distributions.write(probes=PROBES)
    return fake_distributions


def add(
    fakes: FakeDistributions, kind: str, name: str, distribution: str = "", **fields: object
) -> None:
    distribution = distribution or f"d-{name.lower().replace('*', 'any')}"
    module = (
        f"spec_{kind}_{distribution}_{name}".replace("-", "_").replace("*", "any").replace(".", "_")
    )
    fakes.add(distribution, {kind: {name: f"{module}:SPEC"}}, {module: spec_source(kind, **fields)})


def test_find_by_short_and_long_name(fakes: FakeDistributions) -> None:
    add(fakes, "sampler", "fast", "acme-fast")
    registry = Registry(fakes.scan())
    assert (
        registry.find("sampler", "fast")
        == registry.find("sampler", "Acme_Fast:fast")
        == registry.entries("sampler")[0]
    )
    with pytest.raises(PluginNotFound, match="did you mean 'fast'"):
        registry.find("sampler", "fats")
    with pytest.raises(PluginNotFound, match="acme-fast:fast"):
        registry.find("sampler", "acme-fost:fast")


def test_conflict_is_an_error_only_when_the_short_name_is_used(fakes: FakeDistributions) -> None:
    add(fakes, "sampler", "fast", "b-dist")
    add(fakes, "sampler", "fast", "a-dist")
    registry = Registry(fakes.scan())
    with pytest.raises(PluginConflict, match="'a-dist:fast' or 'b-dist:fast'"):
        registry.find("sampler", "fast")
    assert registry.find("sampler", "b-dist:fast").distribution == "b-dist"
    assert registry.choose("sampler", Need()).require().distribution == "a-dist"
    denied = Registry(fakes.scan(), PluginConfig(deny=["a-dist"]))
    assert denied.find("sampler", "fast").distribution == "b-dist"


def test_replacing_needs_the_plugin_and_the_operator(fakes: FakeDistributions) -> None:
    add(fakes, "sampler", "fast", "known")
    add(fakes, "sampler", "faster", "acme", replaces=("known:fast",))
    quiet = Registry(fakes.scan())
    assert quiet.find("sampler", "fast").distribution == "known"
    registry = Registry(fakes.scan(), PluginConfig(override=["acme"]))
    assert registry.find("sampler", "fast").distribution == "acme"
    assert registry.find("sampler", "known:fast").distribution == "known"
    decision = registry.choose("sampler", Need())
    assert decision.require().distribution == "acme"
    assert "replaced by acme:faster" in decision.table()
    wishful = Registry(fakes.scan(), PluginConfig(override=["known"]))
    assert wishful.find("sampler", "fast").distribution == "known"


def test_same_name_conflict_is_solved_by_override(fakes: FakeDistributions) -> None:
    add(fakes, "sampler", "fast", "known")
    add(fakes, "sampler", "fast", "acme", replaces=("known:fast",))
    assert (
        Registry(fakes.scan(), PluginConfig(override=["acme"])).find("sampler", "fast").distribution
        == "acme"
    )


def test_every_gate_leaves_its_reason(fakes: FakeDistributions) -> None:
    add(fakes, "attention", "blocked")
    add(fakes, "attention", "newer", api="1.7")
    add(fakes, "attention", "gone", probe="probes:absent")
    add(fakes, "attention", "elsewhere", platforms=frozenset({"cuda"}))
    add(fakes, "attention", "narrow", supports={"head_dim": {64, 128}})
    add(fakes, "attention", "picky", suits="probes:picky", supports={"head_dim": {80}})
    add(fakes, "attention", "slow", tier="reference", supports={"head_dim": True})
    add(fakes, "attention", "good", supports={"head_dim": True}, probe="probes:ok")
    fakes.add("d-future", {"pegboard.attention.v2": {"future": "x:Y"}})
    registry = Registry(fakes.scan(), PluginConfig(deny=["attention:blocked"]))
    decision = registry.choose("attention", AttentionNeed(head_dim=80, platform="cpu"))
    found = {c.entry.name: (c.gate, c.reason) for c in decision.candidates}
    assert found["blocked"] == ("allowed", "denied by 'attention:blocked' in plugins.deny")
    assert (
        found["newer"][0] == "compatible"
        and "1.7" in found["newer"][1]
        and "1.0" in found["newer"][1]
    )
    assert found["gone"] == ("available", "no such device")
    assert found["elsewhere"] == ("available", "runs on cuda, not on cpu")
    assert found["narrow"] == ("suitable", "head_dim 80 not in {128, 64}")
    assert found["picky"] == ("suitable", "only on Sundays")
    assert found["slow"] == ("ranked", "tier reference < portable")
    assert found["future"][0] == "discovered"
    assert found["good"] == ("selected", "")
    assert decision.line().startswith(
        "attention → good  d-good 1.0  (rank: tier portable; not slow (outranked)"
    )
    assert "\n" not in decision.line() and all(name in decision.table() for name in found)
    assert registry.decisions["attention", ""] is decision


def test_explicit_never_falls_back(fakes: FakeDistributions) -> None:
    add(fakes, "attention", "narrow", supports={"head_dim": {64}}, tier="vendor")
    add(fakes, "attention", "gone", probe="probes:absent")
    add(fakes, "attention", "damaged", probe="probes:broken")
    add(fakes, "attention", "wide", supports={"head_dim": True}, tier="reference")
    registry = Registry(fakes.scan())
    need = AttentionNeed(head_dim=80)
    with pytest.raises(
        PluginUnsuitable, match=r"head_dim 80 not in \{64\}; what would work here: wide"
    ):
        registry.choose("attention", need, explicit="narrow")
    with pytest.raises(PluginUnsuitable, match="no such device"):
        registry.choose("attention", need, explicit="gone")
    with pytest.raises(PluginBroken, match="driver 535"):
        registry.choose("attention", need, explicit="damaged")
    with pytest.raises(PluginNotFound):
        registry.choose("attention", need, explicit="wied")
    decision = registry.choose("attention", AttentionNeed(head_dim=64), explicit="wide")
    assert decision.require().name == "wide" and decision.rank == "asked for"
    assert registry.choose("attention", need, explicit="auto").require().name == "wide"


def test_nothing_suits(fakes: FakeDistributions) -> None:
    add(fakes, "attention", "narrow", supports={"head_dim": {64}})
    registry = Registry(fakes.scan())
    with pytest.raises(PluginUnsuitable, match="narrow .*head_dim 80"):
        registry.choose("attention", AttentionNeed(head_dim=80))
    assert registry.choose("attention", AttentionNeed(head_dim=80), required=False).winner is None
    with pytest.raises(PluginNotFound):
        registry.choose("sampler", Need())


@pytest.mark.parametrize("probe", ["broken", "raising", "nonsense"])
def test_broken_platform_is_fatal_unless_another_is_named_or_it_is_denied(
    fakes: FakeDistributions, probe: str
) -> None:
    add(fakes, "platform", "gpu", tier="vendor", probe=f"probes:{probe}")
    add(fakes, "platform", "cpu", probe="probes:ok")
    with pytest.raises(PluginBroken, match=r"platform:gpu .*cpu would work"):
        Registry(fakes.scan()).choose("platform", Need())
    assert Registry(fakes.scan()).choose("platform", Need(), explicit="cpu").require().name == "cpu"
    denied = Registry(fakes.scan(), PluginConfig(deny=["d-gpu"]))
    assert denied.choose("platform", Need()).require().name == "cpu"


def test_a_new_platform_changes_nothing_until_it_is_asked_for_or_has_a_device(
    fakes: FakeDistributions,
) -> None:
    add(fakes, "platform", "cpu", tier="reference", probe="probes:ok")
    for name in ("abacus", "zeta"):
        add(fakes, "platform", name, tier="vendor", probe="probes:ok")
        assert Registry(fakes.scan()).choose("platform", Need()).require().name == "cpu"
    assert (
        Registry(fakes.scan()).choose("platform", Need(), explicit="abacus").require().name
        == "abacus"
    )
    add(fakes, "platform", "npu", probe="probes:absent", flags=frozenset({"device"}))
    assert Registry(fakes.scan()).choose("platform", Need()).require().name == "cpu"
    add(fakes, "platform", "ascend", tier="vendor", probe="probes:ok", flags=frozenset({"device"}))
    assert Registry(fakes.scan()).choose("platform", Need()).require().name == "ascend"
    add(fakes, "platform", "cuda", probe="probes:ok", flags=frozenset({"device"}))
    assert Registry(fakes.scan()).choose("platform", Need()).require().name == "cuda"


def test_a_platform_may_run_what_runs_on_another(fakes: FakeDistributions) -> None:
    add(fakes, "platform", "cpu")
    add(fakes, "platform", "abacus", runs=frozenset({"cpu"}))
    add(fakes, "platform", "other")
    add(fakes, "sampler", "fast", platforms=frozenset({"cpu"}))
    registry = Registry(fakes.scan())
    assert registry.choose("sampler", Need(platform="abacus")).require().name == "fast"
    with pytest.raises(PluginUnsuitable, match="runs on cpu, not on other"):
        registry.choose("sampler", Need(platform="other"))


def test_absent_platform_is_quiet(
    fakes: FakeDistributions, caplog: pytest.LogCaptureFixture
) -> None:
    add(fakes, "platform", "gpu", tier="vendor", probe="probes:absent")
    add(fakes, "platform", "cpu")
    assert Registry(fakes.scan()).choose("platform", Need()).require().name == "cpu"
    assert not caplog.records


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
        ("raise ValueError('at import')\n", "ValueError: at import"),
        ("SPEC = 3\n", "is a int, expected a SamplerSpec"),
        (
            "from pegboard.interfaces.attention import AttentionSpec\nSPEC = AttentionSpec\n",
            "the class AttentionSpec itself",
        ),
        ("OTHER = 3\n", "SPEC"),
        (
            spec_source("sampler", flags=frozenset({"quick"})),
            "flags has 'quick', which sampler does not know",
        ),
        (
            spec_source("sampler", supports={"head_dim": True}),
            "supports has 'head_dim', which sampler does not know",
        ),
    ],
)
def test_broken_spec_is_left_out_once_and_loudly(
    fakes: FakeDistributions, caplog: pytest.LogCaptureFixture, source: str, expected: str
) -> None:
    fakes.add("acme", {"sampler": {"bad": "acme_bad:SPEC"}}, {"acme_bad": source})
    add(fakes, "sampler", "good")
    registry = Registry(fakes.scan())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert registry.choose("sampler", Need()).require().name == "good"
    assert len(caplog.records) == 1 and "sampler:bad (acme 1.0)" in caplog.text
    with pytest.raises(PluginBroken, match="acme") as raised:
        registry.choose("sampler", Need(), explicit="bad")
    assert expected in str(raised.value) and raised.value.plugin == "sampler:bad (acme 1.0)"


def test_a_misspelled_flag_gets_advice(fakes: FakeDistributions) -> None:
    add(fakes, "scheduling_policy", "mine", flags=frozenset({"priorty"}))
    add(fakes, "attention", "other", supports={"head_dims": {64}})
    registry = Registry(fakes.scan())
    with pytest.raises(PluginBroken, match="flags has 'priorty'.*did you mean 'priority'"):
        registry.spec(registry.find("scheduling_policy", "mine"))
    with pytest.raises(PluginBroken, match="supports has 'head_dims'.*did you mean 'head_dim'"):
        registry.spec(registry.find("attention", "other"))


def test_strict_makes_quarantine_fatal(
    fakes: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(fakes, "sampler", "bad", suits="probes:rude")
    add(fakes, "sampler", "good")
    assert Registry(fakes.scan()).choose("sampler", Need()).require().name == "good"
    monkeypatch.setenv("PEGBOARD_STRICT", "1")
    with pytest.raises(PluginBroken, match="KeyError"):
        Registry(fakes.scan()).choose("sampler", Need())


def test_probe_is_asked_once(fakes: FakeDistributions) -> None:
    add(fakes, "sampler", "s", probe="probes:ok")
    registry = Registry(fakes.scan())
    for _ in range(3):
        registry.choose("sampler", Need())
    assert len(sys.modules["probes"].calls) == 1


def test_keyed_prefers_exact_names_then_the_wildcard(fakes: FakeDistributions) -> None:
    add(fakes, "model", "Llama", tier="reference")
    add(fakes, "model", "*", tier="vendor")
    registry = Registry(fakes.scan())
    assert registry.choose("model", Need(), keys=["Llama"]).require().name == "Llama"
    fallback = registry.choose("model", Need(), keys=["Mamba", "Rwkv"])
    assert fallback.require().name == "*" and fallback.key == "Mamba"
    assert registry.choose("model", Need(), keys=["Mamba", "Llama"]).require().name == "Llama"
    assert (
        registry.choose("model", Need(), keys=["Llama"], explicit="d-any:*").require().name == "*"
    )
    assert set(registry.decisions) == {("model", "Llama"), ("model", "Mamba")}


@pytest.mark.parametrize("first", ["vendor", "tuned", "reference"])
@pytest.mark.parametrize("second", ["vendor", "tuned", "reference"])
def test_of_two_wildcards_the_better_tier_takes_any_name(
    fakes: FakeDistributions, first: Tier, second: Tier
) -> None:
    """In equal tiers the first by name. A wildcard that does not run here takes nothing."""
    add(fakes, "model", "*", "one", tier=first)
    add(fakes, "model", "*", "two", tier=second)
    add(fakes, "model", "*", "zero", tier="vendor", platforms=frozenset({"cuda"}))
    decision = Registry(fakes.scan()).choose("model", Need(platform="cpu"), keys=["Mamba"])
    wanted = "one" if TIERS.index(first) <= TIERS.index(second) else "two"
    assert decision.require().distribution == wanted and decision.rank == "any name"
    assert len(decision.candidates) == 3 and "runs on cuda" in decision.table()


def test_keyed_exact_but_broken_is_fatal_unsuitable_goes_on(fakes: FakeDistributions) -> None:
    fakes.add("acme", {"model": {"Llama": "acme_none:SPEC"}})
    add(fakes, "model", "Mamba", platforms=frozenset({"cuda"}))
    add(fakes, "model", "*")
    registry = Registry(fakes.scan())
    with pytest.raises(PluginBroken, match="model:Llama"):
        registry.choose("model", Need(), keys=["Llama"])
    decision = registry.choose("model", Need(platform="cpu"), keys=["Mamba"])
    assert decision.require().name == "*" and "runs on cuda" in decision.table()


def test_keyed_conflict_and_absence(fakes: FakeDistributions) -> None:
    add(fakes, "model", "Llama", "one")
    add(fakes, "model", "Llama", "two")
    registry = Registry(fakes.scan())
    with pytest.raises(PluginConflict, match="'one:Llama' or 'two:Llama'"):
        registry.choose("model", Need(), keys=["Llama"])
    with pytest.raises(PluginNotFound, match="Xyzzy"):
        registry.choose("model", Need(), keys=["Xyzzy"])
    assert registry.choose("model", Need(), keys=["Xyzzy"], required=False).winner is None


def test_build_is_attributed(fakes: FakeDistributions) -> None:
    add(fakes, "sampler", "s", implementation="probes:Implementation")
    add(fakes, "sampler", "number", implementation="probes:number")
    add(fakes, "sampler", "missing", implementation="probes:Missing")
    add(fakes, "sampler", "newer", api="1.9")
    registry = Registry(fakes.scan())
    entry = registry.find("sampler", "s")
    built = registry.build(entry, "setup")
    assert (built.options, built.setup) == (None, "setup")
    with pytest.raises(PluginFailure, match=r"sampler:s \(d-s 1.0\).*disk on fire"):
        registry.build(entry, "explode")
    for name, match in (("number", "expected a class"), ("missing", "Missing")):
        with pytest.raises(PluginBroken, match=match):
            registry.build(registry.find("sampler", name), None)
    with pytest.raises(PluginUnsuitable, match="1.9"):
        registry.load(registry.find("sampler", "newer"))
    with pytest.raises(PluginUnsuitable, match="deny"):
        Registry(fakes.scan(), PluginConfig(deny=["d-s"])).load(entry)


def test_prefers_and_among(fakes: FakeDistributions) -> None:
    for name, tier in (("a", "vendor"), ("b", "tuned"), ("c", "reference")):
        add(fakes, "sampler", name, tier=tier)
    registry = Registry(fakes.scan())
    need = Need()
    assert registry.choose("sampler", need).require().name == "a"
    assert registry.choose("sampler", need, prefers=("nowhere", "b")).require().name == "b"
    assert registry.choose("sampler", need, prefers=("c", "b")).require().name == "c"
    assert (
        registry.choose("sampler", need, among=[registry.find("sampler", "b")]).require().name
        == "b"
    )


ROWS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["x", "y", "z"]), st.sampled_from(TIERS)),
    min_size=1,
    max_size=8,
    unique_by=lambda row: (row[0], row[1]),
)


@given(rows=ROWS, data=st.data())
def test_ranking_is_a_total_order_independent_of_install_order(
    rows: list[tuple[str, str, str]], data: st.DataObject
) -> None:
    module = ModuleType("ranked_specs")
    for name, distribution, tier in rows:
        setattr(
            module,
            f"{name}_{distribution}",
            AttentionSpec(api="1.0", implementation="builtins:dict", tier=tier),
        )  # type: ignore[arg-type]
    entries = [
        Entry(
            "attention",
            name,
            distribution,
            "1.0",
            f"ranked_specs:{name}_{distribution}",
            "pegboard.attention.v1",
        )
        for name, distribution, _ in rows
    ]
    shuffled = data.draw(st.permutations(entries))
    order = [
        entry.qualified
        for entry in data.draw(st.permutations(entries))[: data.draw(st.integers(0, 3))]
    ]
    sys.modules["ranked_specs"] = module
    try:
        first, second = (
            Registry(Scan(entries=tuple(some))).choose("attention", AttentionNeed(), prefers=order)
            for some in (entries, shuffled)
        )
    finally:
        del sys.modules["ranked_specs"]
    assert first == second
    ranked = [c.entry.qualified for c in first.candidates]
    tiers = {(f"{distribution}:{name}"): TIERS.index(tier) for name, distribution, tier in rows}  # type: ignore[arg-type]
    assert ranked[: len(order)] == order
    rest = ranked[len(order) :]
    assert rest == sorted(
        rest, key=lambda q: (tiers[q], q.rpartition(":")[2], q.rpartition(":")[0])
    )


@given(value=st.integers(-100, 1000), of=st.integers(1, 64), limit=st.integers(0, 1000))
def test_unmet_numbers(value: int, of: int, limit: int) -> None:
    assert bool(unmet({"n": Multiple(of)}, {"n": value})) == (value % of != 0)
    assert bool(unmet({"n": AtMost(limit)}, {"n": value})) == (value > limit)
    assert bool(unmet({"n": {limit}}, {"n": value})) == (value != limit)
    assert unmet({}, {"n": value}) and not unmet({"n": True}, {"n": value})


def test_the_owner_of_a_module(fake_distributions: FakeDistributions) -> None:
    """The plugin of its own module, the chosen one of a shared module, else the distribution. The
    command runs everything."""
    specs = "".join(
        spec_source("sampler", name, implementation=path)
        for name, path in [("A", "own:A"), ("B", "own_b.deep:B")]
    )
    modules = {
        "pair": specs,
        "own": "A = dict",
        "solo": spec_source("model"),
        "outer": spec_source("command"),
    }
    entries = {
        "sampler": {"a": "pair:A", "b": "pair:B"},
        "model": {"M": "solo:SPEC"},
        "command": {"e": "outer:SPEC"},
    }
    fake_distributions.add("acme", entries, modules)
    registry = Registry(fake_distributions.scan())
    for entry in registry.scan.entries:
        registry.spec(entry)
    one = "sampler:a (acme 1.0)"
    other = "sampler:b (acme 1.0)"
    found = registry.modules()
    assert (found["own"], found["own_b.deep"], found["pair"], found["solo"]) == (
        one,
        other,
        "sampler:a/b (acme 1.0)",
        "model:M (acme 1.0)",
    )
    assert "outer" not in found and "" not in found
    registry.choose("sampler", Need(), explicit="b")
    assert registry.modules()["pair"] == other
