"""Counts the code that one streamed chat request runs through, while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from members import CORE
from request_files import (
    MAIN_LINE,
    TOUR,
    Trace,
    core_files,
    main_line,
    main_line_sizes,
    traced,
)

MAX_MAIN_LINE = 2_730
"""Statements of the main line. The aim is 2,200 (docs/decisions/2026-11-26-second-wing.md)."""


@pytest.fixture(scope="module")
def trace(smollm2_gguf: Path) -> Trace:
    return traced(smollm2_gguf)


@pytest.mark.real_model
def test_both_processes_are_watched(trace: Trace) -> None:
    """The main line is part of the trace. Otherwise a smaller number would mean nothing."""
    main = {CORE / name for name in MAIN_LINE}
    assert main <= trace.api | trace.engine, (
        "a request does not run through these files of the main line"
    )
    assert main & trace.api and main & trace.engine


@pytest.mark.real_model
def test_the_tour_lists_these_files(trace: Trace) -> None:
    """The number of plugins depends on the machine (on the kernels that it can run). The number of
    core files does not."""
    assert "\n".join(core_files(trace)) in TOUR.read_text("utf-8"), (
        "run python tests/house/request_files.py --write"
    )


def test_the_main_line_is_short() -> None:
    sizes = main_line_sizes()
    assert sum(sizes.values()) <= MAX_MAIN_LINE, sizes
    assert "\n".join(main_line()) in TOUR.read_text("utf-8"), (
        "run python tests/house/request_files.py --write"
    )
