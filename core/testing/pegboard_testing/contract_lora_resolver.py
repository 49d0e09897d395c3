"""Contract tests of the kind `lora_resolver`. A plugin's test file:

class TestMyResolver(LoRAResolverContract):
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path): ...  # put an adapter where the resolver finds it without a
    network

    def resolver(self) -> LoRAResolver:
        return MyResolver(MyOptions(...), LoRAResolverSetup(fetch))

    def present(self) -> str: ...  # the name of an adapter that is there
    def missing(self) -> str: ...  # one that is not
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pegboard.errors import ModelError
from pegboard.interfaces.lora_resolver import LoRAResolver

HOSTILE = (
    "",
    ".",
    "..",
    "/",
    "/etc",
    "/etc/passwd",
    "~",
    "~root",
    "C:\\",
    "a\\..\\b",
    "a\0b",
    "a\nb",
    "x" * 300,
    "x" * 5000,
    "..%2fx",
    "a/" * 2000 + "b",
    "file:///etc",
    "https://example.org/x",
    "{}",
    "*",
    "[a-z]",
    "$HOME",
    "`id`",
    "ä",
    "\udcff",
)
"""Names that no resolver may turn into a directory."""


class LoRAResolverContract:
    """Every LoRA resolver passes these. Override `resolver`, `present` and `missing`."""

    def resolver(self) -> LoRAResolver:
        """Return a new resolver."""
        raise AssertionError("override LoRAResolverContract.resolver")

    def present(self) -> str:
        """Return the name of an adapter that there is."""
        raise AssertionError("override LoRAResolverContract.present")

    def missing(self) -> str:
        """Return a name that fits the rules and belongs to no adapter."""
        raise AssertionError("override LoRAResolverContract.missing")

    def resolved(self, *names: str) -> list[Path | None]:
        """Ask a new resolver for all names at once."""

        async def run() -> list[Path | None]:
            resolver = self.resolver()
            return list(await asyncio.gather(*(resolver.resolve(name) for name in names)))

        return asyncio.run(run())

    def test_an_adapter_is_a_directory(self) -> None:
        (folder,) = self.resolved(self.present())
        assert isinstance(folder, Path) and folder.is_absolute() and folder.is_dir()
        config = folder / "adapter_config.json"
        if config.is_file():
            assert isinstance(json.loads(config.read_text("utf-8")), dict)
        else:
            assert list(folder.glob("*.gguf")), (
                "an adapter has adapter_config.json or is a GGUF file"
            )

    def test_many_at_once_get_the_same(self) -> None:
        paths = self.resolved(*[self.present()] * 8, self.missing(), self.present())
        assert paths[8] is None
        assert len({path for index, path in enumerate(paths) if index != 8}) == 1

    def test_an_unknown_name_is_none(self) -> None:
        assert self.resolved(self.missing()) == [None]

    @pytest.mark.parametrize(
        "after",
        ["/..", "/../..", "/../../etc", "/.", "//", "/*", "\0", "/../{name}/..", "\\..\\.."],
    )
    def test_no_name_leads_out_of_an_adapter(self, after: str) -> None:
        """The caller never passes such names. A resolver does not rely on that."""
        name = self.present()
        (inside,) = self.resolved(name)
        assert inside is not None
        path = self.outcome(name + after.replace("{name}", name.rpartition("/")[2]))
        assert path is None or path.is_relative_to(inside), path

    @pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:20])
    def test_hostile_names_are_no_adapters(self, name: str) -> None:
        assert self.outcome(name) is None

    def outcome(self, name: str) -> Path | None:
        """Return what the resolver returns, or None if it raises ModelError."""
        try:
            return self.resolved(name)[0]
        except ModelError:
            return None

    def test_a_lookup_can_be_cancelled(self) -> None:
        async def run() -> Path | None:
            resolver = self.resolver()
            for num_steps in range(4):
                task = asyncio.ensure_future(resolver.resolve(self.present()))
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            return await resolver.resolve(self.present())

        assert asyncio.run(run()) is not None
