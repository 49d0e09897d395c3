"""Both sources pass the contract of their kind and the generic contract."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from pegboard_model_source_local.directory import DirectorySource
from pegboard_model_source_local.options import PypiOptions
from pegboard_model_source_local.pypi import PypiSource

from pegboard.interfaces.model_source import ModelReference, ModelSourceSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_model_source import ModelSourceContract


@pytest.mark.parametrize("name", ["local", "pypi"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("model_source", name))


class TestDirectory(ModelSourceContract):
    @pytest.fixture(autouse=True)
    def model(self, tmp_path: Path) -> None:
        self.root = tmp_path / "models"
        (self.root / "tiny").mkdir(parents=True)
        (self.root / "tiny" / "config.json").write_text("{}")
        (self.root / "tiny" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")

    def source(self, setup: ModelSourceSetup) -> DirectorySource:
        return DirectorySource(None, setup)

    def present(self) -> ModelReference:
        return ModelReference("local", str(self.root / "tiny"))

    def missing(self) -> ModelReference:
        return ModelReference("local", str(self.root / "nowhere"))


class TestPypi(ModelSourceContract):
    """A folder of wheels that is the only index."""

    @pytest.fixture(autouse=True)
    def index(self, tmp_path: Path) -> None:
        self.wheels = tmp_path / "wheels"
        self.wheels.mkdir()
        info = "tiny_model-1.0.dist-info"
        with zipfile.ZipFile(self.wheels / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("tiny_model/weights.gguf", b"GGUF" + bytes(64))
            archive.writestr(
                f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny_model\nVersion: 1.0\n"
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")

    def source(self, setup: ModelSourceSetup) -> PypiSource:
        return PypiSource(
            PypiOptions(extra_pip_args=("--no-index", "--find-links", str(self.wheels))), setup
        )

    def present(self) -> ModelReference:
        return ModelReference("pypi", "tiny-model==1.0")

    def missing(self) -> ModelReference:
        return ModelReference("pypi", "no-such-model==1.0")
