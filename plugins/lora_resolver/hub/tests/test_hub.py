"""The resolver passes the contract of its kind, and fetches only what the operator allowed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pegboard_lora_resolver_hub.options import HubOptions
from pegboard_lora_resolver_hub.resolver import HubResolver

from pegboard.errors import ModelError
from pegboard.interfaces.lora_resolver import LoRAResolverSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_lora_resolver import LoRAResolverContract


def test_contract() -> None:
    check_entry(installed_entry("lora_resolver", "hub"))


class Hub:
    """Stands in for the model source. It has the adapter org/many/fr, and remembers what it is
    asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[tuple[str, str | None, tuple[str, ...]]] = []
        (root / "fr").mkdir()
        (root / "fr" / "adapter_config.json").write_text("{}")

    def fetch(self, reference: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
        self.asked.append((reference, revision, patterns))
        if reference != "hub:org/many:fr/adapter_model.safetensors":
            raise ModelError(f"the repository contains no such file: {reference}")
        return self.root


class TestHub(LoRAResolverContract):
    @pytest.fixture(autouse=True)
    def hub(self, tmp_path: Path) -> None:
        self.source = Hub(tmp_path)

    def resolver(self) -> HubResolver:
        return HubResolver(
            HubOptions(repositories="org/many@v2, org/poet"), LoRAResolverSetup(self.source.fetch)
        )

    def present(self) -> str:
        return "org/many/fr"

    def missing(self) -> str:
        return "org/other"

    def test_what_is_asked_of_the_model_source(self) -> None:
        self.resolved("org/many/fr")
        assert self.source.asked == [
            (
                "hub:org/many:fr/adapter_model.safetensors",
                "v2",
                ("fr/adapter_config.json", "fr/adapter_model.safetensors"),
            )
        ]
        with pytest.raises(ModelError, match="no such file"):
            self.resolved("org/poet")
        assert self.source.asked[-1] == (
            "hub:org/poet:adapter_model.safetensors",
            None,
            ("adapter_config.json", "adapter_model.safetensors"),
        )

    def test_nothing_else_is_fetched(self) -> None:
        names = [
            "org",
            "org/",
            "org/man",
            "org/many2",
            "other/many",
            "ORG/MANY",
            "org/many@main",
            "org//many",
            "hub:org/many",
            "x",
        ]
        assert self.resolved(*names) == [None] * len(names)
        assert self.source.asked == []


@pytest.mark.parametrize(
    "repository",
    ["org", "org/a/b", "../a", "org/..", "https://hub/org/a", "org/a@", "org/a:file", "*"],
)
def test_only_names_of_repositories_are_allowed(repository: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a repository"):
        HubOptions(repositories=[repository])


def test_fetching_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    async def run() -> Path | None:
        import threading

        begun = asyncio.Event()
        goes_on = threading.Event()
        loop = asyncio.get_running_loop()

        def fetch(*_: object) -> Path:
            loop.call_soon_threadsafe(begun.set)
            assert goes_on.wait(60)
            return tmp_path

        task = asyncio.create_task(
            HubResolver(HubOptions(repositories="o/a"), LoRAResolverSetup(fetch)).resolve("o/a")
        )
        await begun.wait()
        goes_on.set()
        return await task

    assert asyncio.run(run()) == tmp_path
