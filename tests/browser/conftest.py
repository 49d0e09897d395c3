"""The tests of this folder drive Chromium through Playwright. They need both, and run only in `make
nightly`, or when they are named."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

CHROMIUM = os.environ.get("PEGBOARD_TEST_CHROMIUM") or shutil.which("chromium") or ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    if not CHROMIUM:
        pytest.skip("needs Chromium, or its path as PEGBOARD_TEST_CHROMIUM")
    is_root = os.geteuid() == 0  # Chromium's sandbox refuses to run as root
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if is_root else []
        )
        yield browser
        browser.close()
