"""Contract tests of the kind `model_source`. A plugin's test file:

class TestMySource(ModelSourceContract):
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path): ... # put a model where the source finds it without a network

    def source(self, setup: ModelSourceSetup) -> ModelSource:
        return MySource(None, setup)

    def present(self) -> ModelReference: ... # a model that exists: config.json and *.safetensors,
    or one file def missing(self) -> ModelReference: ... # one that does not exist
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import (
    FileFilter,
    LocalFiles,
    ModelReference,
    ModelSource,
    ModelSourceSetup,
)

EVERYTHING = FileFilter()


class ModelSourceContract:
    """Every model source passes these. Override `source`, `present` and `missing`. Set
    `works_offline = False` for a source that keeps no files."""

    works_offline = True

    def source(self, setup: ModelSourceSetup) -> ModelSource:
        """Return a new source."""
        raise AssertionError("override ModelSourceContract.source")

    def present(self) -> ModelReference:
        """Return a reference to a model that exists."""
        raise AssertionError("override ModelSourceContract.present")

    def missing(self) -> ModelReference:
        """Return a reference to a model that does not exist."""
        raise AssertionError("override ModelSourceContract.missing")

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        """The folder that the source may write to. It does not exist yet."""
        return tmp_path / "new" / "cache"

    def fetch(self, cache: Path, reference: ModelReference, *, offline: bool = False) -> LocalFiles:
        return self.source(ModelSourceSetup(cache, offline=offline)).fetch(
            reference, EVERYTHING, lambda *step: None
        )

    def contents(self, root: Path) -> dict[str, bytes]:
        """Return every file of the model."""
        if root.is_file():
            return {root.name: root.read_bytes()}
        return {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def test_what_comes_back_is_a_model_on_disk(self, cache: Path) -> None:
        files = self.fetch(cache, self.present())
        assert files.root.is_absolute() and files.root.exists()
        names = set(self.contents(files.root))
        assert files.root.is_file() or "config.json" in names
        assert set(files.digests) <= names
        assert all(digest.startswith("sha256:") for digest in files.digests.values())

    def test_fetching_again_gives_the_same_files(self, cache: Path) -> None:
        first = self.fetch(cache, self.present())
        before = self.contents(first.root)
        assert self.fetch(cache, self.present()) == first
        assert self.contents(first.root) == before

    def test_what_was_fetched_is_there_without_a_network(self, cache: Path) -> None:
        if self.works_offline:
            first = self.fetch(cache, self.present())
            assert self.fetch(cache, self.present(), offline=True).root == first.root

    def test_a_missing_model_is_named(self, cache: Path) -> None:
        """A missing model is an error, online and offline. Nothing incomplete is left that a later
        run could mistake for the model."""
        for offline in (False, True):
            with pytest.raises(ModelError) as caught:
                self.fetch(cache, self.missing(), offline=offline)
            assert self.missing().name.rpartition("/")[2].partition("=")[0] in str(caught.value)
        assert not list(cache.rglob("config.json"))

    def test_only_the_cache_is_written_to(self, cache: Path, tmp_path: Path) -> None:
        def outside() -> dict[Path, float]:
            return {
                p: p.stat().st_mtime
                for p in tmp_path.rglob("*")
                if p.is_file() and not p.is_relative_to(cache)
            }

        before = outside()
        self.fetch(cache, self.present())
        assert outside() == before

    def test_progress_never_runs_past_its_end(self, cache: Path) -> None:
        steps: list[tuple[str, int, int | None]] = []
        source = self.source(ModelSourceSetup(cache))
        source.fetch(self.present(), EVERYTHING, lambda *step: steps.append(step))
        for what, done, total in steps:
            assert what and done >= 0 and (total is None or done <= total)

    def test_two_at_once_get_the_same_whole_model(self, cache: Path) -> None:
        """Two servers start at the same time on one machine."""
        models: list[dict[str, bytes]] = []

        def run() -> None:
            models.append(self.contents(self.fetch(cache, self.present()).root))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(models) == 2 and models[0] == models[1]
