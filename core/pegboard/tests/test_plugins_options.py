"""Options: file, command line and environment are merged into one frozen model, and errors name
kind.name.field."""

from __future__ import annotations

import pytest

from pegboard.config.schema import PluginConfig
from pegboard.errors import ConfigError
from pegboard.plugins.options import schema_text
from pegboard.plugins.policy import check
from pegboard.plugins.registry import Registry
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

MODEL = """
from pydantic import BaseModel, ConfigDict, Field

class Options(BaseModel):
    '''How the sampler works.'''
    model_config = ConfigDict(frozen=True, extra="forbid")
    block_m: int = Field(64, description="rows of one program")
    eager: bool = False
    names: list[str] = []
    label: str = "x"
    ratio: float | None = None
"""


@pytest.fixture
def fakes(fake_distributions: FakeDistributions) -> FakeDistributions:
    source = spec_source("sampler", options="fast_options:Options") + spec_source(
        "sampler", "PLAIN"
    )
    modules = {"fast_specs": source, "fast_options": MODEL}
    fake_distributions.add(
        "acme", {"sampler": {"Fast.one": "fast_specs:SPEC", "plain": "fast_specs:PLAIN"}}, modules
    )
    return fake_distributions


def resolved(
    fakes: FakeDistributions, values: dict[str, object], name: str = "Fast.one"
) -> dict[str, object]:
    registry = Registry(
        fakes.scan(), PluginConfig(options={f"sampler.{name}": values} if values else {})
    )
    model = registry.options(registry.find("sampler", name))
    return model.model_dump(exclude_unset=True) if model is not None else {}


def test_values_and_texts_are_parsed(fakes: FakeDistributions) -> None:
    assert resolved(fakes, {}) == {}
    assert resolved(
        fakes,
        {"block-m": "128", "eager": "true", "names": '["a", "b"]', "label": "[1]", "ratio": 0.5},
    ) == {
        "block_m": 128,
        "eager": True,
        "names": ["a", "b"],
        "label": "[1]",
        "ratio": 0.5,
    }


def test_environment_fills_what_is_left_out(
    fakes: FakeDistributions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEGBOARD__SAMPLER__FAST_ONE__BLOCK_M", "32")
    monkeypatch.setenv("PEGBOARD__SAMPLER__FAST_ONE__EAGER", "1")
    assert resolved(fakes, {"block_m": 16}) == {"block_m": 16, "eager": True}


def test_long_name_wins_over_short(fakes: FakeDistributions) -> None:
    policy = PluginConfig(
        options={"sampler.Fast.one": {"block_m": 1}, "sampler.acme:Fast.one": {"block_m": 2}}
    )
    check(policy, fakes.scan())
    registry = Registry(fakes.scan(), policy)
    assert registry.options(registry.find("sampler", "Fast.one")).block_m == 2


def test_errors_name_the_address(fakes: FakeDistributions, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"sampler\.Fast\.one\.block_n: no such option, did you mean 'block_m'"
    ):
        resolved(fakes, {"block_n": 1})
    with pytest.raises(ConfigError, match=r"sampler\.Fast\.one\.block_m: .*integer.*'many'"):
        resolved(fakes, {"block_m": "many"})
    with pytest.raises(ConfigError, match="has no options, but was given x"):
        resolved(fakes, {"x": 1}, "plain")
    monkeypatch.setenv("PEGBOARD__SAMPLER__FAST_TWO__BLOCK_M", "32")
    with pytest.raises(
        ConfigError, match=r"PEGBOARD__SAMPLER__FAST_TWO__BLOCK_M.*did you mean 'sampler.fast_one'"
    ):
        Registry(fakes.scan())


def test_schema_text_shows_each_field(fakes: FakeDistributions) -> None:
    fast, plain = fakes.scan().entries
    text = schema_text(fast)
    assert (
        "How the sampler works." in text
        and "rows of one program" in text
        and "PEGBOARD__SAMPLER__FAST_ONE__BLOCK_M" in text
    )
    for field, kind, default in (
        ("block_m", "int", "64"),
        ("names", "list[str]", "[]"),
        ("ratio", "float | None", "None"),
    ):
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [field]]
        assert kind in line and f"default {default}" in line
    assert "no options" in schema_text(plain)
