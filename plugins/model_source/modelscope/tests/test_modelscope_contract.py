"""The source passes the contract of its kind and the generic contract, with a fake server."""

from __future__ import annotations

import pytest
from fake_modelscope import FakeModelScope
from pegboard_model_source_modelscope.modelscope import ModelScopeSource

from pegboard.interfaces.model_source import ModelReference, ModelSource, ModelSourceSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_model_source import ModelSourceContract


def test_contract() -> None:
    check_entry(installed_entry("model_source", "modelscope"))


class TestModelScope(ModelSourceContract):
    @pytest.fixture(autouse=True)
    def repository(self, site: FakeModelScope) -> None:
        files = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"text"}
        site.repositories["org/name"] = {"master": files}

    def source(self, setup: ModelSourceSetup) -> ModelSource:
        return ModelScopeSource(None, setup)

    def present(self) -> ModelReference:
        return ModelReference("modelscope", "org/name")

    def missing(self) -> ModelReference:
        return ModelReference("modelscope", "org/no-such-model")
