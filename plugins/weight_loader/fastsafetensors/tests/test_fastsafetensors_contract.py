"""The loader passes the contract of its kind and the generic contract, if its library is
installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from pegboard_weight_loader_fastsafetensors import probe
from pegboard_weight_loader_fastsafetensors.loader import FastSafetensorsLoader
from pegboard_weight_loader_fastsafetensors.plugin import FASTSAFETENSORS

from pegboard.interfaces.spec import Absent
from pegboard.interfaces.weight_loader import WeightLoader, WeightLoaderSetup
from pegboard.plugins.importing import probe_facts
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_weight_loader import SafetensorsFilesContract

needs_library = pytest.mark.skipif(
    find_spec("fastsafetensors") is None, reason="fastsafetensors is not installed"
)


def test_contract() -> None:
    check_entry(installed_entry("weight_loader", "fastsafetensors"))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    answer = probe.probe(probe_facts())
    assert isinstance(answer, Absent)
    assert "pip install fastsafetensors" in answer.reason


@needs_library
class TestFastSafetensors(SafetensorsFilesContract):
    spec = FASTSAFETENSORS

    def loader(self, setup: WeightLoaderSetup) -> WeightLoader:
        return FastSafetensorsLoader(None, setup)
