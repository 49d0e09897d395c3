"""Sections of settings that distributions bring."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard.config import sections
from pegboard.config.sources import engine_settings, read_config_file, settings_from
from pegboard.errors import ConfigError
from pegboard.installed import installed_on
from pegboard.plugins.discovery import scan_path
from pegboard_testing.fake_distributions import FakeDistributions

SOURCE = """
from typing import Annotated
import msgspec
from pegboard.config.setting import doc

class Config(msgspec.Struct, frozen=True, kw_only=True):
    {name}: Annotated[int, doc("Something", least=1)] = 3
"""

Install = Callable[..., None]


@pytest.fixture
def install(
    fake_distributions: FakeDistributions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Install:
    """Install a distribution with a section, and nothing else."""

    def clear() -> None:
        sections.sections.cache_clear()
        sections.all_settings.cache_clear()

    def install(section: str, name: str, value: str = "acme_config:Config") -> None:
        fake_distributions.add(
            "acme-config", {"settings": {section: value}}, {"acme_config": SOURCE.format(name=name)}
        )
        found = installed_on([str(fake_distributions.root)])
        monkeypatch.setattr(sections, "installed", lambda: found)
        clear()

    yield install
    clear()


def test_a_section_is_read_like_the_others(install: Install, tmp_path: Path) -> None:
    install("acme", "num_pegs")
    file = tmp_path / "settings.toml"
    file.write_text("num_pegs = 5\n")
    settings = settings_from([(read_config_file(file), str(file))])
    cls = sections.sections()["acme"]
    assert settings.section(cls).num_pegs == 5 and settings.sources["num_pegs"] == str(file)
    assert engine_settings(None, {}).section(cls).num_pegs == 3
    file.write_text("acme: {num_pegs: x}\n")
    with pytest.raises(ConfigError, match="num_pegs"):
        settings_from([(read_config_file(file.rename(tmp_path / "s.yaml")), "the file")])


@pytest.mark.parametrize(
    ("section", "name", "value", "reason"),
    [
        ("acme", "block_size", "acme_config:Config", "exists already"),
        ("engine", "num_pegs", "acme_config:Config", "exists already"),
        ("acme", "num_pegs", "acme_nowhere:Config", "acme_nowhere"),
        ("acme", "num_pegs", "acme_config:Missing", "Missing"),
    ],
)
def test_a_section_that_cannot_be_used_is_left_out(
    install: Install,
    caplog: pytest.LogCaptureFixture,
    section: str,
    name: str,
    value: str,
    reason: str,
) -> None:
    install(section, name, value)
    with caplog.at_level(logging.WARNING):
        assert list(sections.sections()) == ["engine", "plugins"]
    assert reason in caplog.text and "acme-config" in caplog.text


def test_a_section_is_imported_when_something_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("nothing needs a section")

    sections.sections.cache_clear()
    sections.all_settings.cache_clear()
    monkeypatch.setattr(sections, "installed", refuse)
    assert engine_settings("m", {"dtype": "float32"}).engine.dtype == "float32"
    with pytest.raises(AssertionError, match="nothing needs"):
        engine_settings("m", {"swap_space": 4})


def test_a_section_is_no_plugin(fake_distributions: FakeDistributions) -> None:
    fake_distributions.add("acme-config", {"settings": {"acme": "acme_config:Config"}}, {})
    found = scan_path([str(fake_distributions.root)])
    assert not found.entries and not found.unusable
