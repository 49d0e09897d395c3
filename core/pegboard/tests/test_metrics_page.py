"""docs/metrics.md lists every metric."""

from __future__ import annotations

import pytest

from pegboard.errors import ConfigError
from pegboard_testing.authoring.metrics_page import PAGE, renewed


def test_the_page_lists_every_metric() -> None:
    page = PAGE.read_text("utf-8")
    assert renewed(page) == page, "run python -m pegboard_testing.authoring.metrics_page --write"


def test_a_page_without_marks_is_named() -> None:
    with pytest.raises(ConfigError, match="metrics.md: expected the lines"):
        renewed("no marks")
