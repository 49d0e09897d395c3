"""Allow, deny, enable: a rule that names an unknown plugin is an error, and no rule is silently
ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.config.schema import PluginConfig
from pegboard.config.sources import settings_from
from pegboard.errors import ConfigError, PluginConflict, PluginUnsuitable
from pegboard.plugins.defaults import catalogue, default_enabled
from pegboard.plugins.discovery import Scan
from pegboard.plugins.policy import check
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_distributions import FakeDistributions


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    fakes = FakeDistributions(tmp_path)
    fakes.add("acme-fast", {"sampler": {"fast": "a:A"}, "attention": {"fast": "a:B"}})
    fakes.add(
        "acme-slow",
        {"sampler": {"slow": "b:A"}, "hooks": {"audit": "b:H"}, "metrics": {"statsd": "b:M"}},
    )
    default = default_enabled("metrics")[0]
    fakes.add("acme-metrics", {"metrics": {default: "c:M"}})
    return fakes.scan()


def allowed(scan: Scan, policy: PluginConfig) -> list[str]:
    check(policy, scan)
    registry = Registry(scan, policy)
    return [
        entry.qualified for kind in ("attention", "sampler") for entry in registry.entries(kind)
    ]


def test_allow_and_deny(scan: Scan) -> None:
    everything = ["acme-fast:fast", "acme-fast:fast", "acme-slow:slow"]
    assert allowed(scan, PluginConfig()) == everything
    assert allowed(scan, PluginConfig(allow=[])) == []
    assert allowed(scan, PluginConfig(allow=["Acme_Fast"])) == everything[:2]
    assert (
        allowed(scan, PluginConfig(allow=["acme-fast", "sampler:slow"], deny=["attention:fast"]))
        == everything[1:]
    )
    assert allowed(scan, PluginConfig(deny=["sampler:acme-fast:fast"])) == [
        "acme-fast:fast",
        "acme-slow:slow",
    ]


def test_naming_one_kind_leaves_the_others_alone(scan: Scan) -> None:
    assert allowed(scan, PluginConfig(allow=["sampler:slow"])) == [
        "acme-fast:fast",
        "acme-slow:slow",
    ]


def test_blocked_by_name_says_so(scan: Scan) -> None:
    with pytest.raises(PluginUnsuitable, match="denied by 'acme-slow'"):
        Registry(scan, PluginConfig(deny=["acme-slow"])).find("sampler", "slow")


@pytest.mark.parametrize("setting", ["allow", "deny", "override", "enable", "disable"])
@pytest.mark.parametrize(
    ("pattern", "meant"), [("acme-fsat", "acme-fast"), ("sampler:fst", "sampler:fast")]
)
def test_unknown_patterns_are_errors(scan: Scan, setting: str, pattern: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"plugins.{setting}.*did you mean '{meant}'"):
        check(PluginConfig(**{setting: [pattern]}), scan)


def test_rules_about_known_but_missing_plugins(scan: Scan) -> None:
    kind, name, distribution = next(
        (kind, name, dist) for kind, names in catalogue().items() for name, dist in names.items()
    )
    check(PluginConfig(deny=[distribution, f"{kind}:{name}"]), scan)
    with pytest.raises(ConfigError, match=f"pip install {distribution}"):
        check(PluginConfig(enable=[distribution]), scan)


def test_ambient_kinds_run_only_when_enabled(scan: Scan) -> None:
    default = default_enabled("metrics")[0]
    assert [entry.name for entry in Registry(scan).enabled("metrics")] == [default]
    assert Registry(scan).enabled_hooks() == []
    policy = PluginConfig(enable=["metrics:statsd", "hooks:audit"], disable=[f"metrics:{default}"])
    check(policy, scan)
    assert [entry.name for entry in Registry(scan, policy).enabled("metrics")] == ["statsd"]
    assert [entry.name for entry in Registry(scan, policy).enabled_hooks()] == ["audit"]
    denied = PluginConfig(enable=["hooks:audit"], deny=["acme-slow"])
    assert Registry(scan, denied).enabled_hooks() == []
    with pytest.raises(ConfigError, match="not of an ambient kind"):
        check(PluginConfig(enable=["sampler:fast"]), scan)


def test_two_enabled_of_one_name_conflict(tmp_path: Path) -> None:
    fakes = FakeDistributions(tmp_path)
    for name in ("one", "two"):
        fakes.add(name, {"metrics": {"statsd": "m:M"}})
    with pytest.raises(PluginConflict, match="'one:statsd' or 'two:statsd'"):
        Registry(fakes.scan(), PluginConfig(enable=["metrics:statsd"])).enabled("metrics")
    both = Registry(fakes.scan(), PluginConfig(enable=["metrics:two:statsd"]))
    assert [entry.distribution for entry in both.enabled("metrics")] == ["two"]


def test_the_environment_gives_the_allow_list_where_the_settings_give_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PEGBOARD_PLUGINS", "acme-fast, sampler:slow")
    settings = settings_from([])
    assert (settings.plugins.allow, settings.sources["allow"]) == (
        ["acme-fast", "sampler:slow"],
        "PEGBOARD_PLUGINS",
    )
    assert settings_from([({"plugins": {"allow": ["acme-slow"]}}, "a file")]).plugins.allow == [
        "acme-slow"
    ]


def test_options_are_addressed_by_kind_and_name(scan: Scan) -> None:
    with pytest.raises(ConfigError, match="kind.name"):
        Registry(scan, PluginConfig(options={"attention": {}}))
    with pytest.raises(ConfigError, match="did you mean 'sampler.fast'"):
        check(PluginConfig(options={"sampler.fist": {"x": 1}}), scan)
