"""The tests import `test_monitoring` from this folder, `layers` from the tests of composition and
`page_server` from those of the pages."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("deployment", "composition", "docs")]
