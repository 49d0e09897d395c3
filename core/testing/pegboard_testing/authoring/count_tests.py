"""A pytest plugin that `pegboard plugins test` loads. It counts tests, and those of contract
classes.

It writes {"passed": 40, "failed": 0, "pegboard_testing.contract_draft": 26} to the file that the
environment variable PEGBOARD_TEST_COUNTS names. A second file, with the suffix .now, has the name
of the test that is running."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

_counts: Counter[str] = Counter()


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        bases = getattr(getattr(item, "cls", None), "__mro__", ())
        _counts.update(
            {
                base.__module__
                for base in bases
                if base.__module__.startswith("pegboard_testing.contract_")
            }
        )


def pytest_runtest_logstart(nodeid: str) -> None:
    Path(os.environ["PEGBOARD_TEST_COUNTS"]).with_suffix(".now").write_text(nodeid, "utf-8")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _counts["failed"] += 1
    elif report.passed and report.when == "call":
        _counts["passed"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    Path(os.environ["PEGBOARD_TEST_COUNTS"]).write_text(json.dumps(_counts), "utf-8")
