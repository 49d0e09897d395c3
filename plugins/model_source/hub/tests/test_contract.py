"""The source passes the contract of its kind and the generic contract; a folder replaces the
hub."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors
from pegboard_model_source_hub.hub import HubSource

from pegboard.interfaces.model_source import ModelReference, ModelSourceSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_model_source import ModelSourceContract


def test_contract() -> None:
    check_entry(installed_entry("model_source", "hub"))


class TestHub(ModelSourceContract):
    @pytest.fixture(autouse=True)
    def hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A hub with one repository. Its snapshot is written into the cache once. The lock stands
        in for huggingface_hub's."""
        lock = threading.Lock()

        def download(repo_id: str, **more: Any) -> str:
            if repo_id != "org/name":
                request = httpx.Request("GET", f"https://hub/{repo_id}")
                raise errors.RepositoryNotFoundError(
                    f"{repo_id} not found", response=httpx.Response(404, request=request)
                )
            root = tmp_path / "new" / "cache" / "hub" / "snapshot"
            with lock:
                root.mkdir(parents=True, exist_ok=True)
                for name, content in (("config.json", "{}"), ("model.safetensors", "weights")):
                    if not (root / name).exists():
                        (root / name).write_text(content)
            return str(root)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    def source(self, setup: ModelSourceSetup) -> HubSource:
        return HubSource(None, setup)

    def present(self) -> ModelReference:
        return ModelReference("hub", "org/name")

    def missing(self) -> ModelReference:
        return ModelReference("hub", "org/no-such-model")
