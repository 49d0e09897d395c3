"""Ranks on other hosts need the same plugins."""

from __future__ import annotations

import pickle
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.config.schema import PluginConfig
from pegboard.errors import PluginBroken
from pegboard.plugins.hosts import check_same_plugins, plugin_versions
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_distributions import FakeDistributions

VERSIONS = plugin_versions(Registry.discover())


def test_this_host_has_the_plugins_of_this_host() -> None:
    assert "pegboard" in VERSIONS
    check_same_plugins(pickle.loads(pickle.dumps(VERSIONS)))


@given(st.sets(st.sampled_from(sorted(VERSIONS)), min_size=1))
def test_each_difference_is_named(names: set[str]) -> None:
    """Distributions that are only installed here make no difference."""
    there = dict.fromkeys(names, "0.0.9")
    missing = {"acme-unknown": "1.0"}
    with pytest.raises(PluginBroken) as refused:
        check_same_plugins({**there, **missing})
    message = str(refused.value)
    assert message.startswith(f"host {socket.gethostname()} has other plugins")
    assert "acme-unknown (here none, there 1.0)" in message
    for name in VERSIONS:
        difference = f" {name} (here {VERSIONS[name]}, there 0.0.9)"
        assert (difference in message) == (name in names)


def test_plugins_that_may_not_be_used_make_no_difference(
    fake_distributions: FakeDistributions,
) -> None:
    fake_distributions.add("acme", {"attention": {"a": "acme_specs:A"}}, version="3.1")
    for deny, expected in (([], "3.1"), (["acme"], None)):
        registry = Registry(fake_distributions.scan(), PluginConfig(deny=deny))
        assert plugin_versions(registry).get("acme") == expected
