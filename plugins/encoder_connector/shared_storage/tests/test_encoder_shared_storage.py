"""The contract of the kind, and files that are wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_encoder_connector_shared_storage.connector import SharedStorageConnector
from pegboard_encoder_connector_shared_storage.options import SharedStorageOptions

from pegboard.errors import ConfigError
from pegboard.interfaces.encoder_connector import EncoderConnector, EncoderConnectorSetup
from pegboard_testing.contract_encoder_connector import EncoderConnectorContract, name_of
from pegboard_testing.contract_generic import check_entry, installed_entry


@pytest.mark.parametrize("name", ["shared_storage", "ECExampleConnector"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("encoder_connector", name))


def connector_of(folder: Path, **options: Any) -> SharedStorageConnector:
    values = SharedStorageOptions(shared_storage_path=folder, **options)
    return SharedStorageConnector(values, EncoderConnectorSetup("cpu"))


class TestSharedStorage(EncoderConnectorContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "new" / "rows"

    def connector(self) -> EncoderConnector:
        return connector_of(self.path)


def test_roles(tmp_path: Path) -> None:
    producer = connector_of(tmp_path, role="ec_producer")
    consumer = connector_of(tmp_path, role="ec_consumer")
    consumer.save(name_of("a"), torch.zeros(1, 2))
    assert not [*tmp_path.iterdir()]
    producer.save(name_of("a"), torch.zeros(1, 2))
    assert producer.load(name_of("a")) is None and consumer.load(name_of("a")) is not None


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_damaged_file_is_not_there(tmp_path: Path, content: bytes) -> None:
    connector = connector_of(tmp_path)
    connector.save(name_of("a"), torch.zeros(3, 2))
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(content)
    assert connector.load(name_of("a")) is None


def test_a_disk_that_refuses_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = connector_of(tmp_path)

    def refuse(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    connector.save(name_of("a"), torch.zeros(1, 2))
    assert connector.load(name_of("a")) is None and not [*tmp_path.rglob("*.tmp")]


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make"):
        connector_of(tmp_path / "file" / "rows")
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match="is not writable"):
            connector_of(tmp_path)


def test_a_name_leads_nowhere_else(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        connector_of(tmp_path).load("../a")
