"""A fake ModelScope, and a home folder without one's own cache and token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from modelscope_hub import _download, _legacy_api

sys.path.insert(0, str(Path(__file__).parent))

from fake_modelscope import FakeModelScope, serving

from pegboard import env


@pytest.fixture
def site(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeModelScope]:
    site = FakeModelScope()
    with serving(site) as url:
        monkeypatch.setenv("PEGBOARD_CACHE", str(env.cache_dir()))  # with what is compiled
        monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
        for name in ("MODELSCOPE_API_TOKEN", "MODELSCOPE_CACHE", "MODELSCOPE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(_legacy_api, "REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
        monkeypatch.setattr(_download, "DOWNLOAD_HASH_RETRY_TIMES", 1)
        yield site
