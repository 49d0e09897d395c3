"""The page of metrics."""

from __future__ import annotations

import pytest

from pegboard.errors import ConfigError
from pegboard_testing.authoring.metrics_page import renewed


def test_a_page_without_marks_is_named() -> None:
    with pytest.raises(ConfigError, match="metrics.md: expected the lines"):
        renewed("no marks")
