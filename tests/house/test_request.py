"""Counts the code that one streamed chat request runs through, while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from members import CORE, text_of
from request_files import MAIN_LINE, TOUR, Trace, core_files, main_line, traced

MAX_CORE_FILES = 24
"""Files of core/pegboard/pegboard that one request enters in the API process and the engine process
together."""
MAX_MAIN_LINE_FILES = 8
MAX_MAIN_LINE_LINES = 2_500


@pytest.fixture(scope="module")
def trace(smollm2_gguf: Path) -> Trace:
    return traced(smollm2_gguf)


@pytest.mark.real_model
def test_a_request_runs_through_few_files(trace: Trace) -> None:
    files = trace.of_core()
    assert len(files) <= MAX_CORE_FILES, (
        f"{len(files)} files, the limit is {MAX_CORE_FILES}:\n" + "\n".join(files)
    )


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
    lines = {name: len(text_of(CORE / name).splitlines()) for name in MAIN_LINE}
    assert len(lines) <= MAX_MAIN_LINE_FILES
    assert sum(lines.values()) < MAX_MAIN_LINE_LINES, lines
    assert "\n".join(main_line()) in TOUR.read_text("utf-8"), (
        "run python tests/house/request_files.py --write"
    )
