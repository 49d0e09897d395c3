"""The resolver passes the contract of its kind; nothing leads out of its folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from pegboard_lora_resolver_filesystem.options import FilesystemOptions
from pegboard_lora_resolver_filesystem.resolver import FilesystemResolver

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.lora_resolver import LoRAResolverSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_lora_resolver import LoRAResolverContract


def test_contract() -> None:
    check_entry(installed_entry("lora_resolver", "filesystem"))


def refuse(reference: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    raise AssertionError("nothing is fetched")


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def resolve(directory: Path, name: str) -> Path | None:
    return asyncio.run(
        FilesystemResolver(
            FilesystemOptions(directory=directory), LoRAResolverSetup(refuse)
        ).resolve(name)
    )


class TestFilesystem(LoRAResolverContract):
    @pytest.fixture(autouse=True)
    def adapters(self, tmp_path: Path) -> None:
        self.root = tmp_path / "adapters"
        adapter(self.root / "team" / "poet")
        adapter(tmp_path / "outside")

    def resolver(self) -> FilesystemResolver:
        return FilesystemResolver(FilesystemOptions(directory=self.root), LoRAResolverSetup(refuse))

    def present(self) -> str:
        return "team/poet"

    def missing(self) -> str:
        return "team/painter"


def test_links_do_not_lead_out(tmp_path: Path) -> None:
    root = tmp_path / "in"
    outside = adapter(tmp_path / "out")
    inside = adapter(root / "real")
    (root / "folder").symlink_to(outside)
    (root / "alias").symlink_to(inside)
    (root / "loop").symlink_to(root / "loop")
    (root / "parts").mkdir()
    (root / "parts" / "adapter_config.json").symlink_to(inside / "adapter_config.json")
    (root / "parts" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert resolve(root, "real") == inside == resolve(root, "alias")
    assert all(
        resolve(root, name) is None
        for name in ("folder", "loop", "parts", "../out", "real/../../out")
    )


def test_a_folder_that_is_itself_a_link_is_fine(tmp_path: Path) -> None:
    inside = adapter(tmp_path / "v2" / "poet")
    (tmp_path / "current").symlink_to(tmp_path / "v2")
    assert resolve(tmp_path / "current", "poet") == inside


def test_a_folder_without_an_adapter_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "adapter_model.bin").write_bytes(b"")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "poet.gguf").write_bytes(b"GGUF")
    assert [resolve(tmp_path, name) for name in ("empty", "file", "pickle")] == [None] * 3
    assert resolve(tmp_path, "gguf") == tmp_path / "gguf"


def test_a_folder_that_is_added_later_is_found(tmp_path: Path) -> None:
    resolver = FilesystemResolver(FilesystemOptions(directory=tmp_path), LoRAResolverSetup(refuse))
    assert asyncio.run(resolver.resolve("poet")) is None
    adapter(tmp_path / "poet")
    assert asyncio.run(resolver.resolve("poet")) == tmp_path / "poet"


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"directory: .*none is not a folder"):
        FilesystemResolver(
            FilesystemOptions(directory=tmp_path / "none"), LoRAResolverSetup(refuse)
        )


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_read(self: Path, pattern: str) -> None:
        raise PermissionError(13, os.strerror(13))

    adapter(tmp_path / "poet")
    monkeypatch.setattr(Path, "glob", refuse_to_read)
    with pytest.raises(ModelError, match="adapter 'poet' cannot be read: Permission denied"):
        resolve(tmp_path, "poet")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_is_not_an_adapter(name: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "poet")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert resolve(tmp_path, "poet") is None
